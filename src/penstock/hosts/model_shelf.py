"""Where a worker has models: found by their identity below its own directories, by no path of the head."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.errors import ModelError, PenstockError
from penstock.families.registry import DEMO_MODEL, resolve_model_directory
from penstock.kvstore.names import model_identity

_CONFIG = "config.json"
_MAX_DEPTH = 6  # as deep as a cache of a hub keeps its snapshots


class ModelShelf:
    """The models of this host.

    Args:
        directories: with models in them, or below.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = [directory.expanduser().resolve() for directory in directories]
        self._found: dict[bytes, Path] = {}

    @property
    def places(self) -> str:
        """Where models are looked for, for messages; empty where no directory was given."""
        return ", ".join(map(str, self._directories))

    def locate(self, identity: bytes) -> Path:
        """Return the directory of a model. It is looked up anew each time: files change.

        Raises:
            ModelError: this host does not have it.
        """
        known = self._found.get(identity)
        if known is not None and _identity_of(known) == identity:
            return known
        for directory in self._candidates():
            if _identity_of(directory) == identity:
                self._found[identity] = directory
                return directory
        places = self.places or "no directory (--models-dir)"
        raise ModelError(
            f"this host does not have the model that the head serves; it has looked in {places}.",
            remedy="Copy the model's files to this host, and name a directory above them with --models-dir.",
            code="model_not_here",
        )

    def _candidates(self) -> Iterator[Path]:
        yield resolve_model_directory(DEMO_MODEL)
        for directory in self._directories:
            for place, below, files in os.walk(directory, followlinks=True):
                if _CONFIG in files:
                    yield Path(place)
                if len(Path(place).relative_to(directory).parts) >= _MAX_DEPTH:
                    below.clear()
                below.sort()


def _identity_of(directory: Path) -> bytes:
    """Return the identity of the model in a directory; empty where there is none that can be read."""
    try:
        return model_identity(directory)
    except (PenstockError, OSError, ValueError):
        return b""
