"""The meeting of the ranks of a stage that are processes, for one epoch: memory without a name, and a store.

The host makes a meeting and hands its descriptors to the ranks; nothing is left behind however they
end. `kernels.cpu.collective` sums in the memory, whose layout is in csrc/collective.cpp; `torch_group` finds
the others by the store. Torch-free.
"""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack

from penstock.process.endpoints import MeetingHandle

BUFFER_BYTES = 1 << 20  # of what goes round at a time; larger tensors go in pieces
_LINE, _PAGE = 64, 4096


def memory_bytes(size: int, buffer_bytes: int = BUFFER_BYTES) -> int:
    """Return the bytes that `size` ranks share: a line for the group and each rank, two buffers for each."""
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
    """Return a path of the store, which holds in this process while the descriptor is open."""
    return f"/proc/self/fd/{handle.store_fd}"


def end_meeting(handle: MeetingHandle) -> None:
    """End the group: every rank that waits for another one in it stops."""
    os.pwrite(handle.memory_fd, (1).to_bytes(4, "little"), 0)


def close_meeting(handle: MeetingHandle) -> None:
    """Close this process' descriptors; memory that is mapped stays so."""
    for fd in (handle.memory_fd, handle.store_fd):
        os.close(fd)
