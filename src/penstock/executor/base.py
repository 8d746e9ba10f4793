"""The seam between the engine core and the ranks, and what all executors share of it.

`engine.core.core` holds an `Executor`. `RankChannels` is the core's end of the channels to all ranks: the
start-up handshake (row D9), one encoding of a plan for all of them, and results back from the last stage.
Torch-free.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from penstock.batch import (
    AllocateKV,
    BuiltGrammar,
    EntryAnswers,
    EntryCall,
    GrammarsBuilt,
    LinkOrder,
    OrderResult,
    OrdersDone,
    RankFailed,
    RankLoaded,
    RankReady,
    RankToCore,
    ScheduledBatch,
    Shutdown,
    SpansKey,
    StageSpans,
    StageTimes,
    StepResult,
    StoreUse,
    decode_to_core,
    encode,
)
from penstock.errors import (
    ErrorInfo,
    LinkClosedError,
    PeerError,
    PenstockError,
    ProtocolError,
    StageLostError,
    WaitTimeoutError,
    error_from_info,
)
from penstock.executor.rank_reports import RankReports
from penstock.executor.rank_sense import sensible
from penstock.pipeline.decision_log import DecisionLog
from penstock.pipeline.links.channel import MessageChannel, send_of_step
from penstock.process.config import rank_names
from penstock.runner.kv_demand import stranded_bytes

_GONE = "rank_gone"
_CAUSE_GRACE_S = 0.2
LINK_LEAD_STEPS = 4  # between the plan that orders a link and the first step over it: its ends meet meanwhile
_LOOK_S = 0.1  # at most between two questions whether a handshake is over
# What is seen where another rank has failed, the better explanation first: one waits in vain and leaves, then
# the others miss it.
_CONSEQUENCES = ("WaitTimeoutError", "LinkClosedError")


class KVPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The number of KV blocks that the ranks agreed on at start, with what they said."""

    num_blocks: int  # the minimum over the ranks, allocated on each of them
    ranks: list[RankLoaded]  # stage by stage

    @property
    def stranded_bytes(self) -> list[int]:
        """The memory that each rank could have used for KV, had the tightest one not set the limit."""
        return [stranded_bytes(rank.max_blocks, self.num_blocks, rank.block_bytes) for rank in self.ranks]


class Reports(Protocol):
    """The reports of the ranks beside results."""

    def stage_times(self) -> list[StageTimes]:
        """Return the newest report of each stage that has sent one, by stage."""
        ...

    def spans(self) -> list[StageSpans]:
        """Return what each stage's first rank did in the last `TRACE_S` seconds, by stage and time."""
        ...

    def rank_spans(self, seen: Container[SpansKey]) -> list[StageSpans]:
        """Return what each rank did in that time, by stage, rank and time.

        Of a rank of which a report is in `seen`, only what came behind that report.
        """
        ...

    def finished_orders(self) -> list[OrderResult]:
        """Return the orders that all ranks have answered since the last call, with their outcomes."""
        ...

    def store_use(self) -> StoreUse:
        """Return how the ranks have used the store since the last call; `NO_STORE_USE` itself if not at all.

        Its `switched_off` says how many more have it switched off now.
        """
        ...

    def entry_answers(self) -> list[EntryAnswers]:
        """Return what ranks have answered to `Executor.call_store` since the last call."""
        ...

    def built_grammars(self) -> list[BuiltGrammar]:
        """Return the grammars that all ranks of the last stage have reported since the last call."""
        ...


