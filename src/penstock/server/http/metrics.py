"""Prometheus metrics of `/metrics`; those that vLLM has are named as there, with `penstock_` for `vllm:`.

The core's numbers are read from its last message when a scrape comes. The front counts what it sees itself
here: requests when they end, and the time between tokens as they come. Histograms are plain lists of counts,
cheap enough for every token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.process_collector import ProcessCollector

from penstock import __version__
from penstock.batch import StageTimes
from penstock.engine.stats import CoreStats, StageMemory
from penstock.process.pipe_hosts import PipeHosts
from penstock.server.engine_port import EngineLike, ServedModel
from penstock.server.http.metric_names import PREFIX, under_own_names
from penstock.server.http.request_record import RequestRecord
from penstock.trace.phases import BUBBLES, Phase

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_OF_STAGE = ("model_name", "replica", "stage")  # labels
_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


class Histogram:
    """The counts of values by upper bound; the values are seconds or tokens.

    Args:
        name: the metric's name without the prefix.
        text: what the metric is, for readers of `/metrics`.
        bounds: upper bounds, ascending; values above the last one are counted too.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    @property
    def totals(self) -> tuple[int, float]:
        """Return how many values were counted, and their sum."""
        return sum(self._counts), self._sum

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, label: str) -> HistogramMetricFamily:
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family = HistogramMetricFamily(PREFIX + self.name, self.text, labels=["model_name"])
        family.add_metric([label], buckets=buckets, sum_value=self._sum)
        return family


class RequestHistograms:
    """The histograms of times and tokens of requests that generated, counted when a request ends.

    Iteration yields the histograms.
    """

    def __init__(self) -> None:
        self.ttft = Histogram("time_to_first_token_seconds", "From request to first token.", _SHORT)
        self._tpot = Histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a token after the first.",
            _SHORT,
        )
        self._e2e = Histogram("e2e_request_latency_seconds", "From request to last token.", _LONG)
        self._queue = Histogram("request_queue_time_seconds", "Waiting to be scheduled.", _LONG)
        self._prefill = Histogram("request_prefill_time_seconds", "From the queue to the first token.", _LONG)
        self._decode = Histogram("request_decode_time_seconds", "From first to last token.", _LONG)
        self._prompt = Histogram("request_prompt_tokens", "Tokens of a request's prompts.", _TOKENS)
        self._generated = Histogram("request_generation_tokens", "Tokens that a request generated.", _TOKENS)

    def __iter__(self) -> Iterator[Histogram]:
        yield from (self.ttft, self._tpot, self._e2e, self._queue)
        yield from (self._prefill, self._decode, self._prompt, self._generated)

    def observe(self, record: RequestRecord, now: float) -> None:
        self._e2e.observe(now - record.started_at)
        self._prompt.observe(record.prompt_tokens)
        self._generated.observe(record.output_tokens)
        ttft, tpot, queue = record.ttft_seconds(), record.tpot_seconds(), record.queue_seconds
        if ttft is not None:
            self.ttft.observe(ttft)
        if tpot is not None:
            self._tpot.observe(tpot)
        if queue is not None:
            self._queue.observe(queue)
        if ttft is not None and queue is not None:
            self._prefill.observe(ttft - queue)
        if record.first_token_at is not None and record.last_token_at is not None:
            self._decode.observe(record.last_token_at - record.first_token_at)


