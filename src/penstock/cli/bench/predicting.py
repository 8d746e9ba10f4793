"""The planner's predictions for a layout that a benchmark runs, to be shown beside what was measured.

`--predict here` measures the stages on this machine before the benchmark runs, or uses what was measured
earlier. `--predict DEVICES` computes times from the figures of devices, which are given as for `penstock
plan`. The load is the benchmark's: its requests at once, and its mean lengths as the typical request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from penstock.cli.plans.plan_devices import load_of
from penstock.cli.plans.spoken_events import Speaker
from penstock.config.declared import ENGINE, configured_engine, declared
from penstock.config.engine import EngineConfig, ParallelConfig
from penstock.engine.supervisor.auto_partition import choose_partition
from penstock.errors import NotEnoughMemoryError, UsageError
from penstock.hosts.launchers.backends import open_hosts
from penstock.hosts.launchers.engine_hosts import Voices
from penstock.hosts.rank_host import Hosts
from penstock.layouts.device_file import devices_of
from penstock.layouts.device_text import HERE
from penstock.layouts.estimate import estimate
from penstock.layouts.machines import cpu_device
from penstock.layouts.measured import layout_here, measured_estimate
from penstock.layouts.model_sizes import ModelSizes, read_sizes
from penstock.layouts.prediction import Load, Prediction
from penstock.pipeline.partition import AUTO_POLICY, asked_layers
from penstock.planner.mix import Mix
from penstock.reports.figures import PredictedFigures
from penstock.simulator.planned_pipe import fixed_layout

Predictions = dict[int, PredictedFigures]
"""By the number of requests at once."""

_BY_MEASURING = "Predictions are based on steps of each stage, measured on this machine."
_BY_FIGURES = "Predictions assume that devices reach a fixed share of their specified rates."
_SERVED_KEYS = frozenset(
    {
        *(
            "dtype",
            "quantization",
            "gguf-dequantize",
            "max-model-len",
            "threads-per-rank",
            "device",
            "kernels",
        ),
        *("block-size", "num-blocks", "kv-cache-bytes", "max-num-seqs", "max-num-batched-tokens"),
        *("prefill-chunk", "async-depth", "tensor-parallel-size", "data-parallel-size"),
        "enable-expert-parallel",
    }
)


def predictions(
    config: EngineConfig,
    text: str,
    concurrencies: Sequence[int],
    lengths: tuple[int, int],
    say: Callable[[str], None],
    layers: Sequence[int] | None = None,
) -> Predictions:
    """Return what is predicted for each number of requests at once.

    Args:
        config: config of the engine that runs.
        text: value of `--predict`.
        concurrencies: the numbers of requests at once.
        lengths: tokens of a typical prompt and output.
        say: prints a line about the measuring.
        layers: number of layers of each stage; None: as the partition says.

    Raises:
        UsageError: the devices cannot be read or are too few, or the layout cannot be measured here.
        NotEnoughMemoryError: the model does not fit.
        PenstockError: a stage could not be measured.
    """
    mix = f"{max(lengths[0], 1)}:{max(lengths[1], 1)}"
    config = msgspec.structs.replace(
        config, parallel=msgspec.structs.replace(config.parallel, partition_mix=mix)
    )
    tp_sizes = config.parallel.tp_sizes
    if len(set(tp_sizes)) > 1:
        raise UsageError(
            "stages with different numbers of ranks cannot be predicted.", remedy="Use --predict off."
        )
    if text.strip().lower() == HERE:
        return _by_measuring(config, concurrencies, layers, say)
    return _by_figures(config, text, concurrencies, layers)


def served_config(info: dict[str, Any], model: str) -> EngineConfig:
    """Return what a server runs with, as far as predictions depend on it.

    Args:
        info: the answer of `/server_info`.
        model: where the model is on this machine.
    """
    settings, stages = info.get("settings") or {}, info.get("stages") or []
    given = {
        each.name: settings[each.key]
        for each in declared(*ENGINE)
        if each.key in _SERVED_KEYS and settings.get(each.key) is not None
    }
    given["pipeline_parallel_size"] = max(1, len(stages))
    return configured_engine(given, model)


def served_layers(info: dict[str, Any]) -> list[int] | None:
    """Return the number of layers of each stage of a server; None if the server does not report them."""
    stages = info.get("stages") or []
    return [int(stage["end_layer"]) - int(stage["start_layer"]) for stage in stages] or None


def _by_figures(
    config: EngineConfig, text: str, concurrencies: Sequence[int], layers: Sequence[int] | None
) -> Predictions:
    sizes, devices, parallel = read_sizes(config.model), devices_of(text), config.parallel
    layout = fixed_layout(
        devices,
        sizes.spec,
        pp=parallel.pipeline_parallel_size,
        tp=parallel.tp_sizes[0],
        dp=parallel.data_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
    )
    split = _layers(parallel, sizes) if layers is None else layers
    found = {}
    for concurrency in concurrencies:
        known = estimate(layout, sizes, devices, _load(config, sizes, concurrency), split)
        if known is None:
            raise NotEnoughMemoryError(f"{layout.name} of this model does not fit {text}.")
        found[concurrency] = _figures(known.predicted, _BY_FIGURES)
    return found


def _by_measuring(
    config: EngineConfig,
    concurrencies: Sequence[int],
    layers: Sequence[int] | None,
    say: Callable[[str], None],
) -> Predictions:
    parallel = config.parallel
    if parallel.data_parallel_size > 1:
        raise UsageError("several replicas cannot be measured here.", remedy="Name the devices in --predict.")
    sizes, speaker = read_sizes(config.model), Speaker(say)
    split = _layers(parallel, sizes) if layers is None else layers
    with _this_host(config, speaker) as hosts:
        (resources,) = hosts.resources()
        mix = Mix.parse(parallel.partition_mix)
        choice = choose_partition(config.with_partition(AUTO_POLICY), mix, hosts, speaker)
    layout = layout_here(cpu_device(resources), parallel.pipeline_parallel_size, parallel.tp_sizes[0])
    found = {}
    for concurrency in concurrencies:
        load = _load(config, sizes, concurrency)
        known = measured_estimate(layout, choice, sizes, load, is_default_split=False, layers=split)
        found[concurrency] = _figures(known.predicted, _BY_MEASURING)
    return found


@contextlib.contextmanager
def _this_host(config: EngineConfig, speaker: Speaker) -> Iterator[Hosts]:
    alone = msgspec.structs.replace(config, cluster=msgspec.structs.replace(config.cluster, hosts=1))
    with contextlib.closing(open_hosts(alone, Voices(speaker.note, speaker.caution))) as gathered:
        gathered.gather([])
        yield gathered.hosts


def _layers(parallel: ParallelConfig, sizes: ModelSizes) -> list[int] | None:
    return asked_layers(sizes.spec.num_layers, parallel.pipeline_parallel_size, parallel.partition)


def _load(config: EngineConfig, sizes: ModelSizes, concurrency: int) -> Load:
    """Return the load, with the number of plans that are issued ahead."""
    depth = config.parallel.async_depth
    return replace(load_of(config, sizes, concurrency), plans_ahead=0 if depth == "auto" else depth)


def _figures(predicted: Prediction, basis: str) -> PredictedFigures:
    return PredictedFigures(
        basis=basis,
        ttft_s=predicted.ttft_s,
        time_per_token_s=predicted.time_per_token_s,
        tokens_per_s=predicted.tokens_per_s,
        bubble=predicted.bubble,
    )
