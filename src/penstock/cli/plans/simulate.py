"""`penstock simulate`: how fast a load of requests would be served on devices that need not exist.

Called by `cli.program`. The engine's own scheduler and core run over simulated stages
(`simulator.simulation`). This module makes the load and the stages of the flags, and shows the report. The
simulator and numpy are imported only when the command runs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from penstock.cli.bench.load_shape import LoadShape
from penstock.cli.flags import flag, with_settings
from penstock.cli.terminal import Invocation, printable
from penstock.config.declared import ENGINE, configured_engine
from penstock.config.engine import EngineConfig, ParallelConfig
from penstock.errors import UsageError
from penstock.workloads.requests import BenchRequest, at_rate, check_fits, synthetic
from penstock.workloads.traces import TraceKind

if TYPE_CHECKING:
    from penstock.simulator.pipe import StageLoss
    from penstock.simulator.replica import EngineSettings
    from penstock.simulator.simulation import FinishedRun

_VOCABULARY = 32_000  # random ids are below this; they matter only in that some prompts begin alike
_KEPT_SPANS = 400_000  # of a timeline: about 100 MB of JSON
_SPANS_PER_STEP = 4
_SECONDS = r"([0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})"
_LOSS = re.compile(rf"(?:([0-9]{{1,4}})\.)?([0-9]{{1,4}})@{_SECONDS}:{_SECONDS}")
_MAX_JITTER_MS = 60_000.0
_MAX_SPREAD = 4.0


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLoad(LoadShape):
    """The requests that are sent, and their times."""

    trace: Annotated[Path | None, flag("trace file; default: random prompts", "--trace", group="load")] = None
    trace_kind: Annotated[
        TraceKind, flag("auto, azure, mooncake, sharegpt, custom", "--trace-kind", group="load")
    ] = "auto"
    num_requests: Annotated[
        int | None,
        flag(
            "requests to replay; default: all, or 100 random", "--num-requests", "--num-prompts", group="load"
        ),
    ] = None
    request_rate: Annotated[
        float | None, flag("requests a second, in place of a trace's", "--request-rate", group="load")
    ] = None
    input_len: Annotated[int, flag("tokens of random prompts", "--input-len", group="load")] = 512
    output_len: Annotated[int, flag("tokens of random outputs", "--output-len", group="load")] = 128

    def requests(self, seed: int) -> list[BenchRequest]:
        """Return all requests. Raises `UsageError` if a flag or the trace file is bad."""
        self.require_concurrency()
        if self.trace is None:
            return self._random(100 if self.num_requests is None else self.num_requests, seed)
        requests = self.of_trace(
            self.trace, self.num_requests, self.trace_kind, vocab_size=_VOCABULARY, seed=seed
        )
        if self.request_rate is None:
            return sorted(requests, key=lambda request: request.arrival_s)  # a trace need not be in order
        return at_rate(requests, self.request_rate, self.burstiness, seed)

    def _random(self, count: int, seed: int) -> list[BenchRequest]:
        return synthetic(
            num_prompts=count,
            input_len=self.input_len,
            output_len=self.output_len,
            range_ratio=0.0,
            request_rate=math.inf if self.request_rate is None else self.request_rate,
            burstiness=self.burstiness,
            vocab_size=_VOCABULARY,
            seed=seed,
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTrouble:
    """The conditions besides the load: late links, uneven steps, losses of stages, and right guesses."""

    jitter_ms: Annotated[
        float, flag("largest extra delay of links between hosts", "--jitter-ms", group="simulation")
    ] = 0.0
    step_spread: Annotated[
        float, flag("how much times of like steps differ, as a share", "--step-spread", group="simulation")
    ] = 0.0
    lose_stage: Annotated[
        tuple[str, ...],
        flag("STAGE@SECONDS:AWAY: when a stage is lost, and how long", "--lose-stage", group="simulation"),
    ] = ()
    acceptance: Annotated[
        float, flag("share of drafts that are accepted; 0: no drafts", "--acceptance", group="simulation")
    ] = 0.0

    @property
    def jitter_s(self) -> float:
        """The jitter in seconds. Raises `UsageError` for what no link has."""
        if not 0 <= self.jitter_ms <= _MAX_JITTER_MS:
            raise UsageError(
                f"--jitter-ms is {self.jitter_ms:g}; it must be between 0 and {_MAX_JITTER_MS:g}.",
                param="--jitter-ms",
                code="out_of_range",
            )
        return self.jitter_ms / 1000

    @property
    def spread(self) -> float:
        """The standard deviation of the times of like steps, as a share of their mean.

        Raises `UsageError` for what no machine has.
        """
        if not 0 <= self.step_spread <= _MAX_SPREAD:
            raise UsageError(
                f"--step-spread is {self.step_spread:g}; it must be between 0 and {_MAX_SPREAD:g}.",
                remedy="0.3 means that the times of like steps differ by 30 % of their mean.",
                param="--step-spread",
                code="out_of_range",
            )
        return self.step_spread

    def losses(self, num_stages: int, num_replicas: int) -> list[StageLoss]:
        """Return the losses of stages that are to happen.

        Raises `UsageError` for a text that cannot be read, or a stage that does not exist.
        """
        from penstock.simulator.pipe import StageLoss

        losses = []
        for text in self.lose_stage:
            match = _LOSS.fullmatch(text)
            replica, stage = (int(match[1] or 0), int(match[2])) if match else (0, 0)
            if match is None or stage >= num_stages or replica >= num_replicas:
                raise UsageError(
                    f"--lose-stage {text}: there is no such stage among {num_replicas} x {num_stages}, or a "
                    "time is missing.",
                    remedy="Write STAGE@SECONDS:AWAY, such as 1@30:5; for a replica, REPLICA.STAGE@30:5.",
                    param="lose_stage",
                )
            losses.append(
                StageLoss(stage=stage, at_s=float(match[3]), away_s=float(match[4]), replica=replica)
            )
        return losses


_LOAD, _TROUBLE = SimulatedLoad(), SimulatedTrouble()


@with_settings(*ENGINE)
def simulate(
    model: str | None = None,
    /,
    *,
    devices: Annotated[
        str | None, flag("such as a100-80g:4, cpu:16c:64g, FILE.toml", "--devices", group="simulation")
    ] = None,
    load: SimulatedLoad = _LOAD,
    trouble: SimulatedTrouble = _TROUBLE,
    timeline: Annotated[
        Path | None, flag("trace of the first plans, for Perfetto", "--timeline", group="simulation")
    ] = None,
    as_json: Annotated[bool, flag("print the report as JSON", "--json", group="simulation")] = False,
    invocation: Annotated[Invocation, Parameter(parse=False)],
    **given: Any,
) -> int:
    """Run the command. Returns 0 with a report on standard output."""
    if not model or not devices:
        raise UsageError(
            f"no {'devices are' if model else 'model is'} given.",
            remedy="Use `penstock simulate MODEL --devices a100-80g:4 --pp 4 --trace FILE`.",
        )
    from penstock.simulator.report import as_json as report_of
    from penstock.simulator.report import lines

    config = configured_engine(given, model)
    split = _split(config.parallel.partition, given)
    run = _run(config, devices, load, trouble, split=split, keeps_times=timeline is not None)
    if timeline is not None:
        _write_timeline(timeline, run)
    numbers = report_of(run)
    if as_json:
        invocation.say(json.dumps(numbers, ensure_ascii=False))
    else:
        invocation.say(*map(printable, lines(numbers)))
    return 0


def _run(
    config: EngineConfig,
    devices: str,
    load: SimulatedLoad,
    trouble: SimulatedTrouble,
    *,
    split: str,
    keeps_times: bool,
) -> FinishedRun:
    from penstock.cli.plans.plan_devices import load_of
    from penstock.engine.supervisor.launch import QUANTIZATION_BITS
    from penstock.families.transformers_fields import require_plain
    from penstock.layouts.device_file import devices_of
    from penstock.layouts.device_text import HERE, JOINED
    from penstock.layouts.layout import require_place_for_quantised
    from penstock.layouts.model_sizes import read_sizes
    from penstock.pipeline.partition import asked_layers
    from penstock.simulator.planned_pipe import fixed_layout, planned_pipe
    from penstock.simulator.simulation import Simulation

    parallel = config.parallel
    if devices.strip().lower() in (HERE, JOINED):
        raise UsageError(
            f"--devices {devices.strip()} stands for machines that are there; they cannot be simulated.",
            remedy="Describe the devices, such as cpu:16c:64g; `penstock plan` takes here and joined.",
            param="devices",
        )
    requests = load.requests(config.seed)
    sizes, device_set = read_sizes(config.model), devices_of(devices)
    at_once = min(load.max_concurrency, len(requests)) if load.max_concurrency else None
    asked = load_of(config, sizes, at_once or config.scheduler.max_num_seqs)
    if len(set(parallel.tp_sizes)) > 1:
        raise UsageError(
            "all simulated stages must have the same number of ranks.", remedy="Give one number to --tp."
        )
    require_plain(sizes.spec, config.model.quantization, parallel)
    require_place_for_quantised(device_set, sizes.spec, QUANTIZATION_BITS.get(config.model.quantization))
    layout = fixed_layout(
        device_set,
        sizes.spec,
        pp=parallel.pipeline_parallel_size,
        tp=parallel.tp_sizes[0],
        dp=parallel.data_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
    )
    layers = asked_layers(sizes.spec.num_layers, parallel.pipeline_parallel_size, split)
    pipeline = planned_pipe(
        layout, sizes, device_set, asked, jitter_s=trouble.jitter_s, spread=trouble.spread, layers=layers
    )
    check_fits(requests, pipeline.max_model_len)
    num_plans = _KEPT_SPANS // _SPANS_PER_STEP // (pipeline.num_stages * layout.dp)
    simulation = Simulation(
        pipeline,
        _engine_settings(config, asked.scheduler, trouble),
        num_replicas=layout.dp,
        max_concurrency=load.max_concurrency,
        losses=trouble.losses(pipeline.num_stages, layout.dp),
        max_kept=max(1, num_plans) if keeps_times else 0,
    )
    return simulation.run(requests)


def _split(partition: str, given: Collection[str]) -> str:
    """Return the split of the layers that the user asks for; else the planner chooses it."""
    from penstock.pipeline.partition import AUTO_POLICY

    is_asked = "partition" in given or partition != ParallelConfig().partition  # or by a topology file
    return partition if is_asked else AUTO_POLICY


def _engine_settings(config: EngineConfig, scheduler: Any, trouble: SimulatedTrouble) -> EngineSettings:
    from penstock.simulator.replica import EngineSettings

    if not 0.0 <= trouble.acceptance < 1.0:
        raise UsageError(f"acceptance is {trouble.acceptance}; it must be at least 0 and below 1.")
    return EngineSettings(
        scheduler=scheduler,
        cache=config.cache,
        async_depth=0 if config.parallel.async_depth == "auto" else config.parallel.async_depth,
        acceptance=trouble.acceptance,
        most_drafts=config.speculation.num_speculative_tokens,
        seed=config.seed,
    )


def _write_timeline(path: Path, run: FinishedRun) -> None:
    from penstock.cli.bench.results import write_json
    from penstock.simulator.timeline import timeline
    from penstock.trace.chrome import chrome_trace

    write_json(path, chrome_trace(timeline(run)))
