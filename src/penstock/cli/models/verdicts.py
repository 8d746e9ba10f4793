"""The verdict whether a model of this machine would run here, from its configuration and size.

Opens no weights, and of a GGUF file the header alone. `penstock doctor MODEL` looks closer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.errors import PenstockError
from penstock.families.config_fields import read_config
from penstock.families.registry import load_spec
from penstock.gguf.file import GgufFile
from penstock.local_models.inventory import Entry

Runs = Literal["yes", "no", "too large"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The facts known of a model without opening it.

    Attributes:
        architecture: as its configuration, or the header of a GGUF file, names it; "" where it names none.
        reason: why it would not run; "" where it would.
    """

    architecture: str
    runs: Runs
    reason: str = ""


def verdict_of(entry: Entry, free_bytes: int) -> Verdict:
    """Return whether Penstock's own layers know the family, and whether the weights fit into memory.

    Args:
        free_bytes: of memory that weights may take.
    """
    if entry.kind == "incomplete":
        return Verdict(architecture="", runs="no", reason="its download is not complete; pull it again")
    try:
        architecture = _architecture(entry)
    except PenstockError as error:
        return Verdict(architecture=_declared(entry), runs="no", reason=error.message)
    if entry.size > free_bytes:
        text = f"{entry.size / 1e9:.1f} GB of files, and {free_bytes / 1e9:.1f} GB of memory are free here"
        return Verdict(architecture=architecture, runs="too large", reason=text)
    return Verdict(architecture=architecture, runs="yes")


def _architecture(entry: Entry) -> str:
    """Return the architecture of a model that we have. Raises `ModelError` for every other one."""
    return load_spec(entry.path, "penstock").architecture


def _declared(entry: Entry) -> str:
    """Return what a model calls itself; "" where that cannot be read."""
    try:
        if entry.kind == "GGUF":
            return GgufFile.open(entry.path).metadata.text("general.architecture", "")
        names = read_config(entry.path / "config.json").text_list("architectures")
    except PenstockError:
        return ""
    return names[0] if names else ""
