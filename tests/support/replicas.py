"""Several ranks that are plain Python, each with a pace, a KV cache and a part of the store of its own.

`ReplicaPipe` is an executor as the core knows it. Every rank gets the same plans, and replays them with
`fakes.RankReplica` and a residency table of its own when its turn comes; orders are carried out beside, and
answered later. What happens next is chosen by a seed, or by the test that calls `move`: nothing waits, and no
clock is read. After each step of each rank its digest is compared with the core's of that step.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fakes import CoreRig, RankReplica
from penstock.batch import (
    GrammarsBuilt,
    LinkOrder,
    OrderResult,
    OrdersDone,
    RankLoaded,
    ScheduledBatch,
    StepResult,
    TierOrder,
    decode_to_rank,
    encode,
)
from penstock.config.engine import ParallelConfig
from penstock.engine.core.core import EngineCore
from penstock.errors import ProtocolError, StageLostError
from penstock.executor.base import KVPlan
from penstock.executor.rank_reports import RankReports
from penstock.pipeline.decision_log import DecisionLog
from penstock.request import TokenLogprobs
from table_digests import recomputed

Part = dict[bytes, list[tuple[int, int]]]  # of the store: (position, token) for keys and values, by name


@dataclass
class Rank:
    """One rank: what has reached it, and what it has still to answer.

    Attributes:
        part: of the store; it outlives the rank.
        fails: says of each copy whether it goes wrong.
    """

    stage: int
    replica: RankReplica
    part: Part
    fails: Callable[[], bool] = lambda: False
    on_way: deque[bytes] = field(default_factory=deque)  # plans, sent and not here
    plans: deque[ScheduledBatch] = field(default_factory=deque)  # here and not begun
    copies: list[TierOrder] = field(default_factory=list)  # given and not carried out
    answers: list[OrderResult] = field(default_factory=list)  # carried out and not told
    sampled: dict[int, list[list[int]]] = field(default_factory=dict)  # by step
    rejected: dict[int, list[int]] = field(default_factory=dict)  # by step
    scored: dict[int, list[list[TokenLogprobs]]] = field(default_factory=dict)  # by step
    pooled: dict[int, list[bytes]] = field(default_factory=dict)  # by step

    @property
    def next_step(self) -> int:
        return self.replica.next_step

    def take_plan(self) -> None:
        message = decode_to_rank(self.on_way.popleft())
        assert isinstance(message, ScheduledBatch)
        self.plans.append(message)

    def run(self) -> ScheduledBatch:
        """The next step: its orders are given when all steps before it have run, and it waits for those that
        load what it reads."""
        plan = self.plans.popleft()
        for name in plan.given_up:
            self.part.pop(name, None)
        self.copies += plan.orders
        for order in [order for order in self.copies if order.order in plan.awaited]:
            self.copy(self.copies.index(order))
        self.sampled[plan.step_id] = self.replica.run(plan)
        self.rejected[plan.step_id] = self.replica.num_rejected
        self.scored[plan.step_id] = self.replica.scores
        self.pooled[plan.step_id] = self.replica.pooled
        assert recomputed(self.replica.residency) == self.replica.residency.digest
        return plan

    def copy(self, index: int) -> None:
        """Carry out one of the open orders: what is in the block, or the part, at this moment counts."""
        order = self.copies.pop(index)
        size, slots = self.replica.block_size, self.replica.slots
        places = range(order.block * size, (order.block + 1) * size)
        is_done = not self.fails()
        if not order.is_load:
            whole = [slots[place] for place in places]
            if is_done:
                self.part[order.name] = whole
        elif is_done := is_done and order.name in self.part:
            slots.update(zip(places, self.part[order.name], strict=True))
        self.answers.append((order.order, is_done))


class ReplicaPipe:
    """Args:
    num_stages, tp: of ranks, stage by stage.
    parts: of the store, rank by rank, if they are there already.
    chance: chooses what happens next; None: only `move` and `run_all` make anything happen.
    failure_rate: of copies.

    Attributes:
        core_digests: that the core put into the plan of each step.
        num_compared: digests of ranks that were found equal to those.
    """

    def __init__(
        self,
        *,
        num_stages: int,
        tp: int = 1,
        num_rows: int,
        num_blocks: int,
        block_size: int,
        parts: Sequence[Part] | None = None,
        chance: random.Random | None = None,
        failure_rate: float = 0.0,
        epoch: int = 0,
        first_step: int = 0,
    ) -> None:
        self.parts = list(parts or ({} for _ in range(num_stages * tp)))
        self._chance = chance

        def fails() -> bool:
            return chance is not None and chance.random() < failure_rate

        self.ranks = [
            Rank(
                index // tp,
                RankReplica(
                    num_rows=num_rows,
                    num_blocks=num_blocks,
                    block_size=block_size,
                    epoch=epoch,
                    first_step=first_step,
                ),
                part,
                fails,
            )
            for index, part in enumerate(self.parts)
        ]
        for rank in self.ranks:
            rank.replica.builds_grammars = rank.stage == num_stages - 1
        self._num_stages, self._num_blocks = num_stages, num_blocks
        self._log = DecisionLog(epoch, first_step)
        self.reports = RankReports(len(self.ranks), tp)
        self._in_flight: deque[ScheduledBatch] = deque()
        self.plans: list[ScheduledBatch] = []
        self.core_digests: dict[int, int] = {}
        self.num_compared = 0
        self.lost: StageLostError | None = None

    # --- what the core calls --------------------------------------------------------------------

    def start(self) -> KVPlan:
        ranks = [
            RankLoaded(
                stage=rank.stage,
                max_blocks=self._num_blocks,
                block_bytes=0,
                tensor_bytes=0,
                bytes_read=0,
                load_seconds=0.0,
                is_invariant=True,
            )
            for rank in self.ranks
        ]
        return KVPlan(num_blocks=self._num_blocks, ranks=ranks)

    def poll_start(self) -> KVPlan | None:
        return self.start()

    def submit_plan(self, plan: ScheduledBatch) -> int:
        if self.lost is not None:
            raise self.lost
        sealed = self._log.seal(plan)
        self.core_digests[plan.step_id] = plan.residency
        self.plans.append(sealed)
        self._in_flight.append(sealed)
        for rank in self.ranks:
            rank.on_way.append(encode(sealed))
        return sealed.digest

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        """Lets a little happen; with a timeout so much that there is something to tell, if anything can."""
        if self.lost is not None:
            raise self.lost
        if self._chance is not None:
            for _ in range(self._chance.randrange(3 * len(self.ranks))):
                self._move_any()
            while timeout_s > 0 and not self._has_result() and not self.reports.has_answers:
                if not self._move_any():
                    break
        return self._results()

    def exchange_link(self, order: LinkOrder) -> None:
        raise NotImplementedError

    def wait_sources(self) -> list[int]:
        return []

    def shutdown(self) -> None:
        """Nothing to end."""

    def abandon(self) -> None:
        """Nothing to leave."""

    # --- what a test calls ----------------------------------------------------------------------

    def lose_stage(self, stage: int) -> None:
        self.lost = StageLostError(f"stage {stage} was lost.", stage=stage)

    def moves(self, rank: Rank) -> list[Callable[[], None]]:
        """What could happen on a rank now."""
        able: list[Callable[[], None]] = []
        if rank.on_way:
            able.append(rank.take_plan)
        if rank.plans and self._may_run(rank, rank.plans[0]):
            able.append(lambda: self._run(rank))
        able += [lambda index=index: rank.copy(index) for index in range(len(rank.copies))]
        if rank.answers:
            able.append(lambda: self._tell(rank))
        if rank.replica.builds_grammars:
            able += [lambda number=number: self.build(rank, number) for number in rank.replica.builds]
        return able

    def build(self, rank: Rank, number: int, why: str = "", *, late: str = "") -> None:
        """A rank of the last stage has built a grammar, or `why` or `late` says why not, and tells."""
        rank.replica.builds.remove(number)
        told = GrammarsBuilt(
            built=[] if why or late else [number],
            failed={number: why} if why else {},
            unable={number: late} if late else {},
        )
        self.reports.keep(told)

    def run_steps(self) -> None:
        """Every plan runs on every rank; orders stay as they are."""
        for rank in self.ranks:
            while rank.on_way:
                rank.take_plan()
            while rank.plans:
                self._run(rank)

    def answer(self, *ranks: int) -> None:
        """These ranks carry out all their orders, and tell."""
        for index in ranks:
            rank = self.ranks[index]
            while rank.copies:
                rank.copy(0)
            self._tell(rank)

    # --- inside ---------------------------------------------------------------------------------

    def _move_any(self) -> bool:
        assert self._chance is not None
        able = [move for rank in self.ranks for move in self.moves(rank)]
        if able:
            try:
                self._chance.choice(able)()
            except ProtocolError as error:  # the core would go on without the epoch
                raise AssertionError(error.message) from error
        return bool(able)

    def _may_run(self, rank: Rank, plan: ScheduledBatch) -> bool:
        """Whether its hidden states and the samples that it consumes have been computed."""
        before = [other for other in self.ranks if other.stage == rank.stage - 1]
        last = [other for other in self.ranks if other.stage == self._num_stages - 1]
        return all(other.next_step > plan.step_id for other in before) and (
            rank in last or all(other.next_step > plan.consume_through for other in last)
        )

    def _run(self, rank: Rank) -> None:
        plan = rank.run()
        assert rank.replica.residency.digest == self.core_digests[plan.step_id] == plan.residency
        self.num_compared += 1
        if plan.awaited:  # a part may not have come, on this rank alone; the core drops the result then
            return
        same = [other.sampled.get(plan.step_id) for other in self.ranks]
        assert all(ids in (None, rank.sampled[plan.step_id]) for ids in same), "ranks hold different things"

    def _tell(self, rank: Rank) -> None:
        answers, rank.answers = rank.answers, []
        done = [order for order, is_done in answers if is_done]
        failed = [order for order, is_done in answers if not is_done]
        if answers:
            self.reports.keep(OrdersDone(done=done, failed=failed))

    @property
    def _output(self) -> Rank:
        return next(rank for rank in self.ranks if rank.stage == self._num_stages - 1)

    def _has_result(self) -> bool:
        return bool(self._in_flight) and self._output.next_step > self._in_flight[0].step_id

    def _results(self) -> list[StepResult]:
        results = []
        while self._has_result():
            plan = self._in_flight.popleft()
            ids = self._output.sampled[plan.step_id]
            results.append(
                StepResult(
                    step_id=plan.step_id,
                    epoch=plan.epoch,
                    digest=plan.digest,
                    token_ids=ids,
                    num_rejected=self._output.rejected[plan.step_id],
                    logprobs=[None] * len(ids),
                    scores=self._output.scored[plan.step_id],
                    pooled=self._output.pooled[plan.step_id],
                )
            )
        return results


class ReplicaRig(CoreRig):
    """A whole engine core over a `ReplicaPipe`; arguments are those of both."""

    def __init__(
        self,
        *,
        num_stages: int,
        tp: int = 1,
        num_blocks: int,
        block_size: int = 4,
        async_depth: int = 0,
        parts: Sequence[Part] | None = None,
        chance: random.Random | None = None,
        failure_rate: float = 0.0,
        **settings: Any,
    ) -> None:
        super().__init__(
            num_stages=num_stages,
            async_depth=async_depth,
            num_blocks=num_blocks,
            block_size=block_size,
            eviction=settings.pop("eviction", "lru"),
            **settings,
        )
        self._make_pipe = partial(
            ReplicaPipe,
            num_stages=num_stages,
            tp=tp,
            num_rows=8,
            num_blocks=num_blocks,
            block_size=block_size,
            chance=chance,
            failure_rate=failure_rate,
        )
        self.pipe = self._make_pipe(parts=parts)
        parallel = ParallelConfig(pipeline_parallel_size=num_stages, async_depth=async_depth)
        self.core = EngineCore(self.scheduler, self.pipe, parallel, self.clock, recovers=True)
        self.num_compared = 0  # in epochs before

    def rejoin(self) -> None:
        """Ranks that know nothing take the place of all; what is stored is still there."""
        self.num_compared += self.pipe.num_compared
        epoch = self.core.stats().epoch + 1
        first_step = self.core.steps_in_flight[1]
        self.pipe = self._make_pipe(parts=self.pipe.parts, epoch=epoch, first_step=first_step)
        self.core.enter_epoch(epoch, self.pipe)

    def turn(self, *answering: int) -> None:
        """Without chance: whatever was planned runs everywhere, these ranks answer, the core goes on."""
        self.step()
        self.pipe.run_steps()
        self.pipe.answer(*answering)
        self.step()

    def turn_often(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def check_no_leak(self, num_blocks: int) -> None:
        """After a while nobody holds a block."""
        for _ in range(12):
            self.clock.advance(1.0)
            self.turn(*range(len(self.pipe.ranks)))
        assert self.core.stats().cache.free_blocks == num_blocks
        self.core.check_invariants()
