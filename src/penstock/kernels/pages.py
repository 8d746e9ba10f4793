"""Allocates a rank's large memory: zeroed pages of the system, huge pages if there are any.

Weights, keys and values are read in long streams or in far-apart pieces. With huge pages the processor looks
up an address once for 2 MiB, and not once for 4 KiB. A huge page must lie whole in its mapping, so pieces
that are not much larger than a huge page share mappings (`shared_pages`). With this the weights of a layer
are read a seventh faster. Pages are resident only once they are written.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref

import torch
from torch import Tensor

from penstock.errors import NotEnoughMemoryError

_HUGE_PAGE = 2 << 20
_SHARED = 256 << 20  # bytes of a mapping that pieces share


def zero_pages(num_bytes: int, purpose: str, remedy: str) -> Tensor:
    """Return uint8 [num_bytes], zero and not resident before it is written.

    It begins where a page begins, and if it is as long as a huge page, where a huge page begins.

    Args:
        purpose: what the memory is for, for the error, such as "the KV cache of one layer".
        remedy: how the user can ask for less of it, for the error.

    Raises:
        NotEnoughMemoryError: the system refuses.
    """
    _counted.num_bytes += num_bytes
    slack = _HUGE_PAGE if num_bytes >= _HUGE_PAGE else 0
    try:
        memory = _bytes_of(_mapped(num_bytes + slack))
    except (OSError, OverflowError) as error:
        raise NotEnoughMemoryError(
            f"the system refused {num_bytes / 2**20:.1f} MiB for {purpose}: {error}.",
            remedy=remedy,
        ) from error
    start = -memory.data_ptr() % _HUGE_PAGE if slack else 0
    return memory[start : start + num_bytes]


def shared_pages(num_bytes: int, purpose: str, remedy: str) -> Tensor:
    """Return uint8 [num_bytes] as `zero_pages` does, but small pieces share a mapping.

    The mapping goes back to the system when all pieces in it are free.
    """
    piece = _shared.take(num_bytes) if num_bytes <= _SHARED // 4 else None
    return zero_pages(num_bytes, purpose, remedy) if piece is None else piece


class _CountedPages(threading.local):
    """The bytes that a thread has asked `zero_pages` for so far, whether they are resident or not."""

    num_bytes = 0


_counted = _CountedPages()


def counted_bytes() -> int:
    """Return the bytes that this thread has asked `zero_pages` for so far."""
    return _counted.num_bytes


class _SharedMapping:
    """The mapping that is being filled. Only the tensors in it keep it alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapping: weakref.ref[mmap.mmap] | None = None
        self._next = 0

    def take(self, num_bytes: int) -> Tensor | None:
        """Return a piece; None when the system refuses another mapping."""
        with self._lock:
            mapping = None if self._mapping is None else self._mapping()
            if mapping is None or self._next + num_bytes > len(mapping):
                try:
                    mapping = _mapped(_SHARED)
                except OSError:
                    return None
                self._mapping = weakref.ref(mapping)
                self._next = -_bytes_of(mapping).data_ptr() % _HUGE_PAGE
            start = self._next
            self._next += -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            return _bytes_of(mapping)[start : start + num_bytes]


_shared = _SharedMapping()


def _mapped(num_bytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _bytes_of(pages: mmap.mmap) -> Tensor:
    """Return the pages as uint8; the tensor keeps the mapping alive."""
    return torch.frombuffer(pages, dtype=torch.uint8)
