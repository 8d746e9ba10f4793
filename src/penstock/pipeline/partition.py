"""Cuts the layers of a model into one range for each stage.

The ranges are a pure function of layer count, stage count and policy. It is called when the settings of an
engine are resolved, and by anything that prints a layout. It does not weigh times or memory, and loads
nothing: `engine.supervisor.auto_partition` measures, and puts numbers in place of `auto`.

Ranges are half-open pairs `(start, end)`; over the stages they tile `[0, num_layers)` in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from penstock.errors import PartitionError

DEFAULT_POLICY = "even"
AUTO_POLICY = "auto"


def partition_layers(
    num_layers: int, num_stages: int, policy: str | Sequence[int] = DEFAULT_POLICY
) -> list[tuple[int, int]]:
    """Cut `num_layers` layers into `num_stages` consecutive ranges.

    Args:
        policy: how many layers each stage gets:

            - `even`: equally many; if some are left over, one more each for the stages from the second-last
              backwards, since the last stage has norm and head to compute besides
            - `last`: equally many; if some are left over, one more each for the last stages
            - a text such as "5,6,5,6" or a sequence of numbers: these numbers
            - `auto`: all layers on one stage; for more stages it must have been replaced by numbers

    Raises:
        PartitionError: the layers cannot be cut like that; the message has the numbers, and the remedy says
            what is possible.
    """
    _check_counts(num_layers, num_stages)
    if policy == DEFAULT_POLICY or (policy == AUTO_POLICY and num_stages == 1):
        counts = _remainder_before_last(num_layers, num_stages)
    elif policy == "last":
        counts = _remainder_on_last(num_layers, num_stages)
    elif policy == AUTO_POLICY:
        raise PartitionError(
            f"partition is auto, but the {num_layers} layers have not been measured for {num_stages} stages.",
            remedy="`penstock plan MODEL` measures now.",
            param="partition",
        )
    else:
        given = _parse(policy) if isinstance(policy, str) else list(policy)
        counts = _explicit(given, num_layers, num_stages)
    ends = list(accumulate(counts))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def asked_layers(num_layers: int, num_stages: int, policy: str) -> list[int] | None:
    """Return how many layers each stage gets; None for `auto`, which leaves that to the planner.

    Raises:
        PartitionError: the layers cannot be cut so.
    """
    if policy == AUTO_POLICY:
        return None
    return [end - start for start, end in partition_layers(num_layers, num_stages, policy)]


def _check_counts(num_layers: int, num_stages: int) -> None:
    if num_stages < 1:
        raise PartitionError(
            f"the number of stages is {num_stages}.", remedy="Use at least 1.", code="out_of_range"
        )
    if num_stages > num_layers:
        raise PartitionError(
            f"`--pp {num_stages}` is more than the model's {num_layers} layers.",
            remedy=f"Use at most {num_layers}.",
            param="pipeline_parallel_size",
            code="out_of_range",
        )


def _remainder_before_last(num_layers: int, num_stages: int) -> list[int]:
    """Return the counts in which stages P-2, P-3, ..., P-1-r have one of the r extra layers [A2] [S6]."""
    base, remainder = divmod(num_layers, num_stages)
    first_extra = num_stages - 1 - remainder
    return [base + (first_extra <= stage < num_stages - 1) for stage in range(num_stages)]


def _remainder_on_last(num_layers: int, num_stages: int) -> list[int]:
    base, remainder = divmod(num_layers, num_stages)
    return [base + (stage >= num_stages - remainder) for stage in range(num_stages)]


def _parse(text: str) -> list[int]:
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entry.isascii() and entry.isdigit() and len(entry) <= 9 for entry in entries):
        raise PartitionError(
            f'partition is "{text}", which is not a list of layer counts.',
            remedy="Write one number per stage with commas between, such as 5,6,5,6, or even, last or auto.",
            param="partition",
        )
    return [int(entry) for entry in entries]


def _explicit(counts: list[int], num_layers: int, num_stages: int) -> list[int]:
    text = ",".join(map(str, counts))
    if len(counts) != num_stages:
        raise PartitionError(
            f'partition "{text}" has {len(counts)} entries for {num_stages} stages.',
            remedy=f"Give {num_stages} numbers.",
            param="partition",
        )
    if min(counts) < 1:
        raise PartitionError(
            f'partition "{text}" leaves a stage without layers.',
            remedy="Give every stage at least 1.",
            param="partition",
        )
    if sum(counts) != num_layers:
        raise PartitionError(
            f'partition "{text}" sums to {sum(counts)}, the model has {num_layers} layers.',
            remedy=f"Make the numbers sum to {num_layers}.",
            param="partition",
        )
    return counts
