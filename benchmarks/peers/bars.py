"""Ratios that one engine's medians must reach over another's. Pure, as `report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from peers.report import Case, Samples, markdown, medians


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What the ratio of our median to a peer's must reach: at least for tokens/s, at most for a time.

    Attributes:
        ours: name of an engine, or the start of several names: the best of those counts.
        called: what the table calls `ours`; "" for its own name.
    """

    ours: str
    peer: str
    kind: Literal["prefill", "decode"]
    batch: int
    wanted: float
    called: str = ""


def bar_table(bars: Sequence[Bar], cases: Sequence[Case], samples: Samples) -> tuple[str, bool]:
    """A line for each bar that could be measured, and whether all of those are met."""
    middles = {engine: medians(values) for engine, values in samples.items()}
    rows, all_met = [], True
    for bar in bars:
        for case in cases:
            ratio = bar_ratio(bar, case, middles)
            if ratio is None:
                continue
            met = ratio <= bar.wanted if bar.kind == "prefill" else ratio >= bar.wanted
            all_met &= met
            what = f"{case.label.rpartition(', ')[0]}, {bar.called or bar.ours} / {bar.peer}"
            rows.append([what, f"{bar.wanted:g}", f"{ratio:.2f}", "met" if met else "missed"])
    return markdown(["bar", "wanted", "found", ""], rows), all_met


def bar_ratio(bar: Bar, case: Case, middles: Mapping[str, Mapping[Case, float]]) -> float | None:
    """Ours over the peer's; None for another case, or when one of the two has no number."""
    if (case.kind, case.batch) != (bar.kind, bar.batch):
        return None
    ours = [
        values[case] for engine, values in middles.items() if engine.startswith(bar.ours) and case in values
    ]
    peers = middles.get(bar.peer, {})
    return case.ratio(case.best(ours), peers[case]) if ours and case in peers else None