class Metrics:
    """A prometheus collector of the engine's status and the front's own counts.

    Args:
        renamed: returns a family of metrics again under other names (`server.http.metric_names`).

    Attributes:
        inter_token: times between tokens; `answers.generation` adds to it while requests run.
        first_token: times from the request to its first token.
    """

    def __init__(
        self,
        model: ServedModel,
        engine: EngineLike,
        renamed: Callable[[Metric], Iterable[Metric]] = under_own_names,
    ) -> None:
        self._label = model.name
        self._num_stages = model.num_stages
        self._engine = engine
        self._finished: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self.inter_token = Histogram("inter_token_latency_seconds", "Time between tokens.", _SHORT)
        self._of_requests = RequestHistograms()
        self.first_token = self._of_requests.ttft
        self._renamed = renamed
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(namespace="penstock_api", registry=self._registry)

    def observe(self, record: RequestRecord, now: float) -> None:
        """Count a request that has ended."""
        if record.generated:
            self._finished[record.finish_reason or "error"] += 1
            self._of_requests.observe(record, now)
        elif record.status >= 400:
            self._rejected[str(record.status)] += 1

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics; prometheus_client calls this at a scrape."""
        for family in self._families():
            yield family
            yield from self._renamed(family)

    def _families(self) -> Iterator[Metric]:
        yield from self._own_families()
        status = self._engine.status()
        yield from self._hosts(status.hosts)
        stats = status.stats
        if stats is not None:
            yield from self._gauges(stats)
            yield from self._totals(stats)
            yield from self._stages(stats.stage_times)
            yield from self._stage_memory(stats.stage_memory)

    def _own_families(self) -> Iterator[Metric]:
        info = InfoMetricFamily(PREFIX + "build", "Version and layout.")
        info.add_metric([], {"version": __version__, "stages": str(self._num_stages)})
        yield info
        yield self._counter("request_success", "Finished requests.", "finished_reason", self._finished)
        yield self._counter(
            "requests_rejected", "Requests refused before they reached the engine.", "status", self._rejected
        )
        for histogram in (self.inter_token, *self._of_requests):
            yield histogram.family(self._label)

    def _gauges(self, stats: CoreStats) -> Iterator[Metric]:
        used = 1.0 - stats.cache.free_blocks / stats.cache.num_blocks if stats.cache.num_blocks else 0.0
        yield self._gauge("num_requests_running", "Requests that hold a row.", stats.scheduler.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats.scheduler.num_waiting)
        yield self._gauge("kv_cache_blocks", "Blocks of the KV pool.", stats.cache.num_blocks)
        yield self._gauge(
            "prefix_cache_blocks", "Cached KV blocks that a request can reuse.", stats.cache.cached_blocks
        )
        yield self._gauge("pipeline_inflight_batches", "Plans in flight in the pipe.", stats.inflight)
        yield self._gauge(
            "pipeline_micro_batches",
            "Micro-batches that decoding requests are split into.",
            stats.scheduler.micro_batches,
        )
        yield self._gauge(
            "pipeline_fill_batches",
            "Plans that fill the pipe: one per stage, and those on the wires between hosts.",
            stats.scheduler.fill_plans,
        )
        yield self._gauge(
            "pipeline_wire_seconds",
            "Measured time of a plan between stages on several hosts, and back.",
            stats.scheduler.wire_s,
        )
        yield self._gauge("paused", "1 while an administrator has paused the engine.", stats.scheduler.paused)
        yield self._gauge(
            "starts_held_back",
            "1 while no waiting request starts because the host is short of memory.",
            bool(stats.scheduler.held_back),
        )
        yield self._gauge(
            "operations_open",
            "Admin operations that are accepted but not yet applied by all ranks.",
            stats.open_operations,
        )
        yield self._gauge(
            "plan_interval_seconds",
            "Least time between plans, set by an administrator; 0: full speed.",
            stats.plan_interval_ms / 1000,
        )
        yield self._gauge(
            "kv_host_bytes", "Host memory for KV blocks, bytes.", stats.store.use.host_bytes_used
        )
        yield self._gauge(
            "kv_store_switched_off",
            "Processes that pause use of the store because it failed too often.",
            stats.store.use.switched_off,
        )
        yield self._gauge("sessions", "Open sessions.", stats.sessions.num_open)
        yield self._gauge("session_blocks", "KV blocks that sessions keep.", stats.sessions.kept_blocks)
        yield self._gauge("epoch", "Membership epoch of the pipe.", stats.epoch)
        usage = GaugeMetricFamily(
            PREFIX + "kv_cache_usage_perc",
            "Share of KV blocks in use, 0 to 1.",
            labels=["model_name", "tier"],
        )
        usage.add_metric([self._label, "l1"], used)
        yield usage

    def _totals(self, stats: CoreStats) -> Iterator[Metric]:
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens processed.", stats.scheduler.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.scheduler.generated_tokens),
            ("prefix_cache_queries", "Tokens of requests that started.", stats.cache.prefix_tokens),
            (
                "prefix_cache_hits",
                "Tokens of these found in the prefix cache.",
                stats.cache.prefix_hit_tokens,
            ),
            ("prefix_cache_evictions", "Cached blocks evicted.", stats.cache.evicted_blocks),
            ("kv_store_stored_blocks", "KV blocks put into the store.", stats.store.stored_blocks),
            ("kv_store_loaded_blocks", "KV blocks got from the store.", stats.store.loaded_blocks),
            ("kv_store_failed_blocks", "KV blocks not stored or not loaded.", stats.store.failed_blocks),
            (
                "kv_store_verify_failures",
                "Records of the store that failed verification.",
                stats.store.use.verify_failures,
            ),
            ("kv_store_read_records", "Parts of KV blocks got from the store.", stats.store.use.records_read),
            (
                "kv_host_read_records",
                "Parts of KV blocks found in host memory.",
                stats.store.use.host_records_read,
            ),
            (
                "kv_host_read_bytes",
                "Bytes of KV blocks got from host memory.",
                stats.store.use.host_bytes_read,
            ),
            (
                "kv_host_written_bytes",
                "Bytes of KV blocks put into host memory.",
                stats.store.use.host_bytes_written,
            ),
            ("kv_store_call_failures", "Calls of the store that failed.", stats.store.use.call_failures),
            ("sessions_reaped", "Sessions closed because they were idle.", stats.sessions.num_reaped),
            ("num_preemptions", "Requests preempted.", stats.scheduler.num_preemptions),
            (
                "recovered_requests",
                "Requests interrupted by a lost stage.",
                stats.scheduler.recovered_requests,
            ),
            (
                "failed_steps",
                "Plans that failed for lack of memory on a stage.",
                stats.scheduler.failed_steps,
            ),
            ("core_restarts", "Restarts of a lost engine core.", stats.restarts.core),
            ("engine_steps", "Plans sent through the pipe.", stats.step_id),
        ):
            family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([self._label], value)
            yield family
        restarts = Counter({str(stage): count for stage, count in enumerate(stats.restarts.stages)})
        moved = Counter({"read": stats.store.use.bytes_read, "written": stats.store.use.bytes_written})
        yield self._counter("kv_store_bytes", "Bytes of KV blocks from and to the store.", "direction", moved)
        drafts = stats.scheduler.speculation
        if drafts.drafter:
            told = drafts.by_drafter()
            drafted = Counter({drafter: counts[0] for drafter, counts in told.items()})
            accepted = Counter({drafter: counts[1] for drafter, counts in told.items()})
            cancelled = Counter({drafts.drafter: drafts.num_cancelled})
            for name, text, counter in (
                ("spec_drafted_tokens", "Draft tokens.", drafted),
                ("spec_accepted_tokens", "Draft tokens that were accepted.", accepted),
                (
                    "spec_cancelled_tokens",
                    "Draft tokens after a rejected one, which were never checked.",
                    cancelled,
                ),
            ):
                yield self._counter(name, text, "drafter", counter)
        yield self._counter("stage_restarts", "Restarts of a lost stage.", "stage", restarts)

    def _stage_memory(self, stages: Sequence[StageMemory]) -> Iterator[Metric]:
        for name, text, of_bytes in (
            ("weight", "Memory of the stage's weights.", attrgetter("weight_bytes")),
            ("kv", "Memory of the stage's KV cache.", attrgetter("kv_bytes")),
            ("peak", "Measured memory of the stage's largest plan.", attrgetter("peak_bytes")),
            ("margin", "Memory that the stage leaves free.", attrgetter("margin_bytes")),
            (
                "stranded",
                "Memory unused because another stage limits the number of KV blocks.",
                attrgetter("stranded_bytes"),
            ),
        ):
            family = GaugeMetricFamily(f"{PREFIX}stage_{name}_bytes", text, labels=_OF_STAGE)
            for stage in stages:
                family.add_metric(self._of_stage(stage), of_bytes(stage))
            yield family

    def _stages(self, times: Sequence[StageTimes]) -> Iterator[Metric]:
        busy = GaugeMetricFamily(
            PREFIX + "pipeline_stage_busy_ratio",
            "Share of the time between the stage's last two reports (a second or a step) spent computing: "
            "CPU time of its thread, or time of its GPU.",
            labels=_OF_STAGE,
        )
        bubbles = CounterMetricFamily(
            PREFIX + "pipeline_bubble_seconds",
            "Time that the stage spent waiting or copying.",
            labels=[*_OF_STAGE, "cause"],
        )
        steps = SummaryMetricFamily(
            PREFIX + "stage_step_seconds",
            "Time of steps with tokens by activity, without waiting for work.",
            labels=[*_OF_STAGE, "phase"],
        )
        reduces = SummaryMetricFamily(
            PREFIX + "stage_exchange_seconds",
            "Time of sums and gathers between the ranks of the stage, included in the other times.",
            labels=_OF_STAGE,
        )
        for stage in times:
            of_stage = self._of_stage(stage)
            busy.add_metric(of_stage, stage.busy_ratio)
            for phase, spent_ns in zip(Phase, stage.phase_ns, strict=True):
                name = phase.name.lower()
                if phase is not Phase.NO_WORK:
                    steps.add_metric([*of_stage, name], stage.num_steps, spent_ns / 1e9)
                if phase in BUBBLES:
                    bubbles.add_metric([*of_stage, name], spent_ns / 1e9)
            if stage.exchange_ns:
                reduces.add_metric(of_stage, stage.num_steps, stage.exchange_ns / 1e9)
        yield from (busy, bubbles, steps, reduces)

    def _of_stage(self, stage: StageMemory | StageTimes) -> list[str]:
        return [self._label, str(stage.replica), str(stage.stage)]

    def _hosts(self, hosts: PipeHosts) -> Iterator[Metric]:
        labels = ["model_name", "host"]
        offsets = GaugeMetricFamily(
            PREFIX + "host_clock_offset_seconds",
            "Offset from the monotonic clock of a host to that of the head.",
            labels=labels,
        )
        errors = GaugeMetricFamily(
            PREFIX + "host_clock_error_seconds", "Possible error of that offset.", labels=labels
        )
        for clock in hosts.clocks:
            offsets.add_metric([self._label, clock.host], clock.offset_ns / 1e9)
            errors.add_metric([self._label, clock.host], clock.error_ns / 1e9)
        slow = GaugeMetricFamily(
            PREFIX + "host_link_slow",
            "1 while a link between two hosts carries less than half of its measured rate.",
            labels=["model_name", "hosts"],
        )
        for link in hosts.links:
            slow.add_metric([self._label, "+".join(link.hosts)], float(link.is_slow))
        yield from (offsets, errors, slow)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._label], value)
        return family

    def _counter(self, name: str, text: str, label: str, counts: Counter[str]) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name", label])
        for value, count in sorted(counts.items()):
            family.add_metric([self._label, value], count)
        return family
