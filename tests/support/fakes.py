"""Stand-ins for what surrounds the engine core: a clock, and an executor whose ranks are plain Python.

`RankReplica` replays the plan log as a rank does and checks every promise of the plan format on the way. Its
"model" reads the context back out of the KV slots that the plans name, so a wrong block, row, position or
token anywhere changes the sampled ids, and a test that compares them with `oracle_tokens` fails.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from queue import SimpleQueue
from typing import Any, Literal, Self

import msgspec

from penstock.batch import (
    GUESSED,
    KNOWN,
    NO_GRAMMAR,
    NO_STORE_USE,
    BuiltGrammar,
    LinkOrder,
    NewRow,
    OrderResult,
    RankLoaded,
    RewoundRow,
    RowSampling,
    ScheduledBatch,
    ScoredTokens,
    SpansKey,
    StageSpans,
    StageTimes,
    StepResult,
    StoreUse,
    TierOrder,
    decode_to_core,
    decode_to_rank,
    encode,
)
from penstock.config.engine import EvictionPolicy, ParallelConfig, Pooling, SchedulerConfig
from penstock.engine.client.siblings import with_siblings
from penstock.engine.core.core import EngineCore
from penstock.engine.core.core_assembly import depth_and_wire
from penstock.engine.core.plan_depth import WireDepth
from penstock.engine.core.stall_limits import FixedLimit, StallLimit
from penstock.errors import ErrorInfo, StageLostError
from penstock.executor.base import KVPlan
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_pool import BlockPool
from penstock.kvcache.eviction import eviction_order
from penstock.kvcache.prefix_cache import PrefixCache
from penstock.kvcache.storage_tier import StorageTier, TierPolicy
from penstock.kvcache.stored_names import Catalogue
from penstock.pipeline.decision_log import DecisionLog
from penstock.request import (
    GenerationRequest,
    RequestUpdate,
    SamplingParams,
    StructuredOutputs,
    TokenLogprobs,
)
from penstock.residency import Residency
from penstock.scheduler.admission import derive_seed
from penstock.scheduler.cost_model import CostModel, StageCost, StepSample, StepShape
from penstock.scheduler.pacing import WireTime
from penstock.scheduler.queues import RequestState
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.start_order import ALWAYS_OPEN, StartGate
from penstock.scheduler.windows import DraftWindows
from penstock.speculation.drafter import Drafter

VOCAB_SIZE = 40
SMALL_SCHEDULER = SchedulerConfig(max_num_seqs=8)
PLAIN_TIERS = TierPolicy()
REPORTED_S = 0.05  # of each stage for a plan, where there is a wire and no cost
WIRE_S = 0.5  # the wire's time until it is measured


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def next_token(context: Sequence[int], sampling: RowSampling, num_outputs: int) -> int:
    """The id after `context`: a hash of every token and position in it, and of the seed."""
    text = ",".join(map(str, context)) + f"|{sampling.seed if sampling.temperature > 0 else 0}"
    token = zlib.crc32(text.encode()) % VOCAB_SIZE
    while num_outputs < sampling.min_tokens and token in sampling.suppressed_ids:
        token = (token + 1) % VOCAB_SIZE
    return token


def prompt_score(context: Sequence[int], token: int, count: int) -> TokenLogprobs:
    """The score of `token` after `context`: a hash of every token and position in it, and of the token."""
    number = zlib.crc32((",".join(map(str, context)) + f"?{token}").encode())
    return TokenLogprobs(-(number % 997) / 64, 1 + number % 7, list(range(count)), [-float(count)] * count)


def oracle_scores(prompt: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Those of a whole prompt, without any scheduling."""
    return [prompt_score(prompt[:place], prompt[place], count) for place in range(1, len(prompt))]


def oracle_tokens(
    prompt: Sequence[int], params: SamplingParams, *, seed: int, eos_token_ids: Sequence[int], max_len: int
) -> tuple[list[int], str]:
    """Output ids and finish reason of a request, computed one token at a time without any scheduling."""
    suppressed = sorted({*eos_token_ids, *params.stop_token_ids}) if params.min_tokens else []
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    sampling = RowSampling(params.temperature, 0, 1.0, 0.0, seed, params.min_tokens, suppressed, -1)
    output: list[int] = []
    if params.max_tokens == 0:
        return output, "length"
    while True:
        token = next_token([*prompt, *output], sampling, len(output))
        output.append(token)
        if token in stops and len(output) > params.min_tokens:
            return output, "stop"
        if len(output) == params.max_tokens or len(prompt) + len(output) == max_len:
            return output, "length"


