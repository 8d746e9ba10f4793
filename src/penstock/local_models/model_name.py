"""`ModelName`: what a user types for a model that is not a path, such as `org/name:Q4_K_M` or `qwen3:8b`.

The name does not say in which store the model is: `local_models.locating` looks into all of them. `hub`,
`local_models.removal` and the command line use the name too.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

from penstock.errors import UsageError

_ALLOWED = frozenset(string.ascii_letters + string.digits + "-_.")
_MAX_PART = 200  # characters; a file system takes 255
_MAX_PARTS = 4
EXAMPLE = "Qwen/Qwen2.5-0.5B-Instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelName:
    """A name of a model, and perhaps of one of its files.

    Attributes:
        repository: the parts between slashes: `("org", "name")` on the hub, `("qwen3",)` in Ollama's store.
        file: the text after the colon: a file of the repository, a quantisation such as `Q4_K_M`, or Ollama's
            tag; "" if there is no colon.
    """

    repository: tuple[str, ...]
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> ModelName | None:
        """Return the name that a text spells, or None if the text cannot be the name of a model."""
        named, colon, file = text.partition(":")
        repository = tuple(named.split("/"))
        if len(repository) > _MAX_PARTS or not all(map(_is_part, repository)):
            return None
        if colon and not all(map(_is_part, file.split("/"))):
            return None
        return cls(repository=repository, file=file)

    @classmethod
    def of_hub(cls, text: str) -> ModelName:
        """Return the name of a model of the hub.

        Raises:
            UsageError: the text is not of the form `org/name` or `org/name:FILE`.
        """
        name = cls.parse(text)
        if name is None or not name.is_of_hub:
            raise UsageError(
                f"{text[:_MAX_PART]!r} is not the name of a model on the hub.",
                remedy=f"Write it as {EXAMPLE}, or add a colon and a file or quantisation.",
                param="name",
            )
        return name

    @property
    def is_of_hub(self) -> bool:
        """Whether the hub could have a model of this name."""
        return len(self.repository) == 2 and not any("--" in part for part in self.repository)

    @property
    def path(self) -> str:
        """The name without the file."""
        return "/".join(self.repository)

    def __str__(self) -> str:
        return f"{self.path}:{self.file}" if self.file else self.path


def _is_part(part: str) -> bool:
    return 0 < len(part) <= _MAX_PART and _ALLOWED.issuperset(part) and bool(part.strip("."))
