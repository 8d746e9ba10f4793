"""The digests of the tensor bytes that a rank reads, and their comparison with those of the first load.

A stage that is started again must hold the weights that its pipeline has served with since its start. The
rank digests by xxh3-128 what it reads (`weights.loader`, `weights.quantized_formats`), in the order of the
tensor's bytes. The supervisor keeps the digests of the first load and gives them to the replacement. Other
bytes are a `ModelChangedError`, before the first step.

A load reads in one thread. Where it looks at the bytes again, for NaN or to convert them, a thread beside it
digests them meanwhile (`ReadDigests.beside`): a look takes longer than a digest.

A table is a string of records without order: 16 bytes that name a range of a tensor, and 16 bytes of digest.
A range that the table does not have is not compared. Torch-free.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread

import xxhash

from penstock.errors import ModelChangedError

RECORD_BYTES = 32
ASIDE_BYTES = 1 << 20  # fewer are digested sooner than another thread is woken
_KEY_BYTES = 16


@dataclass(slots=True, kw_only=True)
class _Range:
    """Bytes `[begin, end)` of a tensor, or of a band of its columns, that were read one after the other."""

    file: str
    tensor: str
    band: str
    begin: int
    end: int
    state: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)

    def continues(self, tensor: str, band: str, offset: int) -> bool:
        """Return whether a read from `offset` on begins where this range ends."""
        return self.end == offset and self.tensor == tensor and self.band == band

    def record(self) -> bytes:
        return record(f"{self.tensor}\0{self.band}\0{self.begin}\0{self.end}", self.state.digest())


class ReadDigests:
    """The digests of one load. Only the range that is being read has a state; the others are records.

    Args:
        expected: table of the first load; empty while there is none.
    """

    def __init__(self, expected: bytes = b"") -> None:
        self._expected = parse_table(expected)
        self._range: _Range | None = None
        self._ranges_read: dict[tuple[str, str], list[tuple[int, int]]] = {}  # by tensor and band
        self._records: list[bytes] = []
        self._aside: _Aside | None = None  # from the first `beside` to `finish`

    @contextmanager
    def beside(
        self, file: str, tensor: str, offset: int, memory: memoryview, band: str = ""
    ) -> Iterator[None]:
        """Do `add` while the caller works on the bytes without changing them."""
        if len(memory) < ASIDE_BYTES:
            self.add(file, tensor, offset, memory, band)
            yield
            return
        if self._aside is None:
            self._aside = _Aside()
        self._aside.begin(lambda: self.add(file, tensor, offset, memory, band))
        try:
            yield
        finally:
            self._aside.await_end()  # a changed tensor is told rather than what is wrong with its numbers

    def add(self, file: str, tensor: str, offset: int, memory: memoryview, band: str = "") -> None:
        """Add the bytes just read. A repeated read is not digested again.

        Args:
            file, tensor: their names.
            offset: offset of the bytes in the tensor, or in the band.
            band: the columns that are read, where they are not all.

        Raises:
            ModelChangedError: the range before this one, now complete, is not that of the first load.
        """
        current = self._range
        if current is None or not current.continues(tensor, band, offset):
            self._complete()
            if self._has_read(tensor, band, offset, offset + len(memory)):
                return
            current = self._range = _Range(file=file, tensor=tensor, band=band, begin=offset, end=offset)
        current.state.update(memory)
        current.end += len(memory)

    def finish(self) -> bytes:
        """Check the last range and return the table of this load. Raises `ModelChangedError`."""
        self._aside = None
        self._complete()
        return b"".join(self._records)

    def _has_read(self, tensor: str, band: str, begin: int, end: int) -> bool:
        ranges = self._ranges_read.get((tensor, band), [])
        return any(first <= begin and end <= last for first, last in ranges)

    def _complete(self) -> None:
        """Make a record of the range that was read, and compare it."""
        done, self._range = self._range, None
        if done is None:
            return
        self._ranges_read.setdefault((done.tensor, done.band), []).append((done.begin, done.end))
        made = done.record()
        self._records.append(made)
        if self._expected.get(made[:_KEY_BYTES], made[_KEY_BYTES:]) != made[_KEY_BYTES:]:
            raise ModelChangedError(file=done.file, tensor=done.tensor)


class _Aside:
    """A thread that does one thing at a time for another.

    A hand-over takes half as long as with the pools of the standard library, which counts here: there are
    hundreds in a second.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ends: SimpleQueue[Exception | None] = SimpleQueue()
        Thread(target=_do, args=(self._calls, self._ends), name="digests", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def begin(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def await_end(self) -> None:
        """Wait for the end of the call; raise its error."""
        error = self._ends.get()
        if error is not None:
            raise error


def _do(calls: SimpleQueue[Callable[[], None] | None], ends: SimpleQueue[Exception | None]) -> None:
    while (call := calls.get()) is not None:
        error = _error_of(call)
        del call  # it holds the bytes: whoever hears of the end may let go of them
        ends.put(error)


def _error_of(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def record(name: str, digest: bytes) -> bytes:
    """Return a record of a table: the digest, 16 bytes, of what `name` stands for."""
    return xxhash.xxh3_128_digest(name.encode("utf-8", "surrogatepass")) + digest


def parse_table(table: bytes) -> dict[bytes, bytes]:
    """Return the digests of a table by the keys of their names."""
    return {
        table[begin : begin + _KEY_BYTES]: table[begin + _KEY_BYTES : begin + RECORD_BYTES]
        for begin in range(0, len(table), RECORD_BYTES)
    }
