"""From times to the Markdown tables of `cpu_peers.py`. Pure: no engine, no clock.

Two kinds of case. `prefill`: milliseconds to the first token of one prompt. `decode`: tokens a second while
`batch` sequences that started together generate, which is batch * (output - 1) / (t(output) - t(1)) for the
times t of two runs, one to the last token and one to the first.

The name of an engine may end with the form of its weights, such as `penstock:int8`. Engines are compared with
those whose weights have as many bits: `int8` with `q8_0`, and `fp16` with engines that name no form.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

OURS = "penstock"
WHOLE_BITS = 16  # of a weight, where an engine's name has no form
ABSENT = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One column of the table."""

    kind: Literal["prefill", "decode"]
    batch: int
    input: int  # tokens of a prompt
    output: int  # tokens generated; 1 of a prefill

    @property
    def label(self) -> str:
        if self.kind == "prefill":
            return f"TTFT of {self.input:,}, ms"
        return f"decode B={self.batch}, tokens/s"

    def value(self, first_s: float, last_s: float) -> float:
        """Milliseconds, or tokens/s; not a number if noise has swallowed the difference.

        Args:
            first_s: seconds of a run with one token of output.
            last_s: seconds of a run with all tokens of output; ignored for a prefill.
        """
        if self.kind == "prefill":
            return 1000 * first_s
        elapsed = last_s - first_s
        return self.batch * (self.output - 1) / elapsed if elapsed > 0 else math.nan

    def ratio(self, ours: float, peer: float) -> float:
        """Ours over the peer's: above 1 is better for tokens/s, below 1 for a time."""
        return ours / peer

    def best(self, values: Iterable[float]) -> float:
        return min(values) if self.kind == "prefill" else max(values)


Samples = Mapping[str, Mapping[Case, Sequence[float]]]  # by engine


def weight_bits(engine: str) -> int:
    """Return the bits of a weight by the form in an engine's name: the first number of the form."""
    number = re.search(r"\d+", engine.partition(":")[2])
    return int(number[0]) if number else WHOLE_BITS


def medians(samples: Mapping[Case, Sequence[float]]) -> dict[Case, float]:
    """The median of each case that has a sample which is a number."""
    numbers = {case: [value for value in values if math.isfinite(value)] for case, values in samples.items()}
    return {case: statistics.median(values) for case, values in numbers.items() if values}


def format_value(value: float) -> str:
    """Three digits at least, without a fraction that means nothing."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def format_samples(values: Sequence[float]) -> str:
    """Median and spread: `41.2 (40.8 to 41.9)`."""
    numbers = [value for value in values if math.isfinite(value)]
    if not numbers:
        return ABSENT
    middle = format_value(statistics.median(numbers))
    if len(numbers) == 1:
        return middle
    return f"{middle} ({format_value(min(numbers))} to {format_value(max(numbers))})"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(header), ["---"] * len(header), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def growth(case_medians: Mapping[Case, float]) -> float:
    """What a token of the longest prompt costs, over one of the shortest; not a number of one length."""
    per_token = {
        case.input: value / case.input for case, value in case_medians.items() if case.kind == "prefill"
    }
    if len(per_token) < 2:
        return math.nan
    return per_token[max(per_token)] / per_token[min(per_token)]


def bandwidth_share(case_medians: Mapping[Case, float], step_bytes: float, bytes_per_s: float) -> float:
    """Weights read by decoding one sequence, as a share of the read bandwidth; without its KV cache."""
    rates = [value for case, value in case_medians.items() if case.kind == "decode" and case.batch == 1]
    return rates[0] * step_bytes / bytes_per_s if rates and bytes_per_s > 0 else math.nan


def format_number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else ABSENT


def results_table(
    cases: Sequence[Case], samples: Samples, *, step_bytes: int = 0, bytes_per_s: float = 0.0
) -> str:
    """A row for each engine: median and spread of each case, growth of prefill, share of bandwidth.

    Args:
        step_bytes: of all weights at `WHOLE_BITS`; engines with another form get no share of the bandwidth.
    """
    rows = []
    for engine, values in samples.items():
        middle = medians(values)
        read_bytes = step_bytes if weight_bits(engine) == WHOLE_BITS else math.nan
        rows.append(
            [
                engine,
                *(format_samples(values.get(case, ())) for case in cases),
                format_number(growth(middle), ".2f"),
                format_number(bandwidth_share(middle, read_bytes, bytes_per_s), ".0%"),
            ]
        )
    return markdown(
        ["engine", *(case.label for case in cases), "ms a token, longest / shortest", "B=1 / read bandwidth"],
        rows,
    )


def ratio_table(cases: Sequence[Case], samples: Samples, ours: str = OURS) -> str:
    """Our median over each peer's and over the best peer's; empty without us or without peers.

    Peers are the engines whose weights have as many bits as ours.
    """
    middles = {engine: medians(values) for engine, values in samples.items()}
    peers = {
        engine: middle
        for engine, middle in middles.items()
        if engine != ours and weight_bits(engine) == weight_bits(ours)
    }
    if ours not in middles or not peers:
        return ""
    mine = middles[ours]
    rows = [_ratio_row(f"{ours} / {engine}", cases, mine, middle) for engine, middle in peers.items()]
    best = {
        case: case.best(found)
        for case in cases
        if (found := [middle[case] for middle in peers.values() if case in middle])
    }
    rows.append(_ratio_row(f"{ours} / best peer", cases, mine, best))
    return _ratio_markdown(cases, rows)


def form_gain_table(cases: Sequence[Case], samples: Samples, ours: str = OURS) -> str:
    """Return the medians of each form of ours over ours without a form; empty if either is missing."""
    forms = our_forms(samples, ours)
    if ours not in samples or not forms:
        return ""
    whole = medians(samples[ours])
    rows = [_ratio_row(f"{form} / {ours}", cases, medians(samples[form]), whole) for form in forms]
    return _ratio_markdown(cases, rows)


def ratio_tables(cases: Sequence[Case], samples: Samples) -> list[str]:
    """Return the ratio table of our engine, one for each form of its weights, and that of its forms."""
    tables = [ratio_table(cases, samples, ours) for ours in (OURS, *our_forms(samples))]
    return [table for table in (*tables, form_gain_table(cases, samples)) if table]


def our_forms(samples: Samples, ours: str = OURS) -> list[str]:
    """Return the names of our engine that have a form."""
    return [engine for engine in samples if engine.startswith(f"{ours}:")]


def _ratio_markdown(cases: Sequence[Case], rows: Iterable[Sequence[str]]) -> str:
    return markdown(["ratio of medians", *(case.label.rpartition(", ")[0] for case in cases)], rows)


def _ratio_row(
    name: str, cases: Sequence[Case], ours: Mapping[Case, float], peer: Mapping[Case, float]
) -> list[str]:
    both = [case in ours and case in peer for case in cases]
    ratios = [
        f"{case.ratio(ours[case], peer[case]):.2f}" if known else ABSENT
        for case, known in zip(cases, both, strict=True)
    ]
    return [name, *ratios]


def versions_text(versions: Mapping[str, Mapping[str, str]]) -> str:
    """Packages of each engine, as `name version`."""
    return "; ".join(
        f"{engine} ({', '.join(f'{name} {version}' for name, version in found.items())})"
        for engine, found in versions.items()
    )
