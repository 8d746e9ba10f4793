"""The routes `GET /debug/pipeline`, a view of the pipeline, and `/debug/pipeline/events`, a stream of views.

A view is made from the last report of each core, so that it costs the engine nothing. In the feed, it is made
when it can be sent: a slow reader gets fewer views, and none is kept for it. The feed ends when its reader
leaves or the server drains; a drain does not wait for it. A reader that asks for lanes also gets what each
rank did, for which the core must be asked (`lanes`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock import __version__
from penstock.batch import StageTimes
from penstock.engine.stats import CoreStats, StageMemory
from penstock.errors import OverloadedError
from penstock.process.config import HostLink, StageShape
from penstock.process.endpoints import Restarts
from penstock.scheduler.stats import SpeculationStats
from penstock.server.answers.generation import wait_for_disconnect
from penstock.server.answers.sse import STREAM_HEADERS
from penstock.server.engine_port import EngineLike, ServedModel, StatusLike
from penstock.server.http.errors import json_response
from penstock.server.http.keep_alive import Clock
from penstock.server.http.lifecycle import Lifecycle
from penstock.server.http.metrics import Histogram, Metrics
from penstock.server.routes.lanes import NO_LANES, LaneNews
from penstock.server.routes.server_info import shapes_on
from penstock.trace.phases import Phase, bubble_seconds

FEED_VERSION = 1  # raised when older readers would misread the feed; for a new field it stays the same
FRAME_S = 0.1  # between two looks for news, which are sent as one piece
STILL_S = 1.0  # between two views that say the same

Sleep = Callable[[float], Awaitable[None]]


class StageView(msgspec.Struct, frozen=True, kw_only=True):
    """A stage, with the times that its first rank reports.

    Seconds are totals since the epoch began; `busy_ratio` is of the time between the rank's last two reports.
    `busy_s` and `busy_ratio` count CPU time of the thread that computes, or time of the GPU. The times of the
    layers (`forward_s`) and of output layer and sampling (`sample_s`) are of the wall clock.
    """

    stage: int
    host: str | None = None
    layers: list[int] | None = None  # number of the first layer, and number after the last one
    num_ranks: int | None = None
    busy_ratio: float = 0.0
    num_steps: int = 0
    wall_s: float = 0.0
    busy_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    bubble_s: dict[str, float] = {}  # by cause
    restarts: int = 0
    weight_bytes: int | None = None  # of all its ranks, as the next two
    kv_bytes: int | None = None
    stranded_bytes: int | None = None  # unused, since the rank with the least memory limits the KV blocks


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache in which steps compute, as numbers of its blocks, and the use of the prefix cache."""

    num_blocks: int
    used_blocks: int  # held by requests
    cached_blocks: int  # that a later request can use
    evicted_blocks: int
    session_blocks: int  # that open sessions keep
    query_tokens: int  # tokens of requests that started, or started again
    hit_tokens: int  # how many of these were found in the prefix cache


class HostTierView(msgspec.Struct, frozen=True, kw_only=True):
    bytes_used: int
    bytes_read: int


class StoreView(msgspec.Struct, frozen=True, kw_only=True):
    stored_blocks: int  # in host memory or the store
    loaded_blocks: int
    failed_blocks: int
    bytes_read: int
    bytes_written: int
    switched_off: int  # processes that do not use the store now, as it failed too often
    failure: str  # why the last failed call of the store failed; empty: no call has failed


class TiersView(msgspec.Struct, frozen=True, kw_only=True):
    l1: PoolView
    l2: HostTierView
    l3: StoreView


class DraftsView(msgspec.Struct, frozen=True, kw_only=True):
    """The results of drafts (guessed tokens) since the start."""

    drafter: str  # empty: there is none
    drafted: int  # drafts that were found right or wrong
    accepted: int
    cancelled: int  # drafts after a wrong one, which were never decided on


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline. Fields that its core has not reported are null."""

    replica: int
    ready: bool
    reason: str
    failed_stage: int | None = None  # the stage at fault if the pipeline is not ready, if it is a single one
    paused: bool | None = None
    held_back: str | None = None  # why waiting requests do not start; empty: they do
    plan_interval_ms: int | None = None  # as set by `/slow_down`; 0: full speed
    epoch: int | None = None
    step: int | None = None  # number of the next plan
    inflight: int | None = None  # plans in flight
    micro_batches: int | None = None
    running: int | None = None
    waiting: int | None = None
    sessions: int | None = None  # open sessions
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    num_preemptions: int | None = None
    core_restarts: int | None = None
    recovered_requests: int | None = None  # that a lost stage has interrupted
    drafts: DraftsView | None = None
    links: list[HostLink] = []  # the measured network paths between its hosts
    kv: TiersView | None = None
    stages: list[StageView] = []


class LatencyView(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of this server since its start.

    The differences between two views, divided by each other, give the means of the time between the views.
    """

    first_tokens: int  # first tokens of requests that have ended
    first_token_s: float  # seconds from each of these requests to its first token
    next_tokens: int  # times at which a request got further tokens
    next_token_s: float  # seconds from each of these times to the one before


