"""Large memory of a rank: zero pages of the kernel's own, in huge pages where it gives them.

Weights and keys and values are read in long streams or in far-apart pieces; with huge pages the processor
does not look up every fourth kilobyte's address. Pages are resident only once they are written.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

from penstock.errors import NotEnoughMemoryError


def zero_pages(num_bytes: int, purpose: str, remedy: str) -> Tensor:
    """uint8 [num_bytes], zero and not resident before it is written; starts at a page.

    Args:
        purpose: for the error's text, such as "the KV cache of one layer".
        remedy: what asks for less of it.

    Raises:
        NotEnoughMemoryError: the system refuses.
    """
    try:
        pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise NotEnoughMemoryError(
            f"the system refused {num_bytes / 2**20:.1f} MiB for {purpose}: {error}.",
            remedy=remedy,
        ) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]