class Executor(Protocol):
    """Runs plans on all ranks, in the order in which they are submitted."""

    @property
    def reports(self) -> Reports:
        """The reports of the ranks so far; kept by `poll_results`."""
        ...

    def start(self) -> KVPlan:
        """Wait until all ranks have loaded, agree on the KV blocks, and wait until all are ready.

        Raises the error of the first rank that failed, or `WaitTimeoutError` naming the silent ones.
        """
        ...

    def poll_start(self) -> KVPlan | None:
        """Do what `start` does, without waiting: return None while it is not done. Call it until it is."""
        ...

    def submit_plan(self, plan: ScheduledBatch) -> int:
        """Seal a plan as the next of the decision log, and send it to every rank. Does not wait for it.

        Returns:
            Its digest, which its result must bear too.
        """
        ...

    def call_store(self, rank: int, call: EntryCall) -> bool:
        """Send a call to one rank, by its number, in front of the plans that are submitted later.

        Returns:
            Whether it was sent; without waiting. If not, or when the rank is lost, no answer comes.
        """
        ...

    def exchange_link(self, order: LinkOrder) -> None:
        """Let the next plan order that a link is exchanged, at the step of the order or later.

        Both ends of the new link have been handed to their ranks.
        """
        ...

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        """Return results that have come, in step order; wait at most `timeout_s` for the first.

        Raises `StageLostError` with the first cause when a rank has failed or gone.
        """
        ...

    def shutdown(self) -> None:
        """Let the ranks finish the submitted plans and leave. May be called twice."""
        ...

    def abandon(self) -> None:
        """Close the connections without a word: ranks that live wait for another epoch."""
        ...

    def wait_sources(self) -> list[int]:
        """Return descriptors that become readable when `poll_results` may have something.

        There are none if only `poll_results` can wait. They are edge-triggered: call `poll_results(0)` after
        each event and after each `submit_plan`, before waiting for them.
        """
        ...


class NoExecutor:
    """The executor between two epochs: it has no rank, takes no plan and gives no result."""

    reports = RankReports(0)

    def start(self) -> KVPlan:
        raise AssertionError("the executor has no ranks")

    def poll_start(self) -> KVPlan | None:
        return None

    def submit_plan(self, plan: ScheduledBatch) -> int:
        raise AssertionError("the executor has no ranks")

    def call_store(self, rank: int, call: EntryCall) -> bool:
        return False

    def exchange_link(self, order: LinkOrder) -> None:
        """Do nothing, since the links of the epoch that is over are gone."""

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        return []

    def shutdown(self) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""

    def wait_sources(self) -> list[int]:
        return []


NO_EXECUTOR: Executor = NoExecutor()


