"""The directory that profiles are written into: the server chooses their names and bounds their number.

No link in the directory is followed. A profile gets its name when it is written completely. Only this module
opens the directory, for `server.routes.profiler`.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator

from penstock.errors import InvalidRequestError, OverloadedError, UnavailableError

_NAME = re.compile(r"profile-[0-9]{8}-[0-9]{6}-[0-9a-f]{8}\.json")
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ProfileFolder:
    """The directory that keeps profiles.

    Args:
        path: path of the directory; None: there is none, and profiles are refused.
        max_files: number of profiles that may lie there.
        now: returns the date in UTC, for names.
    """

    def __init__(
        self, path: str | None, max_files: int, now: Callable[[], time.struct_time] = time.gmtime
    ) -> None:
        self._path = path
        self._max_files = max_files
        self._now = now

    def require_room(self) -> None:
        """Raise `PenstockError` unless one more profile may be written."""
        with self._opened() as directory:
            count = sum(_NAME.fullmatch(name) is not None for name in os.listdir(directory))
        if count >= self._max_files:
            raise OverloadedError(
                f"the profile directory holds {count} profiles, which is the limit.",
                remedy="Remove some, or raise --max-profiles.",
                code="too_many_profiles",
            )

    def write(self, pieces: Iterable[bytes]) -> tuple[str, int]:
        """Write a profile; return its name and its number of bytes. A failed one leaves no file behind."""
        name = f"profile-{time.strftime('%Y%m%d-%H%M%S', self._now())}-{secrets.token_hex(4)}.json"
        part = f".{name}.part"
        with self._opened() as directory:
            try:
                with open(os.open(part, _CREATE, 0o600, dir_fd=directory), "wb") as file:
                    num_bytes = sum(file.write(piece) for piece in pieces)
                os.rename(part, name, src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part, dir_fd=directory)
                raise
        return name, num_bytes

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Yield a descriptor of the directory. An error of the system within becomes a `PenstockError`."""
        if self._path is None:
            raise InvalidRequestError(
                "this server has no directory for profiles.",
                remedy="Start it with --profile-dir DIRECTORY.",
                code="no_profile_dir",
            )
        try:
            directory = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                yield directory
            finally:
                os.close(directory)
        except OSError as error:
            raise UnavailableError(
                f"the profile directory cannot be used: {error.strerror}.",
                remedy="Check that --profile-dir exists, is writable and has space.",
                code="profile_not_written",
            ) from error
