"""What a load run asks for: prompts of random ids, exact output lengths and arrival times.

Made from a seed (`synthetic`) or from a trace file (`from_trace`); `bench.online` and `bench.offline` use it.
Knows nothing of servers.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from penstock.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One request of a run."""

    index: int
    arrival_s: float  # after the start of the run
    prompt_token_ids: list[int]  # [prompt length]
    output_len: int  # tokens to generate, exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace file, as recorded."""

    arrival_s: float  # after the first row
    input_len: int
    output_len: int


def synthetic(
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    range_ratio: float,
    request_rate: float,
    burstiness: float,
    vocab_size: int,
    seed: int,
) -> list[BenchRequest]:
    """Random prompts, with lengths uniform within `range_ratio` of the given ones, and random arrivals.

    Raises `UsageError` naming the flag that is out of range.
    """
    _check("--num-prompts", num_prompts, num_prompts >= 1, "at least 1")
    _check("--random-input-len", input_len, input_len >= 1, "at least 1")
    _check("--random-output-len", output_len, output_len >= 1, "at least 1")
    _check("--random-range-ratio", range_ratio, 0 <= range_ratio < 1, "at least 0 and below 1")
    draw = random.Random(seed)
    arrivals = arrival_times(num_prompts, request_rate, burstiness, draw)
    return [
        BenchRequest(
            index=index,
            arrival_s=arrival,
            prompt_token_ids=_random_ids(_around(input_len, range_ratio, draw), vocab_size, draw),
            output_len=_around(output_len, range_ratio, draw),
        )
        for index, arrival in enumerate(arrivals)
    ]


def arrival_times(count: int, request_rate: float, burstiness: float, draw: random.Random) -> list[float]:
    """Arrivals whose gaps follow a gamma distribution of mean 1 / rate and shape `burstiness`.

    Shape 1 is a Poisson process; smaller is burstier. An infinite rate sends everything at once.
    """
    _check("--request-rate", request_rate, request_rate > 0, "above 0")
    _check("--burstiness", burstiness, 0 < burstiness < math.inf, "above 0")
    if math.isinf(request_rate):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += draw.gammavariate(burstiness, 1.0 / (request_rate * burstiness))
    return times


def from_trace(
    rows: Sequence[TraceRow], *, length_scale: float, time_scale: float, vocab_size: int, seed: int
) -> list[BenchRequest]:
    """Requests shaped like a trace.

    Lengths are divided by `length_scale`, and are at least 1; arrival times are multiplied by `time_scale`.
    """
    _check("--length-scale", length_scale, 0 < length_scale < math.inf, "above 0")
    _check("--time-scale", time_scale, 0 <= time_scale < math.inf, "at least 0")
    draw = random.Random(seed)
    return [
        BenchRequest(
            index=index,
            arrival_s=row.arrival_s * time_scale,
            prompt_token_ids=_random_ids(_scaled(row.input_len, length_scale), vocab_size, draw),
            output_len=_scaled(row.output_len, length_scale),
        )
        for index, row in enumerate(rows)
    ]


def read_azure_trace(path: Path, limit: int) -> list[TraceRow]:
    """The first `limit` rows of an Azure LLM inference trace (TIMESTAMP, ContextTokens, GeneratedTokens).

    Raises `UsageError` naming the file and the line at fault.
    """
    _check("--num-prompts", limit, limit >= 1, "at least 1")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(_azure_rows(csv.DictReader(file), limit))
    except OSError as error:
        raise UsageError(
            f"--dataset-path {path} cannot be read: {error.strerror}.", remedy="Give a readable trace file."
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"--dataset-path {path} is no Azure trace: {error}.",
            remedy="It needs the columns TIMESTAMP, ContextTokens and GeneratedTokens.",
        ) from error
    if len(rows) < limit:
        raise UsageError(
            f"--dataset-path {path} has {len(rows)} requests, fewer than --num-prompts {limit}.",
            remedy=f"Use --num-prompts {len(rows)} or less.",
        )
    return rows


def _azure_rows(reader: csv.DictReader[str], limit: int) -> Iterator[TraceRow]:
    first = None
    for number, row in enumerate(reader):
        if number == limit:
            return
        moment = datetime.fromisoformat(row["TIMESTAMP"][:26])  # the seventh digit is below a microsecond
        first = first or moment
        lengths = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        arrival = (moment - first).total_seconds()
        if min(lengths) < 0 or arrival < 0:
            raise ValueError(f"line {number + 2} has a negative length or goes back in time")
        yield TraceRow(arrival_s=arrival, input_len=lengths[0], output_len=lengths[1])


def check_fits(requests: Sequence[BenchRequest], max_model_len: int) -> None:
    """Raise `UsageError` when a request is longer than the model can take; both numbers are in the text."""
    longest = max(requests, key=lambda request: len(request.prompt_token_ids) + request.output_len)
    total = len(longest.prompt_token_ids) + longest.output_len
    if total > max_model_len:
        raise UsageError(
            f"request {longest.index} needs {total} tokens ({len(longest.prompt_token_ids)} + "
            f"{longest.output_len}), more than the model's {max_model_len}.",
            remedy="Use shorter lengths, or a larger --length-scale.",
        )


def _scaled(length: int, scale: float) -> int:
    return max(1, int(length / scale))


def _around(length: int, ratio: float, draw: random.Random) -> int:
    low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
    return max(1, draw.randint(low, high))


def _random_ids(count: int, vocab_size: int, draw: random.Random) -> list[int]:
    return draw.choices(range(vocab_size), k=count)


def _check(name: str, value: float, fine: bool, bound: str) -> None:
    if not fine:
        raise UsageError(f"{name} is {value}; it must be {bound}.", param=name, code="out_of_range")
