"""The interface between the engine core, which schedules, and the ranks, which compute.

`engine.core.core` holds an `Executor`. `RankChannels` is what all executors share: the core's ends of the
message channels to all ranks. It does the handshake at start [D9], encodes each plan once for all ranks,
and receives the results of the last stage. Torch-free.
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

_GONE = "rank_gone"
_CAUSE_GRACE_S = 0.2
LINK_LEAD_STEPS = 4  # between the plan that orders a link and the first step over it: its ends meet meanwhile
_LOOK_S = 0.1  # the longest time between two calls of `is_over` during a handshake
# Errors of ranks that suffer from the failure of another one. The better explanation is first: a rank that
# waits in vain leaves (the timeout), and only then do others find its links closed.
_CONSEQUENCES = ("WaitTimeoutError", "LinkClosedError")


class KVPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The number of KV cache blocks that every rank allocates, and each rank's report that it has loaded."""

    num_blocks: int  # the minimum over the ranks, allocated on each of them
    ranks: list[RankLoaded]  # stage by stage


class Reports(Protocol):
    """The reports of all ranks other than the results of steps: times, outcomes of orders, built grammars."""

    def stage_times(self) -> list[StageTimes]:
        """Return each stage's newest report of its use of time since its start, in stage order.

        A stage that has sent none is left out.
        """
        ...

    def spans(self) -> list[StageSpans]:
        """Return reports of the timed work of each stage's first rank in the last `TRACE_S` seconds.

        Each report has the phases of a rank's time, such as computing or waiting, with their durations. The
        reports are ordered by stage and time.
        """
        ...

    def rank_spans(self, seen: Container[SpansKey]) -> list[StageSpans]:
        """Return the timed work of every rank in the last `TRACE_S` seconds, by stage, rank and time.

        Args:
            seen: keys of reports that the caller has. If a report of a rank is among them, only later
                reports of that rank are returned.
        """
        ...

    def finished_orders(self) -> list[OrderResult]:
        """Return the results of orders to copy KV blocks that all ranks have answered since the last call.

        The result of an order is the worst answer of any rank.
        """
        ...

    def store_use(self) -> StoreUse:
        """Return the ranks' summed use of the KV store since the last call.

        If there was none it is `NO_STORE_USE` itself. `switched_off` of the sum is a change: by how many the
        number of ranks that have switched their store off has grown, or shrunk if it is below 0.
        """
        ...

    def entry_answers(self) -> list[EntryAnswers]:
        """Return the answers of ranks to `Executor.call_store` that have come since the last call."""
        ...

    def built_grammars(self) -> list[BuiltGrammar]:
        """Return the outcomes of grammars on which all ranks of the last stage have reported, each once.

        A grammar says which texts a request may generate. If a single rank cannot compile it, the outcome is
        that it cannot be compiled.
        """
        ...


class Executor(Protocol):
    """Runs plans on all ranks, in the order in which they are submitted.

    A plan says what one step computes; a rank is a process or thread that computes a part of the model.
    """

    @property
    def reports(self) -> Reports:
        """All reports of the ranks but results; `poll_start` and `poll_results` receive and keep them."""
        ...

    def start(self) -> KVPlan:
        """Wait until all ranks have loaded, set the number of KV blocks, and wait until all have allocated.

        If ranks have failed, it raises the failure that explains the others; if some are silent, a
        `WaitTimeoutError` that names them.
        """
        ...

    def poll_start(self) -> KVPlan | None:
        """Do as much of `start` as is possible without waiting, and return None until all ranks are ready.

        Call it again until it returns the `KVPlan`.
        """
        ...

    def submit_plan(self, plan: ScheduledBatch) -> int:
        """Seal a plan with a digest and send it to every rank, without waiting for its result.

        Returns:
            The digest, a checksum of all plans of the epoch so far. The plan's result must have the same.
        """
        ...

    def call_store(self, rank: int, call: EntryCall) -> bool:
        """Send one rank a call to the KV store of its host, ahead of all plans that are submitted later.

        Args:
            rank: its number, counted over all stages.

        Returns:
            Whether it was sent; sending does not wait. The answer, if this call has one (`EntryCall`), comes
            in `Reports.entry_answers`; none comes if the call was not sent or the rank is lost.
        """
        ...

    def exchange_link(self, order: LinkOrder) -> None:
        """Put into the next plan the order to replace a link, which carries hidden states to the next stage.

        Both ends of the new link must have been handed to their ranks. The new link is used from
        `order.first_step` on, or from a later step if that one is too close (`LINK_LEAD_STEPS`).
        """
        ...

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        """Return the results of steps that have come, in order; wait at most `timeout_s` seconds for news.

        The list is empty if none came, or if only an answer for `reports` came. If a rank has failed or gone,
        the results that came before are returned first; the next call raises `StageLostError` with the cause.
        """
        ...

    def shutdown(self) -> None:
        """Send all ranks the order to leave after the submitted plans, and disconnect.

        It may be called twice.
        """
        ...

    def abandon(self) -> None:
        """Close the connections without a message; ranks that live then wait for another epoch's."""
        ...

    def wait_sources(self) -> list[int]:
        """Return file descriptors that become readable when `poll_results` may have something.

        The list is empty for ranks that are threads: their caller waits in `poll_results`. The descriptors
        are edge-triggered: call `poll_results(0)` after each event and after each `submit_plan`, before the
        next wait.
        """
        ...