class PipelineView(msgspec.Struct, frozen=True, kw_only=True):
    """The pipeline at one time.

    Attributes:
        feed_version: version of the form of this view.
        version: version of Penstock.
        time: Unix time of this view.
        draining: whether the server is shutting down.
        token_bytes: bytes that cross from stage to stage for each token; 0: not known.
    """

    feed_version: int
    version: str
    model: str
    time: float
    draining: bool
    token_bytes: int
    latency: LatencyView
    replicas: list[ReplicaView]


class FeedQuery(msgspec.Struct, frozen=True, kw_only=True):
    """`lanes`: whether the feed also has events that say what each rank did."""

    lanes: bool = False


class PipelineRoute:
    """Shows the pipeline as it is now, once or as a feed.

    Args:
        lifecycle: says whether the server drains.
        metrics: metrics of the server, for the latencies.
        max_streams: number of feeds that may be open at once; a further one is answered 429.
        clock, wall_clock: monotonic seconds, Unix time.
        sleep: as `asyncio.sleep`; tests give their own.
    """

    def __init__(
        self,
        model: ServedModel,
        engine: EngineLike,
        lifecycle: Lifecycle,
        metrics: Metrics,
        *,
        max_streams: int,
        clock: Clock,
        wall_clock: Clock = time.time,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._model = model
        self._engine = engine
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._lanes = LaneNews(engine, clock)
        self._max_streams = max_streams
        self._clock = clock
        self._wall_clock = wall_clock
        self._sleep = sleep
        self._num_streams = 0

    async def snapshot(self) -> Response:
        """Return stages, bubbles by cause, plans in flight, queues and KV use, by replica."""
        return json_response(msgspec.json.encode(self.view()))

    async def events(self, query: FeedQuery) -> Response:
        """Return views as server-sent events, at most ten a second, and one a second without changes."""
        self._lifecycle.refuse_new()
        return _Feed(self, with_lanes=query.lanes)

    @contextlib.contextmanager
    def reader(self) -> Iterator[None]:
        """Count one more reader within this context. Raises `OverloadedError` for one too many."""
        if self._num_streams >= self._max_streams:
            raise OverloadedError(
                f"{self._num_streams} readers follow the pipeline, which is the limit.",
                remedy="Close one, or raise --max-event-streams.",
                code="too_many_streams",
            )
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    def view(self) -> PipelineView:
        """Return the pipeline as of the last report of each core."""
        return PipelineView(
            feed_version=FEED_VERSION,
            version=__version__,
            model=self._model.name,
            time=self._wall_clock(),
            draining=self._lifecycle.is_draining,
            token_bytes=self._model.token_bytes,
            latency=_latency(self._metrics.first_token, self._metrics.inter_token),
            replicas=[
                _replica(index, status, self._model.stages)
                for index, status in enumerate(self._engine.statuses())
            ],
        )

    async def feed(self, send: Callable[[bytes], Awaitable[None]], *, with_lanes: bool = False) -> None:
        """Send views, and lanes if asked for, until the server drains. Each `send` is awaited."""
        sent_replicas: list[ReplicaView] | None = None
        told_at = self._clock()
        lanes = self._lanes.reader() if with_lanes else NO_LANES
        while not self._lifecycle.is_draining:
            view, frame = self.view(), await lanes.event()
            if view.replicas != sent_replicas or self._clock() - told_at > STILL_S - FRAME_S / 2:
                sent_replicas, told_at = view.replicas, self._clock()
                frame = b"data: " + msgspec.json.encode(view) + b"\n\n" + frame
            if frame:
                await send(frame)
            await self._sleep(FRAME_S)


class _Feed(Response):
    """The response that sends one reader the feed."""

    def __init__(self, route: PipelineRoute, *, with_lanes: bool) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = list(STREAM_HEADERS)
        self._route = route
        self._with_lanes = with_lanes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._route.reader():
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._run(receive, send)

    async def _run(self, receive: Receive, send: Send) -> None:
        async def send_frame(frame: bytes) -> None:
            await send({"type": "http.response.body", "body": frame, "more_body": True})

        feeding = asyncio.create_task(self._route.feed(send_frame, with_lanes=self._with_lanes))
        watching = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait((feeding, watching), return_when=asyncio.FIRST_COMPLETED)
            if feeding.done():
                feeding.result()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            for task in (feeding, watching):
                task.cancel()
            await asyncio.gather(feeding, watching, return_exceptions=True)


def _latency(first: Histogram, following: Histogram) -> LatencyView:
    first_tokens, first_token_s = first.totals
    next_tokens, next_token_s = following.totals
    return LatencyView(
        first_tokens=first_tokens,
        first_token_s=first_token_s,
        next_tokens=next_tokens,
        next_token_s=next_token_s,
    )


def _replica(index: int, status: StatusLike, laid: Sequence[StageShape]) -> ReplicaView:
    stats, shapes = status.stats, shapes_on(status.hosts, laid)
    if stats is None:
        stages = [_stage(stage, shape, None, None, Restarts()) for stage, shape in enumerate(shapes)]
        return ReplicaView(
            replica=index,
            ready=status.ready,
            reason=status.reason,
            failed_stage=status.stage,
            links=status.hosts.links,
            stages=stages,
        )
    times = {stage_times.stage: stage_times for stage_times in stats.stage_times}
    memory = {of_stage.stage: of_stage for of_stage in stats.stage_memory}
    known = dict(enumerate(shapes))
    return ReplicaView(
        replica=index,
        ready=status.ready,
        reason=status.reason,
        failed_stage=status.stage,
        paused=stats.scheduler.paused,
        held_back=stats.scheduler.held_back,
        plan_interval_ms=stats.plan_interval_ms,
        epoch=stats.epoch,
        step=stats.step_id,
        inflight=stats.inflight,
        micro_batches=stats.scheduler.micro_batches,
        running=stats.scheduler.num_running,
        waiting=stats.scheduler.num_waiting,
        sessions=stats.sessions.num_open,
        prompt_tokens=stats.scheduler.prompt_tokens,
        generated_tokens=stats.scheduler.generated_tokens,
        num_preemptions=stats.scheduler.num_preemptions,
        core_restarts=stats.restarts.core,
        recovered_requests=stats.scheduler.recovered_requests,
        drafts=_drafts(stats.scheduler.speculation),
        links=status.hosts.links,
        kv=_tiers(stats),
        stages=[
            _stage(stage, known.get(stage), times.get(stage), memory.get(stage), stats.restarts)
            for stage in sorted({*known, *times})
        ],
    )


def _drafts(told: SpeculationStats) -> DraftsView:
    return DraftsView(
        drafter=told.drafter,
        drafted=told.num_drafted,
        accepted=told.num_accepted,
        cancelled=told.num_cancelled,
    )


def _stage(
    stage: int,
    shape: StageShape | None,
    times: StageTimes | None,
    memory: StageMemory | None,
    restarts: Restarts,
) -> StageView:
    view = StageView(
        stage=stage,
        host=None if shape is None else shape.host,
        layers=None if shape is None else [shape.start_layer, shape.end_layer],
        num_ranks=None if shape is None else shape.num_ranks,
        restarts=restarts.stages[stage] if stage < len(restarts.stages) else 0,
        weight_bytes=None if memory is None else memory.weight_bytes,
        kv_bytes=None if memory is None else memory.kv_bytes,
        stranded_bytes=None if memory is None else memory.stranded_bytes,
    )
    if times is None:
        return view
    return msgspec.structs.replace(
        view,
        busy_ratio=times.busy_ratio,
        num_steps=times.num_steps,
        wall_s=times.wall_ns / 1e9,
        busy_s=times.busy_ns / 1e9,
        forward_s=times.phase_ns[Phase.FORWARD] / 1e9,
        sample_s=times.phase_ns[Phase.SAMPLE] / 1e9,
        bubble_s=bubble_seconds(times.phase_ns),
    )


def _tiers(stats: CoreStats) -> TiersView:
    return TiersView(
        l1=PoolView(
            num_blocks=stats.cache.num_blocks,
            used_blocks=stats.cache.num_blocks - stats.cache.free_blocks,
            cached_blocks=stats.cache.cached_blocks,
            evicted_blocks=stats.cache.evicted_blocks,
            session_blocks=stats.sessions.kept_blocks,
            query_tokens=stats.cache.prefix_tokens,
            hit_tokens=stats.cache.prefix_hit_tokens,
        ),
        l2=HostTierView(
            bytes_used=stats.store.use.host_bytes_used, bytes_read=stats.store.use.host_bytes_read
        ),
        l3=StoreView(
            stored_blocks=stats.store.stored_blocks,
            loaded_blocks=stats.store.loaded_blocks,
            failed_blocks=stats.store.failed_blocks,
            bytes_read=stats.store.use.bytes_read,
            bytes_written=stats.store.use.bytes_written,
            switched_off=stats.store.use.switched_off,
            failure=stats.store.use.failure,
        ),
    )
