r"""The file of recorded decisions: a line with format and version, then all records in one compressed stream.

    penstock decisions 1 0.1.0\n
    zlib( length, checksum, record │ length, checksum, record │ … )

Length and checksum have four bytes each, the lowest first; the checksum is the crc32 of the record. After
each flush, all records so far can be read. So if the writer is killed, only the records after the last flush
are lost.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from penstock import __version__
from penstock.decisions.records import FORMAT, Finished, Record, decode_record, encode_record
from penstock.errors import DecisionLogError, UsageError

_HEAD = struct.Struct("<II")
_FIRST_LINE = re.compile(rb"penstock decisions ([0-9]{1,6}) ([0-9A-Za-z.+-]{1,64})\n")
_MAX_LINE = 100  # bytes
_CHUNK = 1 << 16
MAX_RECORD_BYTES = 1 << 28
_LEVEL = 1  # of zlib, the fastest: compression should not take a CPU core from the engine
_MOST_FILES = 1000


def create_log(path: Path) -> tuple[BinaryIO, Path]:
    """Create a file that only its owner may read, and write its first line.

    A file that exists is never overwritten: in that case the name of the new file gets a number at its end.

    Returns:
        The file, and its path.

    Raises:
        UsageError: the file cannot be written, or too many numbered files exist.
    """
    for number in range(1, _MOST_FILES):
        name = path if number == 1 else path.with_name(f"{path.name}.{number}")
        try:
            handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise _unwritable(name, error) from error
        file = open(handle, "wb", buffering=0)  # noqa: SIM115 - it is the caller's
        try:
            file.write(f"penstock decisions {FORMAT} {__version__}\n".encode())
        except OSError as error:
            file.close()
            raise _unwritable(name, error) from error
        return file, name
    raise UsageError(
        f"{path} and {_MOST_FILES - 2} numbered files with that name exist.",
        remedy="Remove old ones, or name another file with --record-decisions.",
        param="record_decisions",
    )


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"decisions cannot be recorded in {path}: {error.strerror}.",
        remedy="With --record-decisions name a file in an existing, writable directory.",
        param="record_decisions",
    )


class RecordStream:
    """Makes the compressed bytes of records, which follow the first line of a file."""

    def __init__(self) -> None:
        self._compressor = zlib.compressobj(_LEVEL)

    def add(self, record: Record) -> bytes:
        """Add a record, and return the next bytes of the file.

        Some bytes of the record may stay in the compressor until the next call.
        """
        data = encode_record(record)
        return self._compressor.compress(_HEAD.pack(len(data), zlib.crc32(data)) + data)

    def flush(self) -> bytes:
        """Return the bytes of all records so far that are still in the compressor."""
        return self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def finish(self) -> bytes:
        """Add the record `Finished`, and return the last bytes of the file."""
        return self.add(Record(call=Finished())) + self._compressor.flush(zlib.Z_FINISH)


class DecisionFile:
    """A file of decisions, for reading.

    Args:
        path: the path of the file.

    Attributes:
        is_whole: `records` has read the record `Finished`. If it has read all records without finding it, the
            engine was killed, is still running, or has stopped recording.
    """

    def __init__(self, path: Path) -> None:
        self.is_whole = False
        self._path = path

    def records(self) -> Iterator[Record]:
        """Yield the records up to the last complete one, except `Finished`.

        Raises:
            DecisionLogError: the file is missing, damaged, of another kind or of another version.
        """
        self.is_whole = False
        for number, data in enumerate(self._texts()):
            try:
                record = decode_record(data)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise self._damaged(number, str(error)) from error
            if isinstance(record.call, Finished):
                self.is_whole = True
                return
            yield record

    def _texts(self) -> Iterator[bytes]:
        """Yield the bytes of each complete record."""
        pending, number = bytearray(), 0
        for data in self._decompressed():
            pending += data
            start = 0
            while len(pending) - start >= _HEAD.size:
                length, checksum = _HEAD.unpack_from(pending, start)
                if length > MAX_RECORD_BYTES:
                    raise self._damaged(number, f"it would have {length} bytes")
                end = start + _HEAD.size + length
                if len(pending) < end:
                    break
                record = bytes(pending[start + _HEAD.size : end])
                if zlib.crc32(record) != checksum:
                    raise self._damaged(number, "its checksum is wrong")
                yield record
                start, number = end, number + 1
            del pending[:start]

    def _decompressed(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                self._check_first_line(file.readline(_MAX_LINE))
                stream = zlib.decompressobj()
                while data := file.read(_CHUNK):
                    while data and not stream.eof:
                        yield stream.decompress(data, _CHUNK)
                        data = stream.unconsumed_tail
        except OSError as error:
            raise DecisionLogError(
                f"{self._path} cannot be read: {error.strerror}.",
                remedy="Give a file that --record-decisions wrote.",
            ) from error
        except zlib.error as error:
            raise self._damaged(None, str(error)) from error

    def _check_first_line(self, line: bytes) -> None:
        match = _FIRST_LINE.fullmatch(line)
        if match is None:
            raise DecisionLogError(
                f"{self._path} is not a file of decisions.",
                remedy="Give a file that --record-decisions wrote.",
            )
        number, version = int(match[1]), match[2].decode()
        if (number, version) != (FORMAT, __version__):
            raise DecisionLogError(
                f"{self._path} was recorded by Penstock {version} in format {number}; this is Penstock "
                f"{__version__} with format {FORMAT}, whose scheduler may decide differently.",
                remedy=f"Replay it with Penstock {version}.",
                code="other_version",
            )

    def _damaged(self, number: int | None, why: str) -> DecisionLogError:
        where = "" if number is None else f" in record {number}"
        return DecisionLogError(
            f"{self._path} is damaged{where}: {why}.",
            remedy="Copy it again from the recording host, or record again.",
            code="damaged",
        )
