"""Checks of numbers that several settings share; each raises a `UsageError` that names the setting."""

from __future__ import annotations

import math

from penstock.errors import UsageError


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
