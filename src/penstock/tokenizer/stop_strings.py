"""Finds stop strings in text that comes in pieces.

The stop string that is complete first ends the text; if several are complete at the same character, the
longest does. The rule goes by characters, so the result does not depend on how the text was cut into deltas.
Text that may be the beginning of a stop string is held back. Each character takes one step of an automaton
per stop string (Knuth, Morris, Pratt), so that hostile stop strings cost no more than others.

Called by `engine.client.outputs`. The scanners know nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Scan(msgspec.Struct, frozen=True, gc=False):
    """Text that may be shown now, and the stop string that has ended the whole text; "": none has, so far."""

    text: str
    stop: str


class StopScanner(Protocol):
    """Watches the text of one sequence."""

    def feed(self, text: str) -> Scan: ...

    def finish(self) -> str:
        """Return text that was held back, when no more comes."""
        ...


class NoStops:
    """No stop strings: all text may be shown at once."""

    def feed(self, text: str) -> Scan:
        return Scan(text, "")

    def finish(self) -> str:
        return ""


class _Automaton:
    """Counts with how many of the first characters of one stop string the text ends."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = _prefix_table(stop)

    def step(self, character: str) -> int:
        matched = self.matched
        while matched and self.stop[matched] != character:
            matched = self._fallback[matched - 1]
        if self.stop[matched] == character:
            matched += 1
        self.matched = matched
        return matched


def _prefix_table(text: str) -> list[int]:
    """For each i: length of the longest proper prefix of text[: i + 1] that also ends it."""
    table = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = table[length - 1]
        if text[index] == text[length]:
            length += 1
        table[index] = length
    return table


class StopStringScanner:
    """Finds the first of several stop strings.

    Args:
        stops: non-empty strings.
        include_stop: leave the stop string in the shown text.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._automata = [_Automaton(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._include_stop = include_stop
        self._held = ""

    def feed(self, text: str) -> Scan:
        """Take more text, and return what may be shown. May not be called once a stop string was found."""
        whole = self._held + text
        held = len(self._held)
        for index, character in enumerate(text):
            stop = self._step(character)
            if stop:
                end = held + index + 1
                self._held = ""
                return Scan(whole[: end if self._include_stop else end - len(stop)], stop)
        return Scan(self._hold_back(whole), "")

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str:
        for automaton in self._automata:  # longest first
            if automaton.step(character) == len(automaton.stop):
                return automaton.stop
        return ""

    def _hold_back(self, whole: str) -> str:
        keep = max([automaton.matched for automaton in self._automata], default=0)
        shown = len(whole) - keep
        self._held = whole[shown:]
        return whole[:shown]


def stop_scanner(stops: Sequence[str], *, include_stop: bool) -> StopScanner:
    return StopStringScanner(stops, include_stop=include_stop) if stops else NoStops()
