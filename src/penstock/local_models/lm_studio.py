"""The models in LM Studio's folder: PUBLISHER/REPOSITORY/FILE.gguf.

Of a model only the names of its files are read. LM Studio's settings say where the folder is. Nothing is
changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.local_models.gguf_names import GgufModel, gguf_models
from penstock.local_models.model_name import ModelName

_MAX_SETTINGS_BYTES = 1 << 20


class _Settings(msgspec.Struct):
    downloadsFolder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LmStudioModel:
    """One model of the folder: a GGUF file, or the parts of a split."""

    publisher: str
    repository: str
    directory: Path
    gguf: GgufModel

    @property
    def path(self) -> Path:
        """The file, or the first part of a split."""
        return self.directory / self.gguf.first

    def is_meant_by(self, name: ModelName) -> bool:
        """Return whether a user means this model. Capitals do not count, nor `-GGUF` after the repository.

        `publisher/repository` and `repository` mean all models of the repository. With `:Q4_K_M`, or another
        word of `GgufModel.is_meant_by`, they mean one of these. The name of a file means its model.
        """
        asked = [part.casefold() for part in name.repository]
        if len(asked) == 1 and not name.file and self.gguf.is_meant_by(asked[0]):
            return True
        if len(asked) > 2 or (len(asked) == 2 and asked[0] != self.publisher.casefold()):
            return False
        known = self.repository.casefold()
        return asked[-1] in (known, known.removesuffix("-gguf")) and (
            not name.file or self.gguf.is_meant_by(name.file)
        )


def lm_studio_directories() -> list[Path]:
    """Return the folders of LM Studio's models: the one that its user chose, or its own; then the old one."""
    home = _home()
    chosen = _chosen_folder(home / "settings.json")
    own = [Path(os.path.expanduser(chosen))] if chosen else [home / "models"]
    return [*own, Path(os.path.expanduser("~/.cache/lm-studio/models"))]


def lm_studio_models() -> Iterator[LmStudioModel]:
    """Yield every GGUF model of LM Studio's folders."""
    for folder in lm_studio_directories():
        for directory in sorted(folder.glob("*/*")):
            for gguf in gguf_models(_files_in(directory)):
                yield LmStudioModel(
                    publisher=directory.parent.name,
                    repository=directory.name,
                    directory=directory,
                    gguf=gguf,
                )


def _files_in(directory: Path) -> list[str]:
    """Return the names of a folder's files; there are none if it cannot be listed, or is a file."""
    try:
        return [path.name for path in directory.iterdir() if path.is_file()]
    except OSError:
        return []


def _home() -> Path:
    """Return LM Studio's own folder; a file in the user's home says where it was moved to."""
    try:
        moved = Path(os.path.expanduser("~/.lmstudio-home-pointer")).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        moved = ""
    return Path(os.path.expanduser(moved or "~/.lmstudio"))


def _chosen_folder(settings: Path) -> str:
    try:
        with settings.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_SETTINGS_BYTES), type=_Settings).downloadsFolder
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return ""
