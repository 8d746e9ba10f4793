"""The local cache of the hub, in the layout of huggingface_hub: where a model is, and which models there are.

In `models--org--name`, the folder of one model, `refs/main` names a commit, `snapshots/<commit>` has a link
to each file of that commit, and `blobs` has the files themselves, named by their hashes. Other programs share
the cache. This module opens no connection and does not import huggingface_hub; `hub` downloads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.config.home import home_path
from penstock.local_models.model_name import ModelName

MAIN = "main"
INCOMPLETE = ".incomplete"
_PREFIX = "models--"


def hub_cache_directory() -> Path:
    """Return the folder in which huggingface_hub keeps models. Raises `UsageError` where there is no home."""
    explicit = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{user_cache}/huggingface"
    return home_path(explicit or f"{home}/hub", "Set HOME, or HF_HUB_CACHE to a folder.")


@dataclass(frozen=True, slots=True)
class CachedRepository:
    """The folder of one model in the cache; it need not exist."""

    directory: Path

    @classmethod
    def of(cls, name: ModelName) -> CachedRepository:
        return cls(hub_cache_directory() / (_PREFIX + "--".join(name.repository)))

    @property
    def name(self) -> str:
        """The name of the model on the hub."""
        return self.directory.name.removeprefix(_PREFIX).replace("--", "/")

    @property
    def blobs(self) -> Path:
        return self.directory / "blobs"

    @property
    def lock_directory(self) -> Path:
        """The folder in which every program that downloads into this cache locks a blob."""
        return self.directory.parent / ".locks" / self.directory.name

    def snapshot(self, commit: str) -> Path:
        return self.directory / "snapshots" / commit

    def commit_of(self, revision: str) -> str:
        """Return the commit that a branch or tag meant when it was downloaded; "" if it never was."""
        try:
            commit = (self.directory / "refs" / revision).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError, ValueError):
            return ""
        return commit if commit.isalnum() else ""

    def main_snapshot(self) -> Path | None:
        """Return the folder with the files of the branch `main`, or None if it was not downloaded."""
        commit = self.commit_of(MAIN)
        snapshot = self.snapshot(commit)
        return snapshot if commit and snapshot.is_dir() else None

    def snapshots(self) -> list[Path]:
        """Return the folders with the files of each commit that was downloaded."""
        return _directories(self.directory / "snapshots")

    def revisions_of(self, commit: str) -> list[str]:
        """Return the branches and tags that meant this commit."""
        refs = self.directory / "refs"
        names = [path.relative_to(refs).as_posix() for path in sorted(refs.rglob("*")) if path.is_file()]
        return [name for name in names if self.commit_of(name) == commit]

    def incomplete_files(self) -> list[Path]:
        """Return the files that interrupted downloads have left."""
        return sorted(self.blobs.glob(f"*{INCOMPLETE}"))


def cached_repositories() -> Iterator[CachedRepository]:
    """Yield the models of the cache, in the order of their names."""
    for directory in _directories(hub_cache_directory()):
        if directory.name.startswith(_PREFIX):
            yield CachedRepository(directory)


def files_below(directory: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it. Links to missing files are left out."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def _directories(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir())
    except OSError:
        return []
