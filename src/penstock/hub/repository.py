"""The content of a repository on the hub, as values: files with sizes and hashes.

`hub.client` gets the values from a server, so they are checked here. No path of a file leads out of the
repository, and a hash, which becomes the name of a file in the cache, has the form of a hash.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import msgspec

from penstock.errors import HubContentError

_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_SIZE = 1 << 50
_Size = Annotated[int, msgspec.Meta(ge=0, le=_MAX_SIZE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """One file of a repository at one commit.

    Attributes:
        path: path in the repository, with slashes.
        blob: hash that names the file in caches: SHA-256 of the bytes of a large file, else Git's SHA-1.
    """

    path: str
    size: int
    blob: str

    @property
    def is_large(self) -> bool:
        """Whether the file counts as large: its hash is SHA-256, and not Git's SHA-1."""
        return len(self.blob) == 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRepository:
    """A repository at one commit."""

    commit: str
    files: tuple[HubFile, ...]


class _Lfs(msgspec.Struct):
    sha256: str
    size: _Size


class _Sibling(msgspec.Struct):
    rfilename: str
    size: _Size | None = None
    blobId: str = ""
    lfs: _Lfs | None = None


class _ModelInfo(msgspec.Struct):
    sha: str
    siblings: list[_Sibling] = []


def repository_of(answer: bytes, asked: str) -> HubRepository:
    """Return what the hub has answered about a repository.

    Args:
        answer: the answer's body, JSON.
        asked: the address that was asked, for errors.

    Raises:
        HubContentError: a hub does not answer so, or a path or hash cannot be right.
    """
    try:
        info = msgspec.json.decode(answer, type=_ModelInfo)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unusable(asked, str(error)) from error
    if not _COMMIT.fullmatch(info.sha):
        raise _unusable(asked, f"{info.sha[:80]!r} is not a commit")
    return HubRepository(commit=info.sha, files=tuple(_file(each, asked) for each in info.siblings))


def _file(sibling: _Sibling, asked: str) -> HubFile:
    path, lfs = sibling.rfilename, sibling.lfs
    if not path.isprintable() or "\\" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise _unusable(asked, f"{path[:200]!r} is not the path of a file")
    if lfs is not None and _SHA256.fullmatch(lfs.sha256):
        return HubFile(path=path, size=lfs.size, blob=lfs.sha256)
    if lfs is None and sibling.size is not None and _SHA1.fullmatch(sibling.blobId):
        return HubFile(path=path, size=sibling.size, blob=sibling.blobId)
    raise _unusable(asked, f"size and hash of {path[:200]!r} are missing")


def _unusable(asked: str, why: str) -> HubContentError:
    return HubContentError(
        f"{asked} did not send a valid answer of a hub: {why}.",
        remedy="Check --endpoint (or HF_ENDPOINT): it must be the hub, or a mirror with the same routes.",
    )