class RankChannels:
    """The core's ends of the plan channels.

    Args:
        channels: one per rank.
        wait: returns when any of them has a message, or after the given seconds.
        results: from the last stage, if its results come on a path of their own.
        clock: monotonic seconds.
        start: what the ranks are told once they have loaded; 0 blocks: what the tightest stage can hold.
        stages: stage of each rank; empty: each rank is a stage.

    Attributes:
        reports: reports of the ranks beside results.
    """

    def __init__(
        self,
        channels: Sequence[MessageChannel],
        wait: Callable[[float | None], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        results: MessageChannel | None = None,
        start: AllocateKV | None = None,
        stages: Sequence[int] = (),
    ) -> None:
        self._stages = list(stages) or list(range(len(channels)))
        self._names = rank_names(self._stages)
        self._start = start or AllocateKV(num_blocks=0)
        self._log = DecisionLog(self._start.epoch, self._start.first_step)
        self._loaded: dict[int, RankLoaded] = {}  # by rank
        self._has_allocated = False
        self._ready: set[int] = set()
        self._channels = list(channels)
        self._results = results
        self._wait = wait
        self._clock = clock
        self._failures: list[ErrorInfo] = []
        self.reports = RankReports(len(self._channels), self._stages.count(max(self._stages)))
        self._ended: set[int] = set()  # ranks that have told their failure, or gone
        self._link_orders: list[LinkOrder] = []  # for the next plan

    def handshake(self, timeout_s: float, is_over: Callable[[], bool] = lambda: False) -> KVPlan:
        """Call `poll_start` until it is done; each half, to load and to allocate, has `timeout_s`.

        Raises:
            LinkClosedError: `is_over`, which is called now and then, says that not all ranks will come.
        """
        deadline, were_loaded = self._clock() + timeout_s, False
        while (plan := self.poll_start()) is None:
            if is_over():
                raise LinkClosedError(f"epoch {self._start.epoch} ended before all stages had joined.")
            if self._all_loaded and not were_loaded:
                deadline, were_loaded = self._clock() + timeout_s, True
            self._wait_until(deadline, timeout_s)
        return plan

    def poll_start(self) -> KVPlan | None:
        """See `Executor.poll_start`."""
        for message in self._drain():
            _expect(RankReady if self._has_allocated else RankLoaded, message)
        if self._all_loaded and not self._has_allocated:
            self._allocate()
        if self._failures:
            raise error_from_info(self._first_cause())
        if len(self._ready) < len(self._channels):
            return None
        ranks = [self._loaded[rank] for rank in range(len(self._channels))]
        return KVPlan(num_blocks=self._start.num_blocks, ranks=ranks)

    @property
    def _all_loaded(self) -> bool:
        return len(self._loaded) == len(self._channels)

    def _allocate(self) -> None:
        self._check_carriers()
        self._has_allocated = True
        if not self._start.num_blocks:
            num_blocks = min(rank.max_blocks for rank in self._loaded.values())
            self._start = msgspec.structs.replace(self._start, num_blocks=num_blocks)
        frame = encode(self._start)
        for channel in self._channels:
            with contextlib.suppress(LinkClosedError):
                channel.send(frame)

    def _check_carriers(self) -> None:
        """Raise `PeerError` unless the ranks of each stage all add by our kernels, or all without."""
        for stage in set(self._stages):
            own = [rank for rank, of_stage in enumerate(self._stages) if of_stage == stage]
            without = [rank for rank in own if self._loaded[rank].kernels.startswith("none")]
            if without and len(without) < len(own):
                name, reason = self._names[without[0]], self._loaded[without[0]].kernels
                raise PeerError(
                    f"{name} has no kernels, unlike the other ranks of its stage: {reason}",
                    remedy="Restart, or use --kernels off.",
                )

    def exchange_link(self, order: LinkOrder) -> None:
        """See `Executor.exchange_link`."""
        self._link_orders.append(order)

    def submit_plan(self, plan: ScheduledBatch) -> int:
        """Encode once, send to every rank. `poll_results` raises the cause if a rank has gone."""
        # Before the seal: the digest stands for the orders in the plan, too.
        if self._link_orders:
            plan = self._with_link_orders(plan)
        sealed = self._log.seal(plan)
        frame = encode(sealed)
        # A rank that has gone must not keep the plan from the others, whose logs would miss it.
        for channel in self._channels:
            with contextlib.suppress(LinkClosedError):
                send_of_step(channel, frame, "the plan", plan.step_id)
        return sealed.digest

    def call_store(self, rank: int, call: EntryCall) -> bool:
        """See `Executor.call_store`."""
        try:
            self._channels[rank].send(encode(call), timeout_s=0.0)
        except PeerError:  # that the rank has gone is told by `poll_results`
            return False
        return True

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        """Return results that have come, those before a failure first; see `Executor.poll_results`."""
        messages, deadline = self._drain(), self._clock() + timeout_s
        while not self._has_news(messages) and (left_s := deadline - self._clock()) > 0:
            self._wait(left_s)
            messages = self._drain()
        # What came before a failure still counts: it is returned first, and the failure at the next call.
        if not messages and self._failures:
            raise _as_stage_lost(self._first_cause())
        return [_expect(StepResult, message) for message in messages]

    def shutdown(self) -> None:
        """Send `Shutdown` and close all channels."""
        # Without waiting for room: a rank that reads nothing any more must not hold up the others' end.
        for channel in self._channels:
            with contextlib.suppress(PenstockError):  # that rank may have gone, or never have come
                channel.send(encode(Shutdown()), timeout_s=0.0)
        self.close()

    def close(self) -> None:
        """Close all channels."""
        for channel in self._channels:
            channel.close()
        if self._results is not None:
            self._results.close()

    def _with_link_orders(self, plan: ScheduledBatch) -> ScheduledBatch:
        """Return the plan with the waiting orders; their steps leave both ends time to meet."""
        # Not sooner: both ends read of the new link in this plan, and have to meet before the first frame.
        soonest = plan.step_id + LINK_LEAD_STEPS
        orders = [
            msgspec.structs.replace(order, first_step=max(order.first_step, soonest))
            for order in self._link_orders
        ]
        self._link_orders = []
        return msgspec.structs.replace(plan, links=sorted(orders, key=lambda order: order.first_step))

    def _has_news(self, messages: Sequence[RankToCore]) -> bool:
        """Return whether there is something that the caller of `poll_results` should look at."""
        return bool(messages or self._failures or self.reports.has_answers)

    def _drain(self) -> list[RankToCore]:
        """Return what the ranks have sent, but for reports and failures, which are kept.

        Failures are kept because what was sent before them still counts.
        """
        messages: list[RankToCore] = []
        is_starting = len(self._ready) < len(self._channels)
        for rank in range(len(self._channels)):
            for message in self._drain_one(rank):
                if isinstance(message, RankFailed):
                    self._failures.append(message.error)
                    self._ended.add(rank)
                elif isinstance(message, RankLoaded) and not self._has_allocated:
                    self._loaded[rank] = message
                elif isinstance(message, RankReady) and self._has_allocated and is_starting:
                    self._ready.add(rank)
                elif isinstance(message, StageTimes | StageSpans | OrdersDone | EntryAnswers | GrammarsBuilt):
                    self.reports.keep(message)
                else:
                    messages.append(message)
        # The results last: their path is another one, and a failure read above must not overtake them.
        return messages + self._drain_results()

    def _drain_results(self) -> list[RankToCore]:
        """Return the results; called after all else, so that none sent before a failure is missed."""
        messages: list[RankToCore] = []
        if self._results is not None:
            with contextlib.suppress(LinkClosedError):  # the last stage's other channel tells of its end
                while (frame := self._results.recv(0.0)) is not None:
                    messages.append(decode_to_core(frame))
        return messages

    def _drain_one(self, rank: int) -> Iterator[RankToCore]:
        try:
            while (frame := self._channels[rank].recv(0)) is not None:
                yield sensible(decode_to_core(frame), self._stages[rank])
        except LinkClosedError:
            if rank not in self._ended:
                yield _gone(self._stages[rank], self._names[rank])
        except ProtocolError as error:
            error.stage = self._stages[rank]
            raise

    def _first_cause(self) -> ErrorInfo:
        """Return the failure to report; a rank that misses its neighbour may speak before the culprit."""
        if all(_is_consequence(failure) for failure in self._failures):
            self._wait(_CAUSE_GRACE_S)
            self._drain()
        return first_cause(self._failures)

    def _wait_until(self, deadline: float, timeout_s: float) -> None:
        remaining = deadline - self._clock()
        if remaining <= 0:
            here = self._ready if self._all_loaded else self._loaded
            silent = ", ".join(name for rank, name in enumerate(self._names) if rank not in here)
            purpose = "to allocate its KV cache" if self._all_loaded else "to load its weights"
            raise WaitTimeoutError(f"waited {timeout_s:g} s for {silent} {purpose}.")
        self._wait(min(remaining, _LOOK_S))


def first_cause(failures: Sequence[ErrorInfo]) -> ErrorInfo:
    """Return the failure that explains the others: words before silence, a missed neighbour last."""

    def remoteness(failure: ErrorInfo) -> tuple[int, bool]:
        steps = 1 + _CONSEQUENCES.index(failure.kind) if _is_consequence(failure) else 0
        return steps, failure.code == _GONE

    return min(failures, key=remoteness)


def _is_consequence(failure: ErrorInfo) -> bool:
    return failure.kind in _CONSEQUENCES


def _gone(stage: int, name: str) -> RankFailed:
    error = StageLostError(f"{name} closed its connection without an error.", code=_GONE, stage=stage)
    return RankFailed(stage=stage, error=error.info())


def _as_stage_lost(error: ErrorInfo) -> StageLostError:
    where = "a stage" if error.stage is None else f"stage {error.stage}"
    return StageLostError(f"{where} is lost: {error.message}", remedy=error.remedy, stage=error.stage)


def _expect(kind: type[Any], message: RankToCore) -> Any:
    if not isinstance(message, kind):
        raise ProtocolError(f"expected {kind.__name__} from a rank, found {type(message).__name__}.")
    return message
