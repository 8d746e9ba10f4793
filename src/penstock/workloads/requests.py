"""The requests of a load run: prompts of random ids, exact output lengths and arrival times.

They are drawn from a seed (`synthetic`), or made from a trace (`from_trace`, `workloads.traces`) with random
ids. `penstock bench` sends them to a server or an engine, and `penstock simulate` to simulated stages.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from penstock.errors import UsageError
from penstock.workloads.traces import MAX_LENGTH, MOONCAKE_BLOCK, TraceRow


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One request of a run."""

    index: int
    arrival_s: float  # after the start of the run
    prompt_token_ids: list[int]  # [prompt length]
    output_len: int  # tokens to generate, exactly


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
    """Return requests with random prompts at random times (`arrival_times`).

    Args:
        input_len: tokens of a prompt.
        output_len: tokens to generate.
        range_ratio: largest relative distance of lengths from these two; lengths are drawn uniformly.
        vocab_size: ids are drawn below this.

    Raises:
        UsageError: an argument is out of range; the error names its flag.
    """
    _check("--num-prompts", num_prompts, num_prompts >= 1, "at least 1")
    a_length = f"between 1 and {MAX_LENGTH}"
    _check("--random-input-len", input_len, 1 <= input_len <= MAX_LENGTH, a_length)
    _check("--random-output-len", output_len, 1 <= output_len <= MAX_LENGTH, a_length)
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
    """Return arrivals whose gaps follow a gamma distribution of mean 1 / rate and shape `burstiness`.

    With shape 1 this is a Poisson process; with a smaller shape requests come in bursts. With an infinite
    rate all come at once.

    Args:
        count: number of arrivals.
        request_rate: requests a second.
        draw: source of random numbers.
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


def at_rate(
    requests: Sequence[BenchRequest], request_rate: float, burstiness: float, seed: int
) -> list[BenchRequest]:
    """Return the same requests with other times, random ones of this rate (`arrival_times`)."""
    times = arrival_times(len(requests), request_rate, burstiness, random.Random(seed))
    return [replace(request, arrival_s=arrival_s) for request, arrival_s in zip(requests, times, strict=True)]


def from_trace(
    rows: Sequence[TraceRow], *, length_scale: float, time_scale: float, vocab_size: int, seed: int
) -> list[BenchRequest]:
    """Return requests with the lengths and times of a trace, and random ids.

    Prompts that begin with the same blocks of the trace begin with the same ids. Lengths are divided by
    `length_scale`, and are at least 1. Arrival times are multiplied by `time_scale`.
    """
    _check("--length-scale", length_scale, 0 < length_scale < math.inf, "above 0")
    _check("--time-scale", time_scale, 0 <= time_scale < math.inf, "at least 0")
    draw = random.Random(seed)
    return [
        BenchRequest(
            index=index,
            arrival_s=row.arrival_s * time_scale,
            prompt_token_ids=_ids_of_row(row, length_scale, vocab_size, seed, draw),
            output_len=_scaled(row.output_len, length_scale),
        )
        for index, row in enumerate(rows)
    ]


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


def mean_lengths(requests: Sequence[BenchRequest]) -> tuple[int, int]:
    """Return the mean number of tokens of prompts and of outputs, rounded down."""
    prompts = sum(len(request.prompt_token_ids) for request in requests)
    return prompts // len(requests), sum(request.output_len for request in requests) // len(requests)


def _scaled(length: int, scale: float) -> int:
    if length > MAX_LENGTH * scale:
        raise UsageError(
            f"--length-scale {scale:g} makes {length} tokens of a trace more than {MAX_LENGTH}.",
            remedy="Use a larger --length-scale.",
            param="length_scale",
        )
    return max(1, int(length / scale))


def _ids_of_row(row: TraceRow, scale: float, vocab_size: int, seed: int, draw: random.Random) -> list[int]:
    """Return random ids for a prompt. A block that the trace names has the same ids in all prompts."""
    count = _scaled(row.input_len, scale)
    if not row.blocks:
        return _random_ids(count, vocab_size, draw)
    size = _scaled(MOONCAKE_BLOCK, scale)
    blocks = (_random_ids(size, vocab_size, random.Random(f"{seed} {block}")) for block in row.blocks)
    ids = list(chain.from_iterable(blocks))[:count]
    return ids + _random_ids(count - len(ids), vocab_size, draw)


def _around(length: int, ratio: float, draw: random.Random) -> int:
    low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
    return max(1, draw.randint(low, high))


def _random_ids(count: int, vocab_size: int, draw: random.Random) -> list[int]:
    return draw.choices(range(vocab_size), k=count)


def _check(name: str, value: float, fine: bool, bound: str) -> None:
    if not fine:
        raise UsageError(f"{name} is {value}; it must be {bound}.", param=name, code="out_of_range")
