"""What all processes of a host do each second falls into one moment."""

from __future__ import annotations

import math

import pytest

from penstock.process.rhythm import next_beat


@pytest.mark.parametrize(("after", "period_s", "beat"), [(0.0, 1.0, 1.0), (7.2, 1.0, 8.0), (8.0, 5.0, 10.0)])
def test_the_next_beat_is_the_next_multiple(after: float, period_s: float, beat: float) -> None:
    assert next_beat(after, period_s) == beat


def test_what_begins_at_different_times_comes_together() -> None:
    assert {next_beat(100.0 + tenth / 10) for tenth in range(10)} == {101.0}


def test_what_was_never_done_is_due_at_once() -> None:
    assert next_beat(-math.inf) <= 0.0
