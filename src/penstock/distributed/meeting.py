"""The files in memory by which the rank processes of a stage find each other, or exchange tensors.

A meeting has shared memory and a store, both without a name in the file system. The host makes a meeting and
hands its descriptors to the ranks, so that nothing is left behind however the ranks end. In the memory
`kernels.cpu.collective` sums tensors; csrc/collective.cpp says how it is laid out. By the store `torch_group`
finds the other ranks. Torch-free.
"""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack

from penstock.process.endpoints import MeetingHandle

BUFFER_BYTES = 1 << 20  # what a rank exchanges at a time; larger tensors go in pieces
_LINE, _PAGE = 64, 4096


def memory_bytes(size: int, buffer_bytes: int = BUFFER_BYTES) -> int:
    """Return the bytes that `size` ranks share.

    These are a cache line for the group and one for each rank, up to a whole page, and two buffers for each
    rank.
    """
    lines = _LINE * (1 + size)
    return -(-lines // _PAGE) * _PAGE + 2 * size * buffer_bytes


def create_meeting(size: int) -> MeetingHandle:
    """Make a meeting of `size` ranks, and return its descriptors.

    The caller closes them (`close_meeting`) once the ranks have them.
    """
    with ExitStack() as undo:
        memory_fd = os.memfd_create("penstock-meeting")
        undo.callback(os.close, memory_fd)
        os.ftruncate(memory_fd, memory_bytes(size))
        store_fd = os.memfd_create("penstock-store")
        undo.pop_all()
    return MeetingHandle(memory_fd=memory_fd, store_fd=store_fd)


def map_memory(handle: MeetingHandle) -> mmap.mmap:
    """Return the memory of a meeting, writable."""
    return mmap.mmap(handle.memory_fd, 0)


def store_path(handle: MeetingHandle) -> str:
    """Return a path of the store that is valid in this process, and while the descriptor is open."""
    return f"/proc/self/fd/{handle.store_fd}"


def end_meeting(handle: MeetingHandle) -> None:
    """End the group in shared memory: every rank that waits there for another one fails."""
    os.pwrite(handle.memory_fd, (1).to_bytes(4, "little"), 0)


def close_meeting(handle: MeetingHandle) -> None:
    """Close this process' descriptors of the meeting; memory that is mapped stays mapped."""
    for fd in (handle.memory_fd, handle.store_fd):
        os.close(fd)
