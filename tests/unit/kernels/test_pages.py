"""Large memory: zeros, where it starts, what shares a mapping, and when it goes back to the system."""

from __future__ import annotations

import gc
import itertools
import mmap
import weakref
from pathlib import Path

import pytest
import torch

from penstock.errors import NotEnoughMemoryError
from penstock.kernels import pages
from penstock.kernels.pages import shared_pages, zero_pages

MIB = 1 << 20


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


@pytest.fixture(autouse=True)
def _a_mapping_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_shared", pages._SharedMapping())


@pytest.mark.parametrize("take", [zero_pages, shared_pages])
@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 3 * MIB + 5, 100 * MIB])
def test_pages_are_zero_and_of_the_size_asked_for(take, num_bytes: int) -> None:
    memory = take(num_bytes, "a test", "None.")
    assert memory.shape == (num_bytes,)
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    assert not memory[:5000].any()
    assert not memory[-5000:].any()
    memory[-5000:] = 255


@pytest.mark.parametrize("take", [zero_pages, shared_pages])
def test_large_memory_starts_at_a_huge_page(take) -> None:
    assert take(100 * MIB, "a test", "None.").data_ptr() % (2 * MIB) == 0


def test_small_pieces_lie_one_behind_another_and_apart() -> None:
    pieces = [shared_pages(size, "a test", "None.") for size in (1, 5000, 2 * MIB, 4096)]
    starts = [piece.data_ptr() for piece in pieces]
    assert [b - a for a, b in itertools.pairwise(starts)] == [4096, 8192, 2 * MIB]
    assert starts[0] % (2 * MIB) == 0
    for number, piece in enumerate(pieces):
        piece.fill_(number + 1)
    assert [piece.unique().tolist() for piece in pieces] == [[1], [2], [3], [4]]


def test_a_full_mapping_is_followed_by_another() -> None:
    pieces = [shared_pages(60 * MIB, "a test", "None.") for _ in range(9)]
    for number, piece in enumerate(pieces):
        piece[::4096] = number + 1
    assert [piece[::4096].unique().tolist() for piece in pieces] == [[n] for n in range(1, 10)]


def test_a_shared_mapping_goes_back_when_the_last_piece_does() -> None:
    gc.collect()
    before = mapped_bytes()
    first, second = (shared_pages(MIB, "a test", "None.") for _ in range(2))
    mapping = pages._shared._mapping
    assert isinstance(mapping, weakref.ref)
    del first
    assert mapping() is not None
    del second
    gc.collect()
    assert mapping() is None
    assert mapped_bytes() - before < MIB
    assert not shared_pages(MIB, "a test", "None.").any()


def test_a_refused_shared_mapping_leaves_the_piece_a_mapping_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def small_only(num_bytes: int) -> mmap.mmap:
        if num_bytes > 64 * MIB:
            raise OSError(12, "no memory")
        return mmap.mmap(-1, num_bytes)

    monkeypatch.setattr(pages, "_mapped", small_only)
    assert not shared_pages(3 * MIB, "a test", "None.").any()
    with pytest.raises(NotEnoughMemoryError, match=r"refused 65\.0 MiB for a test"):
        shared_pages(65 * MIB, "a test", "None.")


@pytest.mark.parametrize("take", [zero_pages, shared_pages])
def test_what_the_system_refuses_is_a_typed_error(take) -> None:
    with pytest.raises(NotEnoughMemoryError, match=r"for a test.*Take less\."):
        take(1 << 60, "a test", "Take less.")
    assert torch.equal(take(3, "a test", "Take less."), torch.zeros(3, dtype=torch.uint8))
