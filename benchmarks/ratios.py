"""Figures that are measured in turns: the median of their ratios, round by round, and how sure it is."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

RESAMPLES = 4000
Subject = TypeVar("Subject")
Figures = TypeVar("Figures")


def bootstrap(ratios: Sequence[float], seed: int) -> tuple[float, float]:
    """Return the interval of 95 % of their median."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[round(0.025 * RESAMPLES)], medians[round(0.975 * RESAMPLES) - 1]


def in_turns(
    subjects: Sequence[Subject], take: Callable[[Subject], Figures], rounds: int, *, warm_up: int = 0
) -> list[list[Figures]]:
    """Return, round by round, the figures of each subject. Who comes first turns; warm-ups are left out."""
    found = []
    for number in range(warm_up + rounds):
        of_round: dict[int, Figures] = {}
        for place in range(len(subjects)):
            which = (place + number) % len(subjects)
            of_round[which] = take(subjects[which])
        found.append([of_round[which] for which in range(len(subjects))])
    return found[warm_up:]


def shown(ratios: Sequence[float]) -> str:
    """Return the median with its interval, as text."""
    low, high = bootstrap(ratios, seed=7)
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def against_off(rounds: Sequence[Sequence[float]]) -> list[str]:
    """Return cells of a table: the medians of an engine without and of one with something, their ratio, and
    that of a second one without to the first, the control.

    Args:
        rounds: of each, the rates in this order.
    """
    medians = [statistics.median(of_round[index] for of_round in rounds) for index in (0, 1)]
    ratios = [shown([of_round[index] / of_round[0] for of_round in rounds]) for index in (1, 2)]
    return [*(f"{median:.1f}" for median in medians), *ratios]


def print_compared(title: str, names: Iterable[str], rounds: Sequence[Sequence[dict[str, float]]]) -> None:
    """Print a Markdown table of the figures of "here", "other" and "other" again, the control."""
    print(f"| {title} | here | other | here/other | control |\n|---|---|---|---|---|")
    for name in names:
        print(_compared(name, rounds))


def _compared(name: str, rounds: Sequence[Sequence[dict[str, float]]]) -> str:
    here, other = (statistics.median(figures[place][name] for figures in rounds) for place in (0, 1))
    ratios, control = ([figures[place][name] / figures[1][name] for figures in rounds] for place in (0, 2))
    return f"| {name} | {here:.3f} | {other:.3f} | {shown(ratios)} | {shown(control)} |"
