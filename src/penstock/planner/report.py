"""The chosen partition as lines of text: a table of its stages, and the splits that it was compared with."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.planner.hops import Hop
from penstock.planner.partition_search import Split
from penstock.planner.performance import PartitionChoice
from penstock.runner.kv_demand import stranded_bytes

_MIB = 1 << 20
_HEADINGS = ("stage", "layers", "decode ms", "prefill ms/token", "weights MiB", "KV tokens", "stranded MiB")


def partition_lines(choice: PartitionChoice) -> list[str]:
    """Return the chosen partition, a line for each stage, and the splits that it was compared with."""
    best = choice.best
    rows = [_HEADINGS, *(_stage_row(choice, stage) for stage in range(len(best.layers)))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    request = f"{choice.mix.prompt} + {choice.mix.output} tokens"
    layers = comma_separated(best.layers)
    return [
        f"partition {layers}: {_speed(choice, best)} of {request}, {best.num_rows} rows a step",
        *table,
        *(_hop_line(choice, hop) for hop in choice.hops),
        *_others(choice),
    ]


def comma_separated(layers: Sequence[int]) -> str:
    """Return numbers of layers as `--partition` takes them, such as "4,4,3"."""
    return ",".join(map(str, layers))


def _stage_row(choice: PartitionChoice, stage: int) -> tuple[str, ...]:
    count, costs = choice.best.layers[stage], choice.costs[stage]
    held = [tokens[own] for tokens, own in zip(choice.kv_tokens, choice.best.layers, strict=True)]
    num_blocks, fewest = held[stage] // costs.block_size, min(held) // costs.block_size
    stranded = stranded_bytes(num_blocks, fewest, count * costs.kv_block_bytes)
    return (
        str(stage),
        str(count),
        f"{1e3 * costs.decode_step_s(count, choice.best.num_rows):.3f}",
        f"{1e3 * costs.prefill_token_s(count):.4f}" if choice.mix.prompt else "-",
        f"{costs.weight_bytes(count) / _MIB:.1f}",
        str(held[stage]),
        f"{stranded / _MIB:.1f}",
    )


def _others(choice: PartitionChoice) -> list[str]:
    """Return a line for each split with which the best was compared."""
    best, even, runner_up = choice.best, choice.even, choice.runner_up
    lines = ["even does not fit"] if even is None else []
    if even is not None and even != best:
        lines.append(_compared("even", even, choice))
    if runner_up is not None and runner_up != even:
        lines.append(_compared("runner-up", runner_up, choice))
    return lines


def _compared(name: str, split: Split, choice: PartitionChoice) -> str:
    loss = 100 * (1 - choice.request_s(choice.best) / choice.request_s(split))
    return f"{name} {comma_separated(split.layers)}: {_speed(choice, split)}, {loss:.1f} % fewer"


def _speed(choice: PartitionChoice, split: Split) -> str:
    return f"{1 / choice.request_s(split):.3g} requests/s"


def _hop_line(choice: PartitionChoice, hop: Hop) -> str:
    """Return a line with the figures of a link between hosts, which says whether it limits the speed."""
    request_s = hop.request_s(choice.mix)
    line = (
        f"link from stage {hop.stage} on {hop.sender} to {hop.receiver}: "
        f"{8e-6 * hop.bytes_per_s:.3g} Mbit/s, round trip {1e3 * hop.round_trip_s:.2f} ms, "
        f"{1 / request_s:.3g} requests/s at most"
    )
    is_slowest = request_s > 1e-9 * choice.best.slowest_ns
    return f"{line}; it is slower than every stage" if is_slowest else line
