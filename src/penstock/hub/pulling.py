"""The download behind `penstock pull`, without its output: from a model's name to a complete snapshot.

Files appear in the snapshot, and the branch comes to mean it, only when all files are here. An interrupted
pull therefore leaves nothing that looks like a model. Called by the command line alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import msgspec

from penstock.errors import DiskSpaceError, HubContentError, UsageError
from penstock.hub.client import HubAddress, HubClient
from penstock.hub.repository import HubFile, HubRepository
from penstock.hub.selection import INDEX_FILE, chosen_gguf, describing_files, weight_files
from penstock.hub.transfer import Progress, Source, bytes_here, is_here, transfer
from penstock.local_models.gguf_names import gguf_models
from penstock.local_models.hub_cache import MAIN, CachedRepository
from penstock.local_models.model_name import ModelName

FreeBytes = Callable[[Path], int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """A model that is in the cache now.

    Attributes:
        revision: the branch, tag or commit that was asked for.
        path: the snapshot, or the GGUF file in it; of a split GGUF file, the first part.
        size: bytes of all its files.
        downloaded: bytes that were not in the cache before.
    """

    name: ModelName
    revision: str
    commit: str
    path: Path
    size: int
    downloaded: int
    files: tuple[HubFile, ...]

    @property
    def to_serve(self) -> str:
        """The text that `penstock serve` takes for the model."""
        return str(self.name) if self.revision == MAIN else str(self.path)


def free_bytes_at(path: Path) -> int:
    """Return the free bytes of the disk at a path, which need not exist."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


@dataclass(frozen=True, slots=True)
class Puller:
    """Pulls models from one hub.

    Attributes:
        progress: is told how the transfer of each file goes.
        free_bytes: returns the free bytes of the disk that a path is on.
        pause: waits so many seconds, before a transfer that was cut is tried again.
    """

    client: HubClient
    progress: Progress
    _: KW_ONLY
    free_bytes: FreeBytes = free_bytes_at
    pause: Callable[[float], None] = time.sleep

    def pull(self, name: ModelName, revision: str = MAIN) -> Pulled:
        """Download what Penstock can use of a model, unless it is here.

        Raises:
            UsageError: the revision cannot be the name of a branch, tag or commit.
            HubError: the hub does not give the model, or sends other bytes than it has announced.
            DiskSpaceError: the files do not fit on the disk, or the cache cannot be read or written.
        """
        require_revision(revision)
        repository = self.client.repository(name.path, revision)
        cache = CachedRepository.of(name)
        source = Source(
            client=self.client, name=name.path, commit=repository.commit, cache=cache, pause=self.pause
        )
        with _writing(cache):
            files, downloaded = self._fetch_files(source, repository, name)
            _link_snapshot(cache, repository.commit, files)
            if revision != repository.commit:
                _write_reference(cache, revision, repository.commit)
        snapshot = cache.snapshot(repository.commit)
        return Pulled(
            name=name,
            revision=revision,
            commit=repository.commit,
            path=snapshot / gguf_models(file.path for file in files)[0].first if name.file else snapshot,
            size=sum(file.size for file in files),
            downloaded=downloaded,
            files=tuple(files),
        )

    def _fetch_files(
        self, source: Source, repository: HubRepository, name: ModelName
    ) -> tuple[list[HubFile], int]:
        """Fetch the files that are wanted; return them, and how many bytes were not in the cache before."""
        if name.file:
            size_of = {file.path: file.size for file in repository.files}
            files = chosen_gguf(repository, name, size_of)
            return files, self._fetch(source, files)
        describing = describing_files(repository, name)
        downloaded = self._fetch(source, [file for file in describing if file.path == INDEX_FILE])
        weights = weight_files(repository, name, _shards(source.cache, describing))
        files = [*describing, *weights]
        return files, downloaded + self._fetch(source, files)

    def _fetch(self, source: Source, files: Sequence[HubFile]) -> int:
        missing = [file for file in files if not is_here(source.cache, file)]
        num_bytes = sum(file.size - bytes_here(source.cache, file) for file in missing)
        free = self.free_bytes(source.cache.directory)
        if num_bytes > free:
            raise DiskSpaceError(
                f"{source.name} needs {num_bytes / 1e9:.2f} GB more on the disk of "
                f"{source.cache.directory.parent}, which has {free / 1e9:.2f} GB free.",
                remedy="Free space (`penstock ls` and `penstock rm`), or set HF_HUB_CACHE to another folder.",
            )
        for file in missing:
            transfer(source, file, self.progress)
        return num_bytes


@contextlib.contextmanager
def _writing(cache: CachedRepository) -> Iterator[None]:
    """Say in words of ours that the system does not let us read the cache or write into it."""
    try:
        yield
    except BrokenPipeError:  # of the output
        raise
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        first = "Free space" if is_full else "Make the folder writable for this user"
        raise DiskSpaceError(
            f"{error.filename or cache.directory} cannot be read or written: {error.strerror or error}.",
            remedy=f"{first}, or set HF_HUB_CACHE to another folder. The same command continues where it "
            "stopped.",
            code="disk_failed",
        ) from error


def require_revision(revision: str) -> None:
    """Raise `UsageError` unless this can be the name of a branch, tag or commit."""
    parts = revision.split("/")
    if not revision.isascii() or not revision.isprintable() or any(part.strip(".") == "" for part in parts):
        raise UsageError(
            f"--revision {revision[:200]!r} cannot be a branch, tag or commit.",
            remedy="Leave it out for main.",
            param="revision",
        )


def pull(name: ModelName, address: HubAddress, progress: Progress, revision: str = MAIN) -> Pulled:
    """Download a model from a hub, and close the connections. Raises what `Puller.pull` does."""
    with HubClient(address) as client:
        return Puller(client, progress).pull(name, revision)


def _shards(cache: CachedRepository, describing: Sequence[HubFile]) -> set[str]:
    """Return the names of the files with the weights, as the index lists them; none if there is no index."""
    index = next((file for file in describing if file.path == INDEX_FILE), None)
    if index is None:
        return set()
    try:
        content = (cache.blobs / index.blob).read_bytes()
        return set(msgspec.json.decode(content, type=_Index).weight_map.values())
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise HubContentError(
            f"{cache.name}: {INDEX_FILE} is not the index of a checkpoint: {error}.",
            remedy="Tell the owner of the repository, or choose another --revision.",
        ) from error


def _link_snapshot(cache: CachedRepository, commit: str, files: Sequence[HubFile]) -> None:
    """Make the snapshot of a commit: a relative link to the blob of each file, under the file's name."""
    for file in files:
        link = cache.snapshot(commit) / file.path
        link.parent.mkdir(parents=True, exist_ok=True)
        target = os.path.relpath(cache.blobs / file.blob, link.parent)
        if not link.is_symlink() or os.readlink(link) != target:
            link.unlink(missing_ok=True)
            link.symlink_to(target)


def _write_reference(cache: CachedRepository, revision: str, commit: str) -> None:
    """Let a branch or tag mean a commit. Its file is replaced in one step, since other programs read it."""
    reference = cache.directory / "refs" / revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    if cache.commit_of(revision) == commit:
        return
    written = reference.with_name(f"{reference.name}.new")
    try:
        written.write_text(commit, encoding="ascii")
        os.replace(written, reference)
    finally:
        with contextlib.suppress(FileNotFoundError):
            written.unlink()
