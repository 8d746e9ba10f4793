"""A topology file: a description of the stages of a pipeline one by one, for stages that differ.

    [[stage]]
    layers = 20
    tp = 2
    device = ["cuda:0", "cuda:1"]     # one, or one for each rank
    threads = 1

    [[stage]]
    layers = 8
    device = "cpu"
    threads = 12

The file takes the place of `--pp`, `--tp`, `--device` and `--threads-per-rank`. If its stages have `layers`,
it takes the place of `--partition` too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.config.engine import ParallelConfig
from penstock.errors import UsageError

_GIVEN_BY_IT = ("pipeline_parallel_size", "tensor_parallel_size", "device", "threads_per_rank")

Value = TypeVar("Value", int, str)


class _Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a file about one stage. All stages have `layers` or none has; so too with `threads`."""

    layers: int | None = None
    tp: int = 1
    device: str | list[str] = "cpu"
    threads: int | list[int] | None = None


class _Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stage: list[_Stage]


def with_topology(parallel: ParallelConfig, path: str | os.PathLike[str]) -> ParallelConfig:
    """Return the settings with the stages of a topology file.

    Args:
        parallel: the settings; those whose place the file takes must have their defaults.
        path: the file.

    Raises:
        UsageError: the file cannot be read or contradicts itself, or a setting whose place it takes has
            another value than its default.
    """
    stages = _read(Path(path))
    says_layers = any(stage.layers is not None for stage in stages)
    for name in (*_GIVEN_BY_IT, *(["partition"] if says_layers else [])):
        if getattr(parallel, name) != getattr(ParallelConfig(), name):
            raise UsageError(
                f"{name} and a topology file both define the stages.",
                remedy="Leave out one of them.",
                param=name,
            )
    layers = [stage.layers for stage in stages]
    threads = [
        _for_each_rank(path, stage, "threads", stage.threads) for stage in stages if stage.threads is not None
    ]
    for name, num_given in (("layers", len(layers) - layers.count(None)), ("threads", len(threads))):
        if num_given not in (0, len(stages)):
            raise _bad(path, f"{num_given} of {len(stages)} stages have {name}", "Give all of them, or none.")
    devices = [device for stage in stages for device in _for_each_rank(path, stage, "device", stage.device)]
    return msgspec.structs.replace(
        parallel,
        pipeline_parallel_size=len(stages),
        tensor_parallel_size=[stage.tp for stage in stages],
        partition=",".join(map(str, layers)) if says_layers else parallel.partition,
        device=",".join(devices),
        threads_per_rank=[count for own in threads for count in own] or None,
    )


def _read(path: Path) -> list[_Stage]:
    try:
        stages = msgspec.toml.decode(path.read_text(encoding="utf-8-sig"), type=_Topology).stage
    except OSError as error:
        raise _bad(path, f"it cannot be read: {error.strerror}", "Give a readable TOML file.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        remedy = "Write a table [[stage]] for each stage, with tp, device, threads and layers."
        raise _bad(path, str(error), remedy) from error
    if not stages:
        raise _bad(path, "it defines no stage", "Write a table [[stage]] for each stage.")
    for stage in stages:
        if stage.tp < 1:
            raise _bad(path, f"tp is {stage.tp}", "Use 1 or more.")
    return stages


def _for_each_rank(
    path: str | os.PathLike[str], stage: _Stage, name: str, given: Value | list[Value]
) -> list[Value]:
    """Return a value for each rank of the stage; a single value is given to all of them."""
    if not isinstance(given, list):
        return [given] * stage.tp
    if len(given) != stage.tp:
        raise _bad(
            path, f"a stage of {stage.tp} ranks has {len(given)} entries of {name}", "Give one for each."
        )
    return given


def _bad(path: str | os.PathLike[str], what: str, remedy: str) -> UsageError:
    return UsageError(f"topology file {os.fspath(path)}: {what}.", remedy=remedy, param="topology")
