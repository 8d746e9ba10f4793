"""The bytes of a GGUF file's header, read in order and never further than the file goes.

Owns the bounds: a length or count that a file states is compared with what the file still has before anything
is read or made for it. Called by `gguf.metadata` and `gguf.part`. Knows no keys and no tensors.
"""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path
from typing import NoReturn

from penstock.errors import CheckpointError
from penstock.told_text import printable

MAX_HEADER_BYTES = 256 << 20
_FIRST_READ = 1 << 20
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class HeaderBytes:
    """The beginning of a file, of which more is read as it is needed.

    The argument `what` of the methods is a name for errors: that of the thing which is read.

    Args:
        path: path of a regular file.
        descriptor: descriptor of that file, opened for reading.

    Attributes:
        content: the bytes that were read so far.
        position: position of the next byte to take.
        file_size: size of the file in bytes.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self._name = path.name
        if not stat.S_ISREG(status.st_mode):
            self.refuse("a regular file", "something else")
        self._descriptor = descriptor
        self.file_size = status.st_size
        self.content = b""
        self.position = 0

    def refuse(self, expected: str, found: str, *, tensor: str = "", key: str = "") -> NoReturn:
        """Raise `CheckpointError` about this file."""
        raise CheckpointError(
            file=self._name, tensor=printable(tensor), key=printable(key), expected=expected, found=found
        )

    def require(self, num_bytes: int, what: str) -> int:
        """Read until `content` has this many bytes from `position` on, and return where they end.

        Raises:
            CheckpointError: the file ends before, or its header would be longer than `MAX_HEADER_BYTES`.
        """
        end = self.position + num_bytes
        if end > len(self.content):
            self._read_to(end, what)
        return end

    def take(self, num_bytes: int, what: str) -> bytes:
        """Return the next `num_bytes` bytes."""
        end = self.require(num_bytes, what)
        taken = self.content[self.position : end]
        self.position = end
        return taken

    def u32(self, what: str) -> int:
        """Return the next 4 bytes as a number."""
        value: int = _U32.unpack(self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        """Return the next 8 bytes as a number."""
        value: int = _U64.unpack(self.take(8, what))[0]
        return value

    def count(self, item_bytes: int, what: str) -> int:
        """Return the next number, which counts items of at least `item_bytes` bytes that follow it."""
        count = self.u64(what)
        room = min(self.file_size, MAX_HEADER_BYTES) - self.position
        if count * item_bytes > room:
            self.refuse(
                f"at least {count * item_bytes} bytes after {what} of {count}",
                f"{room} bytes up to the end of the file (truncated or incomplete)",
            )
        return count

    def text(self, what: str, max_bytes: int = MAX_HEADER_BYTES) -> str:
        """Return the next string: a length, and that many bytes of UTF-8."""
        length = self.count(1, f"a length of {what}")
        if length > max_bytes:
            self.refuse(f"{what} of at most {max_bytes} bytes", str(length))
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            self.refuse(f"{what} in UTF-8", f"the byte 0x{error.object[error.start]:02x}")

    def texts(self, count: int, what: str) -> list[str]:
        """Return the next `count` strings. Vocabularies have hundreds of thousands of them."""
        texts: list[str] = []
        content, position, size = self.content, self.position, len(self.content)
        unpack = _U64.unpack_from
        while len(texts) < count:
            start = position + 8
            end = start + unpack(content, position)[0] if start <= size else start
            if end > size:
                self.position = position
                self._read_whole_text(what)
                content, size = self.content, len(self.content)
                continue
            try:
                texts.append(content[start:end].decode())
            except UnicodeDecodeError as error:
                shown = f"the byte 0x{error.object[error.start]:02x} in that of index {len(texts)}"
                self.refuse(f"{what} in UTF-8", shown)
            position = end
        self.position = position
        return texts

    def _read_whole_text(self, what: str) -> None:
        """Read on until the next string is in `content`, and leave `position` in front of it."""
        start = self.position
        length = self.count(1, f"a length of {what}")
        self.require(length, what)
        self.position = start

    def _read_to(self, end: int, what: str) -> None:
        if end > self.file_size:
            self.refuse(
                f"{what} of {end - self.position} bytes from byte {self.position} on",
                f"a file of {self.file_size} bytes (truncated)",
            )
        if end > MAX_HEADER_BYTES:
            self.refuse(f"a header of at most {MAX_HEADER_BYTES} bytes", f"{what} up to byte {end}")
        target = min(max(end, 4 * len(self.content), _FIRST_READ), self.file_size, MAX_HEADER_BYTES)
        parts, size = [self.content], len(self.content)
        while size < target:
            part = os.pread(self._descriptor, target - size, size)
            if not part:
                self.refuse(f"{self.file_size} bytes", f"{size} bytes (it was truncated during the read)")
            parts.append(part)
            size += len(part)
        self.content = b"".join(parts)