def pooled_vector(context: Sequence[int], pooling: str) -> bytes:
    """In the place of a vector: one number that depends on every token and position, and on the pooling."""
    text = f"{pooling}:" + ",".join(map(str, context))
    return struct.pack("<f", zlib.crc32(text.encode()) % 4093)


SPOILT = -1  # in place of a token


@dataclass
class ReplicaRow:
    generation: int
    request_id: str
    prompt_len: int
    token_ids: list[int]
    sampling: RowSampling
    pooling: str | None = None
    grammar: int = NO_GRAMMAR
    num_computed: int = 0  # if all drafts whose returns were not consumed are right
    num_rejected: int = 0  # drafts that returns have told of
    live_from: int = 0  # returns of earlier steps are void
    truth: list[int] = field(default_factory=list)  # the tokens as the last stage knows them
    has_strayed: bool = False  # a guess was wrong, and the row was not rewound since
    blocks: list[int] = field(default_factory=list)


def taught(*stages: StageCost, alone: Sequence[StageCost] = ()) -> CostModel:
    """A cost model that has seen steps of just these costs; `alone` costs the same unless given."""
    model = CostModel(len(stages))
    shapes = [StepShape(n, n * context, n) for n in (1, 2, 4, 8, 16, 32, 64, 256) for context in (1, 40)]
    for is_alone, costs in ((False, stages), (True, alone or stages)):
        for stage, cost in enumerate(costs):
            model.learn(stage, [sample_of(cost, shape) for shape in shapes], alone=is_alone)
    return model


def sample_of(cost: StageCost, shape: StepShape) -> StepSample:
    """What a stage of that cost reports of a step."""
    head_s = max(cost.head_read, cost.per_sample * shape.samples) if shape.samples else 0.0
    return StepSample(shape, cost.seconds(shape) - head_s - cost.overhead, head_s, cost.overhead)


