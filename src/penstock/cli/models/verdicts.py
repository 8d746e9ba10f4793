"""The verdict whether a model of this machine would run here, from its configuration and size.

Of a model only the configuration is read, which in a GGUF file is the header, and no weights. `penstock
doctor MODEL` looks closer.
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
    """The verdict on a model.

    Attributes:
        architecture: the architecture that the configuration or the header of a GGUF file names; "": none.
        runs: whether the model would run here; "too large": it would, with more free memory.
        reason: why the model would not run; "" if it would.
    """

    architecture: str
    runs: Runs
    reason: str = ""


def verdict_of(entry: Entry, free_bytes: int) -> Verdict:
    """Return whether Penstock has layers of its own for a model, and whether its files fit into memory.

    Args:
        free_bytes: bytes of memory that weights may take.
    """
    if entry.kind == "incomplete":
        return Verdict(architecture="", runs="no", reason="its download is not complete; pull it again")
    try:
        architecture = _architecture(entry)
    except PenstockError as error:
        return Verdict(architecture=_declared(entry), runs="no", reason=error.message)
    if entry.kind == "other":
        return Verdict(
            architecture=architecture, runs="no", reason="it has no weights in safetensors or GGUF"
        )
    if entry.size > free_bytes:
        text = f"{entry.size / 1e9:.1f} GB of files, and {free_bytes / 1e9:.1f} GB of memory are free here"
        return Verdict(architecture=architecture, runs="too large", reason=text)
    return Verdict(architecture=architecture, runs="yes")


def _architecture(entry: Entry) -> str:
    """Return the architecture of a model. Raises `ModelError` if Penstock's own layers cannot run it."""
    return load_spec(entry.path, "penstock").architecture


def _declared(entry: Entry) -> str:
    """Return the architecture that a model names; "" if that cannot be read."""
    try:
        if entry.kind == "GGUF":
            return GgufFile.open(entry.path).metadata.text("general.architecture", "")
        names = read_config(entry.path / "config.json").text_list("architectures")
    except PenstockError:
        return ""
    return names[0] if names else ""
