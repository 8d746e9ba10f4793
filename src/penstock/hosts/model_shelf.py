"""Finds a worker's own copies of models by their content identity; no path of the head is used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.config.home import home_path
from penstock.errors import CheckpointError, ModelError, PenstockError
from penstock.families.registry import DEMO_MODEL, resolve_model_directory
from penstock.gguf.part_names import SUFFIX, part_paths
from penstock.kvstore.names import model_identity

_REMEDY = "Set HOME, or give --models-dir a whole path."
_CONFIG = "config.json"
_MAX_DEPTH = 6  # levels of folders: the caches of hubs keep models as deep as that


class ModelShelf:
    """The models on the disks of this host, to be found by their identity.

    Args:
        directories: directories that are searched for models, with all below them.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = [home_path(each, _REMEDY).resolve() for each in directories]
        self._found: dict[bytes, Path] = {}

    @property
    def places(self) -> str:
        """The directories that are searched, with commas between, for texts; empty where none was given."""
        return ", ".join(map(str, self._directories))

    def locate(self, identity: bytes) -> Path:
        """Return the directory of a model, or its GGUF file.

        Each call reads the disk again, since files change.

        Args:
            identity: as `kvstore.names.model_identity` returns it.

        Raises:
            ModelError: this host does not have the model.
        """
        known = self._found.get(identity)
        if known is not None and _identity_of(known) == identity:
            return known
        for model in self._candidates():
            if _identity_of(model) == identity:
                self._found[identity] = model
                return model
        places = self.places or "no directory (--models-dir)"
        raise ModelError(
            f"this host does not have the head's model; it searched {places}.",
            remedy="Copy the model's files to this host, and give a directory above them with --models-dir.",
            code="model_not_here",
        )

    def _candidates(self) -> Iterator[Path]:
        yield resolve_model_directory(DEMO_MODEL)
        for directory in self._directories:
            for place, below, files in os.walk(directory, followlinks=True):
                if _CONFIG in files:
                    yield Path(place)
                yield from _gguf_models(Path(place), files)
                if len(Path(place).relative_to(directory).parts) >= _MAX_DEPTH:
                    below.clear()
                below.sort()


def _gguf_models(directory: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yield the GGUF models of a directory: single files, and the first parts of those that are split."""
    for name in sorted(names):
        path = directory / name
        if path.suffix.lower() != SUFFIX:
            continue
        with contextlib.suppress(CheckpointError):  # other parts are missing
            if part_paths(path)[0] == path:
                yield path


def _identity_of(model: Path) -> bytes:
    """Return the identity of a directory or a GGUF file; empty if it is not a model that can be read."""
    try:
        return model_identity(model)
    except (PenstockError, OSError, ValueError):
        return b""
