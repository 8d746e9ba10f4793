"""`penstock plan --devices`: the layout that a model should have on devices, and how fast it would be.

Called by `cli.plans.plan`. Devices may be described by the user, and then need not be there
(`layouts.estimate`). They may be this machine, whose stages are measured (`layouts.measured`), or the hosts
that join, which say what devices they have.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.cli.plans.spoken_events import Speaker
from penstock.cli.terminal import Invocation, printable
from penstock.config.declared import configured_engine
from penstock.config.engine import EngineConfig, ParallelConfig, SchedulerConfig
from penstock.engine.supervisor.auto_partition import choose_partition
from penstock.engine.supervisor.launch import QUANTIZATION_BITS, longest_request
from penstock.errors import NotEnoughMemoryError, UsageError
from penstock.hosts.launchers.backends import open_hosts
from penstock.hosts.launchers.engine_hosts import Voices
from penstock.hosts.rank_host import Hosts
from penstock.layouts.device_file import devices_of
from penstock.layouts.device_text import HERE, JOINED
from penstock.layouts.devices import DeviceSet
from penstock.layouts.estimate import Estimate
from penstock.layouts.layout import Layout, Wanted, require_place_for_quantised
from penstock.layouts.machines import cpu_device, devices_of_hosts
from penstock.layouts.measured import devices_here, layouts_here, measured_estimate
from penstock.layouts.model_sizes import ModelSizes, read_sizes
from penstock.layouts.prediction import Load
from penstock.layouts.recommend import Recommendation, estimates_on, recommend, wanted_estimates
from penstock.layouts.report import LayoutReport
from penstock.layouts.sensitivity import improvements
from penstock.pipeline.partition import AUTO_POLICY, partition_layers
from penstock.planner.mix import Mix

_MAX_CONCURRENCY = 1 << 20
_BY_FIGURES = "Times assume that devices reach a fixed share of their specified rates; see docs/plan.md."
_BY_MEASURING = "Times are based on steps measured on this machine."


def plan_for_devices(
    model: str,
    text: str,
    concurrency: int,
    given: Mapping[str, Any],
    invocation: Invocation,
    *,
    as_json: bool,
) -> int:
    """Print the plan. Returns 0.

    Args:
        text: value of `--devices`.
        concurrency: requests at once.
        given: settings of the engine that the user gave.
        as_json: whether to print the plan as JSON.
    """
    if not 1 <= concurrency <= _MAX_CONCURRENCY:
        raise UsageError(
            f"concurrency is {concurrency}; it must be between 1 and {_MAX_CONCURRENCY}.", param="concurrency"
        )
    config = configured_engine(given, model)
    sizes = read_sizes(config.model)
    question = _Question(config, sizes, load_of(config, sizes, concurrency), _wanted(given, config))
    speaker = Speaker(lambda line: None if as_json else invocation.say(line))
    word = text.strip().lower()
    if word == HERE:
        report = question.here(speaker)
    elif word == JOINED:
        report = question.on(question.joined(speaker))
    else:
        devices = devices_of(text)
        require_place_for_quantised(devices, sizes.spec, QUANTIZATION_BITS.get(config.model.quantization))
        report = question.on(devices)
    if as_json:
        invocation.say(json.dumps(report.as_json(), ensure_ascii=False))
    else:
        invocation.say(*map(printable, report.lines()))
    return 0


def load_of(config: EngineConfig, sizes: ModelSizes, concurrency: int) -> Load:
    """Return the load for which layouts are judged.

    If `--max-num-seqs` has its default, it is raised to `concurrency` if needed, so that all requests can run
    at once; so too the tokens of a plan.
    """
    scheduler = config.scheduler
    if scheduler.max_num_seqs == SchedulerConfig().max_num_seqs < concurrency:
        tokens = max(scheduler.max_num_batched_tokens, concurrency)
        scheduler = msgspec.structs.replace(
            scheduler, max_num_seqs=concurrency, max_num_batched_tokens=tokens
        )
    return Load(
        concurrency=concurrency,
        mix=Mix.parse(config.parallel.partition_mix),
        max_model_len=longest_request(config.model.max_model_len, sizes.spec),
        scheduler=scheduler,
        cache=config.cache,
    )


def _wanted(given: Mapping[str, Any], config: EngineConfig) -> Wanted:
    """Return what the user has fixed of the layout. A topology file fixes stages and ranks."""
    parallel = config.parallel
    fixed = set(given)
    has_file = given.get("topology") is not None
    return Wanted(
        pp=parallel.pipeline_parallel_size if has_file or "pipeline_parallel_size" in fixed else None,
        tp=tuple(parallel.tp_sizes) if has_file or "tensor_parallel_size" in fixed else None,
        dp=parallel.data_parallel_size if "data_parallel_size" in fixed else None,
        ep=parallel.enable_expert_parallel if "enable_expert_parallel" in fixed else None,
    )


class _Question:
    """The question of a user about one model: in which layout it should run on some devices.

    Args:
        config: the user's settings of the engine.
        sizes: the sizes of the model.
        load: the load for which layouts are judged.
        wanted: what the user has fixed of the layout.
    """

    def __init__(self, config: EngineConfig, sizes: ModelSizes, load: Load, wanted: Wanted) -> None:
        self._config = config
        self._sizes = sizes
        self._load = load
        self._wanted = wanted

    def on(self, devices: DeviceSet) -> LayoutReport:
        """Answer for devices that are described."""
        estimates = self._estimates(devices)
        recommendation = recommend(estimates, devices, self._sizes)
        would_help = improvements(
            recommendation.best, devices, lambda other: self._best(self._estimates(other), other)
        )
        return LayoutReport(
            sizes=self._sizes,
            devices=devices,
            load=self._load,
            shown=self._shown(estimates, recommendation),
            recommendation=recommendation,
            would_help=would_help,
            basis=_BY_FIGURES,
            serve_flags=self._serve_flags(),
        )

    def here(self, speaker: Speaker) -> LayoutReport:
        """Answer for this machine, whose stages are measured."""
        config = msgspec.structs.replace(
            self._config, cluster=msgspec.structs.replace(self._config.cluster, hosts=1)
        )
        with contextlib.closing(open_hosts(config, Voices(speaker.note, speaker.caution))) as gathered:
            gathered.gather([])
            (resources,) = gathered.hosts.resources()
            device = cpu_device(resources)
            load_bits = QUANTIZATION_BITS.get(config.model.quantization)
            layouts = layouts_here(device, self._sizes.spec, self._wanted, load_bits)
            if not layouts:
                raise UsageError(
                    f"no layout with the given flags is possible on {device.cores} cores.",
                    remedy="Leave --pp and --tp out, or lower them.",
                )
            measured = [self._measured(layout, gathered.hosts, speaker) for layout in layouts]
        devices = devices_here(device, resources.name)
        estimates = sorted(
            (each for each in measured if each is not None), key=lambda each: each.predicted.time_per_token_s
        )
        if not estimates:
            recommend([], devices, self._sizes)  # raises the error that says what does not fit
        best = estimates[0]
        recommendation = Recommendation(
            best=best,
            reasons=("Of the measured layouts, it gives the next token soonest.",),
            alternatives=tuple(estimates[1:]),
        )
        return LayoutReport(
            sizes=self._sizes,
            devices=devices,
            load=self._load,
            shown=best,
            recommendation=recommendation,
            would_help=(),
            basis=_BY_MEASURING,
            serve_flags=self._serve_flags(),
        )

    def joined(self, speaker: Speaker) -> DeviceSet:
        """Wait for the hosts that join, and return their devices."""
        hosts = self._config.cluster.hosts
        if hosts < 2:
            raise UsageError(
                "joined stands for the hosts that join, and no host is to join.",
                remedy="Add --hosts N, and the other flags that `penstock serve` needs with it.",
                param="devices",
            )
        # A stage for each host: the number that the user wants, and settings for each, do not matter yet.
        parallel = ParallelConfig(pipeline_parallel_size=hosts, backend=self._config.parallel.backend)
        config = msgspec.structs.replace(self._config, parallel=parallel)
        with contextlib.closing(open_hosts(config, Voices(speaker.note, speaker.caution))) as gathered:
            gathered.gather([])
            return devices_of_hosts(gathered.hosts.resources(), gathered.hosts.routes.links())

    def _measured(self, layout: Layout, hosts: Hosts, speaker: Speaker) -> Estimate | None:
        parallel = msgspec.structs.replace(
            self._config.parallel,
            pipeline_parallel_size=layout.pp,
            tensor_parallel_size=layout.tp,
            data_parallel_size=1,
            partition=AUTO_POLICY,
        )
        config = msgspec.structs.replace(self._config, parallel=parallel, scheduler=self._load.scheduler)
        try:
            choice = choose_partition(config, self._load.mix, hosts, speaker)
        except NotEnoughMemoryError:
            return None
        even = [end - start for start, end in partition_layers(self._sizes.spec.num_layers, layout.pp)]
        return measured_estimate(
            layout, choice, self._sizes, self._load, is_default_split=list(choice.best.layers) == even
        )

    def _estimates(self, devices: DeviceSet) -> list[Estimate]:
        load_bits = QUANTIZATION_BITS.get(self._config.model.quantization)
        return estimates_on(devices, self._sizes, self._load, load_bits)

    def _best(self, estimates: Sequence[Estimate], devices: DeviceSet) -> Estimate:
        return recommend(estimates, devices, self._sizes).best

    def _shown(self, estimates: Sequence[Estimate], recommendation: Recommendation) -> Estimate:
        """Return the recommended layout, or the best layout with what the user has fixed."""
        if self._wanted.is_open:
            return recommendation.best
        allowed = wanted_estimates(estimates, self._wanted)
        if not allowed:
            raise UsageError(
                "no layout with the given --pp, --tp, --dp and --ep fits these devices.",
                remedy="Leave some of these flags out; the recommended layout is "
                f"{recommendation.best.flags}.",
            )
        return recommendation.best if recommendation.best in allowed else allowed[0]

    def _serve_flags(self) -> str:
        """Return the flags, besides those of the layout, that `penstock serve` needs for this plan."""
        model, scheduler = self._config.model, self._load.scheduler
        flags = [] if model.quantization == "none" else [f"--quantization {model.quantization}"]
        flags += ["--gguf-dequantize"] if model.gguf_dequantize else []
        flags += [] if model.dtype == "auto" else [f"--dtype {model.dtype}"]
        flags += [] if model.model_impl == "auto" else [f"--model-impl {model.model_impl}"]
        flags += [] if model.max_model_len is None else [f"--max-model-len {model.max_model_len}"]
        if scheduler != SchedulerConfig():
            flags.append(f"--max-num-seqs {scheduler.max_num_seqs}")
        return " ".join(flags)