class NoExecutor:
    """The null executor while no ranks are connected: it takes no plan and gives no result."""

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
        """Do nothing, since no ranks are connected and there is no link to replace."""

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        return []

    def shutdown(self) -> None:
        """Do nothing, since no ranks are connected."""

    def abandon(self) -> None:
        """Do nothing, since no ranks are connected."""

    def wait_sources(self) -> list[int]:
        return []


NO_EXECUTOR: Executor = NoExecutor()


class RankChannels:
    """The core's ends of the message channels to all ranks: plans go out, results and reports come back.

    Args:
        channels: one per rank.
        wait: returns when any channel has a message, or after the given seconds; None sets no limit.
        results: a channel for results alone; None: results come over the channel of the output rank.
        clock: monotonic seconds.
        start: the message that ranks get once all have loaded. If its `num_blocks` is 0, the number of blocks
            is that of the rank with the least room.
        stages: the stage of each rank; empty: each rank is a stage.

    Attributes:
        reports: all reports of the ranks but results.
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
        self._ended: set[int] = set()  # ranks that have reported their failure, or gone
        self._link_orders: list[LinkOrder] = []  # for the next plan

    def handshake(self, timeout_s: float, is_over: Callable[[], bool] = lambda: False) -> KVPlan:
        """Wait until all ranks have loaded and then allocated, at most `timeout_s` seconds for each.

        Args:
            is_over: called about ten times a second; returns True once it is known that some rank will not
                come.

        Raises:
            LinkClosedError: `is_over` has returned True.
            WaitTimeoutError: names the ranks that were not done in time.
            PenstockError: the failure of a rank; of several, the one that explains the others.
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
        """Do what the handshake can do now without waiting, and return None until all ranks are ready.

        If ranks have failed, it raises the failure that explains the others. Implements
        `Executor.poll_start`.
        """
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
        """Raise `PeerError` if some ranks of a stage have our kernels, and others do not.

        Ranks of a stage add up parts of tensors together, and must do that in the same way.
        """
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
        """Put into the next plan the order to replace a link. Implements `Executor.exchange_link`."""
        self._link_orders.append(order)

    def submit_plan(self, plan: ScheduledBatch) -> int:
        """Seal a plan, encode it once, send it to every rank, and return its digest.

        A rank that has gone is left out; `poll_results` raises the cause. Implements `Executor.submit_plan`.
        """
        # Before the seal: the digest covers the orders in the plan, too.
        if self._link_orders:
            plan = self._with_link_orders(plan)
        sealed = self._log.seal(plan)
        frame = encode(sealed)
        # If one rank has gone, the others must get the plan all the same: their logs may have no gap.
        for channel in self._channels:
            with contextlib.suppress(LinkClosedError):
                send_of_step(channel, frame, "the plan", plan.step_id)
        return sealed.digest

    def call_store(self, rank: int, call: EntryCall) -> bool:
        """Send one rank a call to the KV store of its host, and return whether it was sent, without waiting.

        Implements `Executor.call_store`.
        """
        try:
            self._channels[rank].send(encode(call), timeout_s=0.0)
        except PeerError:  # if the rank has gone, `poll_results` raises that
            return False
        return True

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        """Return the results of steps that have come; wait at most `timeout_s` seconds for news.

        Once the results that came before a failure are returned, the next call raises it as a
        `StageLostError`. Implements `Executor.poll_results`.
        """
        messages, deadline = self._drain(), self._clock() + timeout_s
        while not self._has_news(messages) and (left_s := deadline - self._clock()) > 0:
            self._wait(left_s)
            messages = self._drain()
        # What came before a failure still counts: it is returned first, and the failure at the next call.
        if not messages and self._failures:
            raise _as_stage_lost(self._first_cause())
        return [_expect(StepResult, message) for message in messages]

    def shutdown(self) -> None:
        """Send every rank `Shutdown` if its channel has room, and close all channels."""
        # Without waiting for room: a rank that reads nothing any more must not delay the shutdown of others.
        for channel in self._channels:
            with contextlib.suppress(PenstockError):  # that rank may have gone, or never have come
                channel.send(encode(Shutdown()), timeout_s=0.0)
        self.close()

    def close(self) -> None:
        """Close all channels, without a message to the ranks."""
        for channel in self._channels:
            channel.close()
        if self._results is not None:
            self._results.close()

    def _with_link_orders(self, plan: ScheduledBatch) -> ScheduledBatch:
        """Return the plan with the waiting orders, each for a step at least `LINK_LEAD_STEPS` later."""
        # Both ends read of the new link in this plan, and have to connect before its first frame.
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
        """Return the messages of the ranks, but put reports and failures aside.

        A failure is raised later (`poll_results`), because results that were sent before it still count.
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
        # The results last, since they have a path of their own: if a failure was read above, all results that
        # were sent before it are here by now.
        return messages + self._drain_results()

    def _drain_results(self) -> list[RankToCore]:
        """Return what has come over the channel for results; `_drain` calls it last, and says why."""
        messages: list[RankToCore] = []
        if self._results is not None:
            with contextlib.suppress(LinkClosedError):  # the same rank's plan channel shows that it has gone
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
        """Return the failure to report.

        A rank that misses its neighbour may report before the neighbour does. While only such consequences
        are known, the cause is given `_CAUSE_GRACE_S` seconds to arrive.
        """
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
    """Return the failure that explains the others.

    An error that a rank reported goes before a connection that closed without an error. Timeouts and closed
    links come last, since they are signs of a lost neighbour.
    """

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
