"""Stop strings: what is shown does not depend on how the text was cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.tokenizer.stop_strings import NoStops, Scan, StopStringScanner, stop_scanner

LETTERS = st.text("ab", max_size=14)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def by_definition(text: str, stops: list[str], include: bool) -> tuple[str, str]:
    """The first stop string to be complete, the longest if several are; searched the slow way."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, ""


def run(scanner: StopStringScanner, parts: list[str]) -> tuple[str, str]:
    shown = ""
    for part in parts:
        scan = scanner.feed(part)
        shown += scan.text
        if scan.stop:
            return shown, scan.stop
    return shown + scanner.finish(), ""


@given(LETTERS, STOPS, st.booleans(), st.lists(st.integers(0, 14), max_size=4))
def test_any_cut_gives_the_result_of_the_definition(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[begin:end] for begin, end in pairwise(edges)]
    scanner = StopStringScanner(stops, include_stop=include)
    assert run(scanner, parts) == by_definition(text, stops, include)


@given(LETTERS, STOPS)
def test_nothing_is_shown_that_a_stop_string_takes_back(text: str, stops: list[str]) -> None:
    scanner = StopStringScanner(stops)
    in_the_end, _ = by_definition(text, stops, False)
    shown = ""
    for character in text:
        scan = scanner.feed(character)
        shown += scan.text
        assert in_the_end.startswith(shown)
        if scan.stop:
            break
    assert all(stop not in shown for stop in stops)


@given(LETTERS, STOPS)
def test_only_a_possible_beginning_is_held_back(text: str, stops: list[str]) -> None:
    scanner = StopStringScanner(stops)
    scan = scanner.feed(text)
    if not scan.stop:
        held = text[len(scan.text) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert scanner.finish() == held


@pytest.mark.parametrize(("include", "shown"), [(False, "one "), (True, "one END")])
def test_text_after_the_stop_string_is_cut(include: bool, shown: str) -> None:
    scanner = StopStringScanner(["END"], include_stop=include)
    assert scanner.feed("one E") == Scan("one ", "")
    assert scanner.feed("NDless") == Scan(shown[4:], "END")


def test_a_false_beginning_is_released_whole() -> None:
    scanner = StopStringScanner(["aab"])
    assert [scanner.feed(c).text for c in "aaaac"] == ["", "", "a", "a", "aac"]


def test_without_stop_strings_nothing_is_held_back() -> None:
    scanner = stop_scanner([], include_stop=False)
    assert isinstance(scanner, NoStops)
    assert scanner.feed("END") == Scan("END", "")
    assert scanner.finish() == ""


def test_characters_outside_the_bmp_are_single() -> None:
    assert run(StopStringScanner(["😀😀"]), ["a😀", "b😀😀c"]) == ("a😀b", "😀😀")