class RankReplica:
    """What every rank keeps, as one plain object: rows, block tables, KV slots, deferred token returns."""

    def __init__(
        self, *, num_rows: int, num_blocks: int, block_size: int, epoch: int = 0, first_step: int = 0
    ) -> None:
        self.num_rows = num_rows
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.rows: dict[int, ReplicaRow] = {}
        self.generations: dict[int, int] = {}
        self.slots: dict[int, tuple[int, int]] = {}  # slot -> (position, token id)
        # step -> row -> generation, ids, rejected drafts
        self.returns: dict[int, dict[int, tuple[int, list[int], int]]] = {}
        self.num_rejected: list[int] = []  # of the sampled rows of the newest step
        self.guesses: dict[int, list[int]] = {}  # of the newest step, as in its result
        self.guess_error = 0
        self.pooled: list[bytes] = []  # vectors of the step that was run last
        self.log = DecisionLog(epoch, first_step)
        self.scores: list[list[TokenLogprobs]] = []  # of the newest step
        self.grammars: dict[int, StructuredOutputs] = {}  # by number
        self.builds: list[int] = []  # that have not been told
        self.builds_grammars = True  # as ranks of the last stage do
        self.residency = Residency(block_size)
        self.first_step = self.next_step = first_step
        self.consumed = first_step - 1

    def run(self, plan: ScheduledBatch) -> list[list[int]]:
        """Apply one plan; the ids that the sampled rows get, in plan order."""
        assert plan.step_id == self.next_step, "steps have no gaps"
        self.log.append(plan, lambda _: [])
        self.residency.replay(plan)
        assert len(set(plan.rows)) == len(plan.rows), "a row is in the plan twice"
        self.next_step += 1
        self._apply_rows(plan)
        self._consume(plan)
        sampled = [self._run_row(plan, index) for index in range(len(plan.rows))]
        self._check_blocks()
        self.pooled = [self._vector(self.rows[row]) for row in plan.pooled]
        kept = [(row, ids) for row, ids in zip(plan.rows, sampled, strict=True) if ids is not None]
        sizes = [size - len(ids) for size, (_, ids) in zip(plan.window_sizes, kept, strict=True)]
        self.num_rejected = sizes
        self.returns[plan.step_id] = {
            row: (self.rows[row].generation, ids, rejected)
            for (row, ids), rejected in zip(kept, sizes, strict=True)
        }
        self.scores = [self._score(plan, scored) for scored in plan.scored]
        self.guesses = self._guess(plan, [row for row, ids in kept if ids])
        return [ids for _, ids in kept]

    def _guess(self, plan: ScheduledBatch, sampled: list[int]) -> dict[int, list[int]]:
        """What the MTP layer guesses: right tokens, each made wrong by `guess_error`."""
        assert all(0 <= index < len(plan.rows) for index in plan.mtp)
        pooled = {index for index, row in enumerate(plan.rows) if self.rows[row].pooling is not None}
        assert pooled.isdisjoint(plan.mtp), "a row without samples needs no guess"
        guesses = {}
        for index, count in plan.mtp.items():
            row = plan.rows[index]
            state = self.rows[row]
            assert not count or plan.need_sampled[index], "guesses follow a sample"
            room = len(state.blocks) * self.block_size - (
                plan.start_positions[index] + plan.num_tokens[index]
            )
            assert count <= room + state.num_rejected + 1, "the layer has room for all guesses but the last"
            if row not in sampled:
                continue
            context = list(state.truth)
            for _ in range(count):
                context.append(next_token(context, state.sampling, len(context) - state.prompt_len))
            guesses[plan.sampled_rows.index(row)] = [
                (token + self.guess_error) % VOCAB_SIZE for token in context[len(state.truth) :]
            ]
        return guesses

    def num_settled(self, row: int) -> int:
        """The scheduled positions of a row once all returns are consumed."""
        state = self.rows[row]
        entries = [
            returned[row]
            for step, returned in self.returns.items()
            if row in returned and step >= state.live_from
        ]
        open_ones = [rejected for generation, _, rejected in entries if generation == state.generation]
        return state.num_computed - sum(open_ones)

    def _score(self, plan: ScheduledBatch, scored: ScoredTokens) -> list[TokenLogprobs]:
        """From what the KV slots hold, as a sample is."""
        state = self.rows[plan.rows[scored.place]]
        start, count = plan.start_positions[scored.place], plan.num_tokens[scored.place]
        end = scored.first + scored.count
        assert start < scored.first, "what stands before the first is computed in this step"
        assert end - 1 <= min(start + count, state.prompt_len - 1), "what stands before the last is computed"
        assert plan.token_from[scored.place] == KNOWN
        stored = [self.slots[self._slot(state, position)] for position in range(end - 1)]
        assert [position for position, _ in stored] == list(range(end - 1)), "KV is somebody else's"
        context = [token for _, token in stored]
        num_top = state.sampling.num_prompt_logprobs
        assert num_top >= 0
        return [
            prompt_score(context[:place], state.token_ids[place], num_top)
            for place in range(scored.first, end)
        ]

    def _apply_rows(self, plan: ScheduledBatch) -> None:
        for row in plan.freed_rows:
            del self.rows[row]
        for number in plan.dropped_grammars:
            del self.grammars[number]
            assert all(state.grammar != number for state in self.rows.values()), "a row has it still"
        for new in plan.new_rows:
            self._enter(new)
        for rewound in plan.rewound:
            self._rewind(rewound, plan.step_id)

    def _rewind(self, rewound: RewoundRow, step_id: int) -> None:
        state = self.rows[rewound.row]
        num_kept = rewound.num_tokens - len(rewound.newest_ids)
        assert len(state.token_ids) >= num_kept, "the first stage lacks tokens"
        state.token_ids = [*state.token_ids[:num_kept], *rewound.newest_ids]
        assert state.token_ids == state.truth, "the core knows what was sampled"
        assert state.has_strayed, "a row is rewound when a guess was wrong"
        state.num_computed, state.num_rejected = rewound.num_tokens - 1, 0
        state.live_from, state.has_strayed = step_id, False

    def _enter(self, new: NewRow) -> None:
        assert new.row not in self.rows, f"row {new.row} is in use"
        assert 0 <= new.row < self.num_rows
        if new.row in self.generations or not self.first_step:
            assert new.generation == self.generations.get(new.row, -1) + 1, "generations grow by one"
        self.generations[new.row] = new.generation
        self.rows[new.row] = ReplicaRow(
            new.generation,
            new.request_id,
            new.prompt_len,
            list(new.token_ids),
            new.sampling,
            new.pooling,
            new.grammar,
            num_computed=new.start,
            blocks=list(new.blocks),
            truth=list(new.token_ids),
        )
        if new.grammar != NO_GRAMMAR:
            structured = new.sampling.structured
            assert structured is not None
            if new.grammar not in self.grammars:
                self.builds.append(new.grammar)
            assert self.grammars.setdefault(new.grammar, structured) == structured

    def _consume(self, plan: ScheduledBatch) -> None:
        assert self.consumed <= plan.consume_through < plan.step_id, "consume_through is monotone"
        for step in range(self.consumed + 1, plan.consume_through + 1):
            for row, (generation, ids, rejected) in self.returns.pop(step).items():
                state = self.rows.get(row)
                if state is not None and state.generation == generation and step >= state.live_from:
                    state.token_ids += ids
                    state.num_computed -= rejected
                    state.num_rejected += rejected
        self.consumed = plan.consume_through

    def _run_row(self, plan: ScheduledBatch, index: int) -> list[int] | None:
        state = self.rows[plan.rows[index]]
        start, count = plan.start_positions[index] - state.num_rejected, plan.num_tokens[index]
        drafts = plan.drafts.get(index, [])
        assert count >= 1
        assert state.pooling is None or start == state.num_computed, "all tokens of a pooled row are run"
        if not state.num_computed:  # what it starts behind was found in a cache; `_sample` sees whether it is
            state.num_computed = start
        assert start == state.num_computed, "positions are run once, in order"
        source = plan.token_from[index]
        state.blocks += plan.new_blocks[index] if source == GUESSED else []
        if source == GUESSED:
            assert len(plan.rows) == 1, "a guessed window needs its own plan"
            return self._run_guessed(state, start, drafts)
        state.has_strayed = False
        if source != KNOWN:
            assert count == 1 + len(drafts)
            assert source <= plan.consume_through, "the input id has been consumed"
            assert start + 1 == len(state.token_ids), "a decode runs the newest token"
        else:
            assert not drafts, "only decodes bring drafts"
        state.blocks += plan.new_blocks[index]
        tokens = [*state.token_ids, *drafts]
        follows = source != KNOWN or self._has(state, start)
        for position in range(start, start + count):
            self._write(state, position, tokens[position] if follows else SPOILT)
        state.num_computed += count
        reaches_all = state.num_computed == len(tokens)
        if state.pooling is not None:
            assert not plan.need_sampled[index]
            assert (plan.rows[index] in plan.pooled) == reaches_all, "pooled once all tokens have run"
            return None
        if not plan.need_sampled[index] and len(state.token_ids) == 1:
            return None  # of a request that wants no token the last one is run only if it is the first
        assert plan.need_sampled[index] == reaches_all, "sampled if and only if all known tokens have run"
        if not reaches_all:
            return None
        assert (state.sampling.structured is None) == (state.grammar == NO_GRAMMAR)
        assert not self.builds_grammars or state.grammar not in self.builds, "its grammar is not built"
        return self._sample_window(state, drafts, may_be_spoilt=bool(plan.awaited))

    def _run_guessed(self, state: ReplicaRow, start: int, drafts: list[int]) -> list[int]:
        """A window of guesses alone; no ids if it is void, as the last stage finds out. The stages before
        have computed it all the same."""
        for position, token in enumerate(drafts, start):
            self._write(state, position, token)
        state.num_computed += len(drafts)
        is_next = start + 1 == len(state.truth) and state.truth[-1] == drafts[0]
        state.has_strayed = state.has_strayed or not is_next
        return [] if state.has_strayed else self._sample_window(state, drafts[1:])

    def _sample_window(
        self, state: ReplicaRow, drafts: list[int], *, may_be_spoilt: bool = False
    ) -> list[int]:
        """The ids behind the row's last positions, the drafts among them, up to the first wrong one."""
        ids: list[int] = []
        for place in range(1 + len(drafts)):
            end = state.num_computed - len(drafts) + place
            ids.append(self._sample(state, end, may_be_spoilt=may_be_spoilt))
            if drafts[place : place + 1] != ids[-1:]:
                break
        state.truth += ids
        state.has_strayed = len(ids) <= len(drafts)
        return ids

    def _sample(self, state: ReplicaRow, end: int, *, may_be_spoilt: bool) -> int:
        """The id behind its first `end` positions."""
        stored = [self.slots.get(self._slot(state, position)) for position in range(end)]
        context = [token for position, token in filter(None, stored)]
        is_whole = [entry and entry[0] for entry in stored] == list(range(end))
        if may_be_spoilt and (SPOILT in context or not is_whole):
            return 0
        assert is_whole, "KV is somebody else's"
        assert SPOILT not in context, "it was computed behind blocks that had not come"
        return next_token(context, state.sampling, len(context) - state.prompt_len)

    def _vector(self, state: ReplicaRow) -> bytes:
        assert state.pooling is not None
        stored = [self.slots[self._slot(state, position)] for position in range(state.num_computed)]
        assert stored == list(enumerate(state.token_ids)), "KV is somebody else's"
        return pooled_vector(state.token_ids, state.pooling)

    def _slot(self, state: ReplicaRow, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return state.blocks[block] * self.block_size + offset

    def _has(self, state: ReplicaRow, length: int) -> bool:
        """Whether its slots hold its first tokens; what is computed behind others is good for nothing."""
        known = enumerate(state.token_ids[:length])
        return all(
            self.slots.get(self._slot(state, position)) == (position, token) for position, token in known
        )

    def _write(self, state: ReplicaRow, position: int, token: int) -> None:
        block = state.blocks[position // self.block_size]
        holders = sum(block in other.blocks for other in self.rows.values())
        assert holders == 1, f"block {block} is written to and has {holders} holders"
        self.slots[self._slot(state, position)] = (position, token)

    def _check_blocks(self) -> None:
        held = {block for state in self.rows.values() for block in state.blocks}
        assert all(len(set(state.blocks)) == len(state.blocks) for state in self.rows.values())
        assert all(0 <= block < self.num_blocks for block in held)


class FakeExecutor:
    """An executor in one object: runs a plan when it is submitted, shows its result when it is due.

    Args:
        latency: the result of step n shows in `poll(0)` once step n + latency has been submitted. None: only
            `release` makes results show. A poll with a timeout always brings one while a step is in flight.
        depth: plans that may be out at once; one more is an error of the caller.
        min_lag: steps from a sample to the plan that takes it before its result is back; P unless there are
            fewer micro-batches than stages.
    """

    def __init__(
        self,
        *,
        depth: int,
        num_stages: int = 1,
        min_lag: int | None = None,
        latency: int | None = None,
        num_rows: int = 64,
        num_blocks: int = 64,
        block_size: int = 4,
        epoch: int = 0,
        first_step: int = 0,
    ) -> None:
        self.depth = depth
        self.min_lag = num_stages if min_lag is None else min_lag
        self.latency = latency
        self.replica = RankReplica(
            num_rows=num_rows,
            num_blocks=num_blocks,
            block_size=block_size,
            epoch=epoch,
            first_step=first_step,
        )
        self.log = DecisionLog(epoch, first_step)
        self.plans: list[ScheduledBatch] = []
        self.events: list[tuple[str, int]] = []  # ("submit" | "result", step id), as they happened
        self.fail_rows: dict[int, list[int]] = {}  # step -> indices of sampled rows that come back failed
        self.fail_scores: dict[int, list[int]] = {}  # step -> indices of scored rows that come back failed
        self.fail_steps: dict[int, ErrorInfo] = {}  # step -> why a stage has not computed it
        self.unmet = ""  # why, if it was not for their logits
        self.fail_pooled: set[int] = set()  # rows whose vectors are not finite
        self.lost: StageLostError | None = None
        self.lose_at: int | None = None  # the step at whose submission a stage dies
        self.stored: dict[bytes, list[tuple[int, int]]] = {}  # what the ranks' parts of the store hold
        self.answers_at_once = True  # orders are answered as soon as they are given; else by `answer`
        self._open_orders: deque[OrderResult] = deque()
        self._answered: list[OrderResult] = []
        self.told_use = NO_STORE_USE  # what the ranks tell next of the store
        self.builds_at_once = True  # grammars are told as soon as they are named; else by `tell_built`
        self._built: list[BuiltGrammar] = []
        self.link_orders: SimpleQueue[LinkOrder] = SimpleQueue()  # that it was given
        self.told_spans: list[StageSpans] = []
        self._due: deque[bytes] = deque()
        self._num_released = 0
        self._returned_step = -1

    def start(self) -> KVPlan:
        """One stage that holds just the replica's blocks."""
        num_blocks = self.replica.num_blocks
        rank = RankLoaded(
            stage=0,
            max_blocks=num_blocks,
            block_bytes=0,
            tensor_bytes=0,
            bytes_read=0,
            load_seconds=0.0,
            is_invariant=False,
        )
        return KVPlan(num_blocks=num_blocks, ranks=[rank])

    def poll_start(self) -> KVPlan | None:
        return self.start()

    def shutdown(self) -> None:
        """Nothing to end."""

    def abandon(self) -> None:
        """Nothing to leave."""

    @property
    def reports(self) -> Self:
        return self

    def stage_times(self) -> list[StageTimes]:
        """Nobody counts."""
        return []

    def spans(self) -> list[StageSpans]:
        return [spans for spans in self.told_spans if spans.tp_rank == 0]

    def rank_spans(self, seen: Container[SpansKey]) -> list[StageSpans]:
        return [spans for spans in self.told_spans if spans.key not in seen]

    def exchange_link(self, order: LinkOrder) -> None:
        self.link_orders.put(order)

    def wait_sources(self) -> list[int]:
        """Nothing to wait for but `poll`."""
        return []

    def submit_plan(self, plan: ScheduledBatch) -> int:
        if plan.step_id == self.lose_at:
            self.lose_stage(1, "killed")
        if self.lost is not None:
            raise self.lost
        assert len(self._due) < self.depth, "more plans in flight than the pipe is deep"
        wire = decode_to_rank(encode(self.log.seal(plan)))
        assert isinstance(wire, ScheduledBatch)
        self._check_cadence(wire)
        self.plans.append(wire)
        for order in wire.orders:
            self._carry_out(order)
        self.events.append(("submit", wire.step_id))
        self._due.append(encode(self._result(wire, self.replica.run(wire))))
        return wire.digest

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        if self.lost is not None:
            raise self.lost
        count = self._num_released
        if self.latency is not None:
            count = max(count, len(self._due) - self.latency)
        if timeout_s > 0 and count == 0:
            count = 1
        results = [self._show() for _ in range(min(count, len(self._due)))]
        self._num_released = max(0, self._num_released - len(results))
        return results

    def _carry_out(self, order: TierOrder) -> None:
        """As ranks do, before the step of the plan: what the block is to hold, or does hold."""
        size = self.replica.block_size
        places = range(order.block * size, (order.block + 1) * size)
        is_done = True
        if order.is_load:
            found = self.stored.get(order.name)
            is_done = found is not None
            self.replica.slots.update(zip(places, found or (), strict=False))
        else:
            self.stored[order.name] = [self.replica.slots[place] for place in places]
        (self._answered if self.answers_at_once else self._open_orders).append(
            OrderResult(order.order, "done" if is_done else "failed")
        )

    def answer(self, count: int) -> None:
        """Let the ranks answer the `count` oldest orders."""
        self._answered += [self._open_orders.popleft() for _ in range(min(count, len(self._open_orders)))]

    def finished_orders(self) -> list[OrderResult]:
        answered, self._answered = self._answered, []
        return answered

    def store_use(self) -> StoreUse:
        use, self.told_use = self.told_use, NO_STORE_USE
        return use

    def tell_built(self, number: int, why: str = "") -> None:
        """A grammar has been built, or `why` not."""
        self.replica.builds.remove(number)
        self._built.append(BuiltGrammar(number, why))

    def built_grammars(self) -> list[BuiltGrammar]:
        if self.builds_at_once:
            for number in list(self.replica.builds):
                self.tell_built(number)
        built, self._built = self._built, []
        return built

    def release(self, count: int) -> None:
        """Let the next `count` results show in the next polls."""
        self._num_released += count

    def lose_stage(self, stage: int, cause: str) -> None:
        """Every further call raises, as when a rank has died."""
        self.lost = StageLostError(f"stage {stage} was lost: {cause}.", stage=stage)

    @property
    def num_inflight(self) -> int:
        return len(self._due)

    def _show(self) -> StepResult:
        result = decode_to_core(self._due.popleft())
        assert isinstance(result, StepResult)
        self._returned_step = result.step_id
        self.events.append(("result", result.step_id))
        return result

    def _check_cadence(self, plan: ScheduledBatch) -> None:
        for source in plan.token_from:
            waits_for_it = source > self._returned_step
            assert not waits_for_it or plan.step_id - source >= self.min_lag, (
                f"step {plan.step_id} takes its input from step {source}, which is still in the pipe"
            )

    def _result(self, plan: ScheduledBatch, tokens: list[list[int]]) -> StepResult:
        failed = [index for index in self.fail_rows.get(plan.step_id, []) if index < len(tokens)]
        wanted = [self.replica.rows[row].sampling.num_logprobs for row in plan.sampled_rows]
        result = StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            digest=plan.digest,
            token_ids=[[*ids[:-1], -1] if index in failed else ids for index, ids in enumerate(tokens)],
            num_rejected=self.replica.num_rejected,
            logprobs=[
                None if count < 0 or not ids else [TokenLogprobs(-0.5, 1, [token], [-0.5]) for token in ids]
                for ids, count in zip(tokens, wanted, strict=True)
            ],
            failed=failed,
            guesses=self.replica.guesses,
            scores=[
                [] if index in self.fail_scores.get(plan.step_id, []) else scores
                for index, scores in enumerate(self.replica.scores)
            ],
            unmet=dict.fromkeys(failed, self.unmet) if self.unmet else {},
            pooled=[
                b"" if row in self.fail_pooled else vector
                for row, vector in zip(plan.pooled, self.replica.pooled, strict=True)
            ],
        )
        error = self.fail_steps.get(plan.step_id)
        return result if error is None else _uncomputed(result, plan, error)


def _uncomputed(result: StepResult, plan: ScheduledBatch, error: ErrorInfo) -> StepResult:
    """The result of a step that a stage has had no memory for."""
    sizes = plan.window_sizes
    return msgspec.structs.replace(
        result,
        token_ids=[[-1] for _ in sizes],
        num_rejected=[size - 1 for size in sizes],
        logprobs=[None for _ in sizes],
        failed=list(range(len(sizes))),
        guesses={},
        scores=[[] for _ in plan.scored],
        pooled=[b"" for _ in plan.pooled],
        error=error,
    )


class CoreRig:
    """A whole engine core on fakes, which checks all invariants after each operation.

    Attributes:
        updates: of each request id, in the order in which they came.

    Args:
        costs: of every stage, shared and alone, if plans are to be sized by time.
        eviction: policy of the prefix cache, if there is one.
        catalogue: of a store, if there is one.
        tier_policy: of the tiers beyond the pool, but for `store_when_found`.
        max_plans_in_flight: with a wire between the stages, whose time is measured.
        executor_class: makes the executor, of the arguments of a `FakeExecutor`.
        clock: that is given; None: a new one.
        drafter: makes one, of what finds a live request by its arrival; None: nobody drafts.
        num_drafts: of a row at most.
        gate: of requests that have never run.
    """

    def __init__(
        self,
        *,
        num_stages: int = 1,
        async_depth: int = 0,
        latency: int | None = 0,
        num_blocks: int = 64,
        block_size: int = 4,
        eviction: EvictionPolicy | None = None,
        catalogue: Catalogue | None = None,
        store_when_found: int = 0,
        tier_policy: TierPolicy = PLAIN_TIERS,
        max_model_len: int = 64,
        eos_token_ids: Sequence[int] = (1,),
        seed: int = 0,
        scheduler: SchedulerConfig = SMALL_SCHEDULER,
        costs: tuple[StageCost, StageCost] | None = None,
        stall_timeout_s: float = math.inf,
        stall_limit: StallLimit | None = None,
        recovers: bool = False,
        max_plans_in_flight: int | Literal["auto"] = "auto",
        executor_class: Callable[..., FakeExecutor] = FakeExecutor,
        clock: FakeClock | None = None,
        drafter: Callable[[Callable[[int], RequestState]], Drafter] | None = None,
        num_drafts: int = 4,
        gate: StartGate = ALWAYS_OPEN,
    ) -> None:
        parallel = ParallelConfig(
            pipeline_parallel_size=num_stages,
            async_depth=async_depth,
            max_plans_in_flight=max_plans_in_flight,
        )
        model = None
        if costs is not None:
            shared, alone = costs
            model = taught(*[shared] * num_stages, alone=[alone] * num_stages)
        self.clock = clock or FakeClock()
        self.depth, wire = depth_and_wire(parallel, model, num_links=num_stages - 1)
        if isinstance(self.depth, WireDepth):
            self.depth.reported = [REPORTED_S] * num_stages
            self.depth.wire = WireTime(latency=WIRE_S)
        self.eos_token_ids = list(eos_token_ids)
        self.seed = seed
        self.cache = None if eviction is None else PrefixCache(num_blocks, eviction_order(eviction))
        self.allocator = BlockAllocator(BlockPool(num_blocks, self.cache), block_size)
        self.tier = None
        if catalogue is not None:
            policy = replace(tier_policy, store_when_found=store_when_found)
            self.tier = StorageTier(self.allocator, catalogue, self.clock, policy)
        windows = None
        if drafter is not None:
            windows = DraftWindows(
                drafter(self._request_of),
                self.allocator,
                model,
                most=num_drafts,
                max_tokens=scheduler.max_num_batched_tokens,
                depth=self.depth,
                clock=self.clock,
            )
        self.scheduler = Scheduler(
            scheduler,
            self.allocator,
            num_stages=num_stages,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            seed=seed,
            clock=self.clock,
            costs=model,
            tier=self.tier,
            depth=self.depth,
            windows=windows,
            gate=gate,
        )
        self.make_executor = partial(
            executor_class,
            depth=parallel.depth,
            num_stages=num_stages,
            min_lag=None if costs is None and scheduler.micro_batches == "auto" else 1,
            latency=latency,
            num_rows=scheduler.max_num_seqs,
            num_blocks=num_blocks,
            block_size=block_size,
        )
        self.executor = self.make_executor()
        self.core = EngineCore(
            self.scheduler,
            self.executor,
            parallel,
            self.clock,
            recovers=recovers,
            stall_limit=stall_limit or FixedLimit(stall_timeout_s),
            wire=wire,
        )
        self.requests: dict[str, GenerationRequest] = {}
        self.updates: dict[str, list[RequestUpdate]] = {}

    def add(self, request_id: str, prompt: Sequence[int] | int, *, n: int = 1, **sampling: Any) -> None:
        """Queue a request, and n - 1 that follow it: `/1` and so on behind its name. A number as prompt makes
        one of that length, different for each request."""
        if isinstance(prompt, int):
            prompt = [(7 * len(self.requests) + 3 * index) % VOCAB_SIZE for index in range(prompt)]
        params = SamplingParams(**{"temperature": 0.0, "n": n, **sampling})
        request = with_siblings(request_id, list(prompt), params)
        self.core.add_request(request)
        for one in request.alone():
            self.requests[one.request_id] = one
            self.updates[one.request_id] = []
        self.core.check_invariants()

    def _request_of(self, arrival: int) -> RequestState:
        return next(request for request in self.scheduler._queues if request.arrival == arrival)

    def embed(self, request_id: str, prompt: Sequence[int] | int, pooling: Pooling = "mean") -> None:
        """Queue a request for a vector; a number as for `add`."""
        if isinstance(prompt, int):
            prompt = [(7 * len(self.requests) + 3 * index) % VOCAB_SIZE for index in range(prompt)]
        request = GenerationRequest(request_id=request_id, prompt_token_ids=list(prompt), pooling=pooling)
        self.core.add_request(request)
        self.requests[request_id] = request
        self.updates[request_id] = []
        self.core.check_invariants()

    def abort(self, request_id: str) -> bool:
        found = self.core.abort(request_id)
        self.core.check_invariants()
        return found

    def step(self, timeout_s: float = 0.0) -> list[RequestUpdate]:
        updates = self.core.step(timeout_s)
        for update in updates:
            assert not self.is_finished(update.request_id), f"{update} comes after the last one"
            self.updates[update.request_id].append(update)
        self.core.check_invariants()
        return updates

    def settle(self, count: int = 1) -> list[RequestUpdate]:
        """Let `count` results come, then step once."""
        self.executor.release(count)
        return self.step()

    def rejoin(self, ranks: Sequence[RankLoaded] = ()) -> None:
        """Ranks that know nothing take the place of those that were lost."""
        epoch = self.core.stats().epoch + 1
        self.executor = self.make_executor(epoch=epoch, first_step=self.core.steps_in_flight[1])
        self.core.enter_epoch(epoch, self.executor, ranks=ranks)

    def run_until_idle(self, max_steps: int = 5000) -> None:
        """Step, waiting for results, until nothing is alive; fails when that takes too long."""
        for _ in range(max_steps):
            if self.core.is_idle:
                return
            self.step(timeout_s=1.0)
        raise AssertionError(f"not idle after {max_steps} steps: {self.core.stats()}")

    def is_finished(self, request_id: str) -> bool:
        updates = self.updates[request_id]
        return bool(updates) and updates[-1].finish_reason is not None

    def tokens(self, request_id: str) -> list[int]:
        return [token for update in self.updates[request_id] for token in update.token_ids]

    def scores(self, request_id: str) -> list[TokenLogprobs]:
        return [score for update in self.updates[request_id] for score in update.prompt_logprobs]

    def expected_scores(self, request_id: str) -> list[TokenLogprobs]:
        """The oracle's."""
        request = self.requests[request_id]
        count = request.sampling.prompt_logprobs
        return [] if count is None else oracle_scores(request.prompt_token_ids, count)

    def finish_reason(self, request_id: str) -> str | None:
        updates = self.updates[request_id]
        return updates[-1].finish_reason if updates else None

    def expected(self, request_id: str, arrival: int = 0) -> tuple[list[int], str]:
        """The oracle's tokens and finish reason."""
        request = self.requests[request_id]
        seed = request.sampling.seed
        return oracle_tokens(
            request.prompt_token_ids,
            request.sampling,
            seed=derive_seed(self.seed, arrival) if seed is None else seed,
            eos_token_ids=self.eos_token_ids,
            max_len=self.scheduler.max_len,
        )

    def result(self, request_id: str) -> tuple[list[int], str | None]:
        return self.tokens(request_id), self.finish_reason(request_id)

    def vector(self, request_id: str) -> bytes:
        """Of a finished request; the only update it had."""
        (update,) = self.updates[request_id]
        assert update.finish_reason == "stop"
        return update.vector

    def expected_vector(self, request_id: str) -> bytes:
        request = self.requests[request_id]
        assert request.pooling is not None
        return pooled_vector(request.prompt_token_ids, request.pooling)

    @property
    def num_dropped(self) -> int:
        """Sampled ids that never reached anybody, because their request had ended."""
        sampled = sum(plan.num_samples for plan in self.executor.plans)
        return sampled - sum(len(self.tokens(request_id)) for request_id in self.requests)

    @property
    def most_in_flight(self) -> int:
        """Plans that were in flight at once at most."""
        return max(accumulate(1 if kind == "submit" else -1 for kind, _ in self.executor.events), default=0)

    @property
    def plans(self) -> list[ScheduledBatch]:
        """Plans with rows, in order: probes left out."""
        return [plan for plan in self.executor.plans if plan.rows]
