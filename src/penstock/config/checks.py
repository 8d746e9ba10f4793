"""Checks that several settings share; if a number is out of bounds, the error names the setting."""

from __future__ import annotations

import re

from penstock.errors import UsageError

MAX_TIMEOUT_S = 1e6  # eleven days; a system's poll takes 24
MAX_AGE_S = 1e9  # 31 years
MAX_WHOLE = (1 << 63) - 1

_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")


def is_device(name: str) -> bool:
    """Return whether this is `cpu`, `cuda` or a GPU such as `cuda:1`."""
    return _DEVICE.fullmatch(name) is not None


def at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise UsageError(f"{name} is {value}; it must be at least {low}.", param=name, code="out_of_range")


def between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(
            f"{name} is {value}; it must be between {low} and {high}.", param=name, code="out_of_range"
        )


def above_zero(name: str, seconds: float, most: float = MAX_TIMEOUT_S) -> None:
    """Refuse seconds that nobody can wait.

    Args:
        most: `MAX_AGE_S` for a time at whose end something is only looked at again.
    """
    if not 0 < seconds <= most:
        raise UsageError(
            f"{name} is {seconds}; it must be above 0 and at most {most:.0f} seconds.",
            param=name,
            code="out_of_range",
        )


def sendable(name: str, value: object) -> None:
    """Refuse a whole number that has no room in the messages between processes: 64 bits, with a sign."""
    if isinstance(value, int):
        between(name, value, -MAX_WHOLE - 1, MAX_WHOLE)
