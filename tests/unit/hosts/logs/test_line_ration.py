"""How many lines of a host go to the head, how long they are, and what is said of those left out."""

from __future__ import annotations

from fakes import FakeClock
from penstock.hosts.logs.line_ration import (
    LINES_AT_ONCE,
    LINES_PER_S,
    SAY_DROPPED_EVERY_S,
    LineRation,
)
from penstock.told_text import MAX_LINE_CHARS, shown_line


def test_r15_a_flood_passes_up_to_a_bound_and_then_a_few_lines_a_second() -> None:
    clock = FakeClock()
    ration = LineRation(clock)
    assert sum(ration.admit() for _ in range(10 * LINES_AT_ONCE)) == LINES_AT_ONCE
    for _ in range(3):
        clock.advance(1.0)
        assert sum(ration.admit() for _ in range(LINES_AT_ONCE)) == LINES_PER_S
    clock.advance(1e6)
    assert sum(ration.admit() for _ in range(10 * LINES_AT_ONCE)) == LINES_AT_ONCE


def test_r15_lines_left_out_are_counted_and_said_now_and_then() -> None:
    clock = FakeClock()
    ration = LineRation(clock)
    for _ in range(LINES_AT_ONCE + 5):
        ration.admit()
    assert ration.take_dropped() == 0, "it was said a moment ago that there are none"
    clock.advance(SAY_DROPPED_EVERY_S)
    ration.note_dropped(2)
    assert ration.take_dropped() == 7
    clock.advance(SAY_DROPPED_EVERY_S)
    assert ration.take_dropped() == 0


def test_r15_a_line_is_cut_and_cannot_steer_a_terminal() -> None:
    assert shown_line("a\x1b[2Jb\r\tc\x00") == "a\\x1b[2Jb\\r c\\x00"
    long = shown_line("x" * (MAX_LINE_CHARS + 10))
    assert long == "x" * MAX_LINE_CHARS + "… (10 characters more)"
    assert shown_line("Füße: 3 °C") == "Füße: 3 °C"
