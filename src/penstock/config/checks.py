"""Checks that several settings share; if a number is out of bounds, the error names the setting."""

from __future__ import annotations

import math
import re

from penstock.errors import UsageError

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


def above_zero(name: str, seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise UsageError(f"{name} is {seconds}; it must be above 0 seconds.", param=name, code="out_of_range")
