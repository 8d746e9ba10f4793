"""Rows and their generations (row E7, core side)."""

from __future__ import annotations

import pytest

from penstock.scheduler.rows import RowPool


def test_e7_a_row_is_used_again_under_the_next_generation() -> None:
    rows = RowPool(2)
    assert rows.take() == (0, 0)
    assert rows.take() == (1, 0)
    assert rows.num_free == 0
    rows.give_back(1)
    assert rows.take() == (1, 1)
    rows.give_back(1)
    rows.give_back(0)
    assert {rows.take(), rows.take()} == {(0, 1), (1, 2)}


def test_freed_rows_are_announced_once() -> None:
    rows = RowPool(3)
    for _ in range(3):
        rows.take()
    rows.give_back(2)
    rows.give_back(0)
    assert rows.announce_freed() == [2, 0]
    assert rows.announce_freed() == []


def test_freeing_a_row_twice_is_our_bug() -> None:
    rows = RowPool(2)
    rows.take()
    rows.give_back(0)
    with pytest.raises(AssertionError, match="row 0 is freed twice"):
        rows.give_back(0)


def test_check_invariants_sees_damage() -> None:
    rows = RowPool(3)
    rows.take()
    rows.check_invariants([0])
    with pytest.raises(AssertionError, match="a row is lost, or in use twice"):
        rows.check_invariants([])
    with pytest.raises(AssertionError, match="a row is lost, or in use twice"):
        rows.check_invariants([0, 1])
    rows.give_back(0)
    rows.take()
    with pytest.raises(AssertionError, match="about to be announced"):
        rows.check_invariants([0])
