"""Random traces through the whole engine core: every request gets exactly its oracle's tokens.

The fake ranks check each plan (rows, generations, blocks, positions, token sources), and `CoreRig` checks all
invariants after each operation. Covers rows D1-D4, D10, D11, D13, E3, E4, E8, F2, S3, S8, DR6, DR7.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from depth import depth
from drafters import KnowingDrafter
from fakes import VOCAB_SIZE, CoreRig
from penstock.config.engine import SchedulerConfig
from penstock.errors import InvalidRequestError
from penstock.scheduler.cost_model import StageCost
from penstock.scheduler.queues import RequestState

# Bound by reading weights, so that there are fewer micro-batches than stages; by arithmetic; in between.
COSTS = [
    None,
    (StageCost(read=0.03, per_token=1e-4), StageCost(read=0.01, per_token=1e-4)),
    (StageCost(read=1e-4, per_token=0.02, per_attended=1e-4), StageCost(read=1e-4, per_token=0.02)),
    (StageCost(read=0.002, per_token=1e-3, overhead=0.01), StageCost(read=0.001, per_token=1e-3)),
]
CHANCES = [0.0, 0.5, 0.9, 1.0]


def drafter_of(chance: float) -> Callable[[Callable[[int], RequestState]], KnowingDrafter]:
    """Make a drafter that is right so often, and claims to be so more often than not."""
    return partial(KnowingDrafter, chance=chance, claimed=max(chance, 0.6))


RIGS = st.fixed_dictionaries(
    {
        "num_stages": st.integers(1, 4),
        "async_depth": st.integers(0, 2),
        "latency": st.sampled_from([None, None, 0, 1, 3, 6]),
        "block_size": st.integers(1, 4),
        "num_blocks": st.integers(2, 24),
        "max_model_len": st.integers(4, 40),
        "eos_token_ids": st.sampled_from([(), (1,), (1, 2, 3, 5, 8, 13)]),
        "seed": st.integers(0, 3),
        "scheduler": st.builds(
            SchedulerConfig,
            max_num_seqs=st.integers(1, 6),
            max_num_batched_tokens=st.sampled_from([1, 2, 3, 5, 8, 24, 100]),
            max_waiting_tokens=st.just(1 << 20),
            prefill_chunk=st.sampled_from([1, 2, 3, 7, 64]),
            micro_batches=st.sampled_from(["auto", "auto", 1, 2, 9]),
        ),
        "costs": st.sampled_from(COSTS),
        "max_plans_in_flight": st.sampled_from(["auto", "auto", 8, 20]),
        "drafter": st.one_of(st.none(), st.sampled_from(CHANCES).map(drafter_of)),
        "num_drafts": st.integers(1, 8),
    }
)
SAMPLING = st.fixed_dictionaries(
    {
        "max_tokens": st.one_of(st.none(), st.integers(1, 12)),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.one_of(st.none(), st.integers(0, 5)),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4),
    },
    optional={"min_tokens": st.integers(0, 1), "logprobs": st.sampled_from([None, 0])},
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 24), SAMPLING),
        st.tuples(st.just("add"), st.integers(1, 24), SAMPLING),
        st.tuples(st.just("abort"), st.integers(0, 30), st.none()),
        st.tuples(st.just("settle"), st.integers(0, 5), st.none()),
        st.tuples(st.just("settle"), st.integers(0, 5), st.none()),
        st.tuples(st.just("wait"), st.integers(0, 3), st.none()),
    ),
    min_size=12,
    max_size=50,
)


class Trace:
    """Applies operations to a rig and remembers what each request is due."""

    def __init__(self, rig: CoreRig) -> None:
        self.rig = rig
        self.arrivals: dict[str, int] = {}
        self.aborted: set[str] = set()

    def apply(self, operation: tuple[str, int, Any]) -> None:
        name, number, sampling = operation
        if name == "add":
            self.add(number, sampling)
        elif name == "abort":
            self.abort(f"r{number % (len(self.arrivals) + 1)}")
        elif name == "settle":
            self.rig.settle(number)
        else:
            self.rig.clock.advance(0.4 * number)
            self.rig.step(timeout_s=1.0)
        self.check_quiescent()

    def add(self, prompt_len: int, sampling: dict[str, Any]) -> None:
        request_id = f"r{len(self.arrivals)}"
        if prompt_len + 1 > self.rig.scheduler.max_len:
            with pytest.raises(InvalidRequestError):
                self.rig.add(request_id, prompt_len, **sampling)
        else:
            self.rig.add(request_id, prompt_len, **sampling)
            self.arrivals[request_id] = len(self.arrivals)

    def abort(self, request_id: str) -> None:
        alive = request_id in self.arrivals and not self.rig.is_finished(request_id)
        assert self.rig.abort(request_id) == (alive and request_id not in self.aborted)
        if alive:
            self.aborted.add(request_id)

    def check_quiescent(self) -> None:
        """Row D3: with nothing in flight, ranks and scheduler hold the same rows, blocks and positions."""
        if self.rig.core.num_inflight:
            return
        replica = self.rig.executor.replica
        for request in self.rig.scheduler._queues.running:
            row = replica.rows[request.row]
            assert row.request_id == request.request_id
            assert replica.num_settled(request.row) == request.num_scheduled
            assert row.blocks == self.rig.allocator.table(request.arrival)

    def check_end(self) -> None:
        self.rig.run_until_idle()
        for request_id, arrival in self.arrivals.items():
            tokens, reason = self.rig.expected(request_id, arrival)
            if request_id in self.aborted:
                sent = self.rig.tokens(request_id)
                assert sent == tokens[: len(sent)], "an aborted request got a wrong token"
                assert len(sent) < len(tokens)
                assert self.rig.finish_reason(request_id) is None
            else:
                assert self.rig.result(request_id) == (tokens, reason)
        self.check_nothing_held()

    def check_nothing_held(self) -> None:
        stats = self.rig.core.stats()
        assert stats.cache.free_blocks == stats.cache.num_blocks
        assert (stats.scheduler.num_running, stats.scheduler.num_waiting, stats.inflight) == (0, 0, 0)
        assert stats.scheduler.generated_tokens == sum(len(self.rig.tokens(name)) for name in self.arrivals)
        self.rig.clock.advance(10.0)
        self.rig.step()  # a probe, which tells the ranks of the last freed rows
        assert self.rig.executor.replica.rows == {}


@pytest.mark.deep
@settings(
    max_examples=depth(120, 400),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
)
@given(rig=RIGS, operations=OPERATIONS)
def test_d2_d10_d11_d13_every_request_gets_exactly_its_tokens(
    rig: dict[str, Any], operations: list[tuple[str, int, Any]]
) -> None:
    trace = Trace(CoreRig(**rig))
    for operation in operations:
        trace.apply(operation)
    trace.check_end()
    event("more plans than stages in flight", trace.rig.most_in_flight > 4 + 2)
    event("preemption", trace.rig.core.stats().scheduler.num_preemptions > 0)
    event("steps of a finished request in flight", trace.rig.num_dropped > 0)
    event("abort of a live request", len(trace.aborted) > 0)
    event("accepted drafts", trace.rig.core.stats().scheduler.speculation.num_accepted > 0)


def random_rig(random: Random) -> dict[str, Any]:
    """A rig that is short of something: blocks, rows, tokens per plan, or results."""
    block_size = random.choice([1, 2, 3, 4, 16])
    return {
        "num_stages": random.randint(1, 4),
        "async_depth": random.randint(0, 2),
        "latency": random.choice([None, None, 0, 1, 2, 5]),
        "block_size": block_size,
        "num_blocks": max(2, random.choice([12, 20, 30, 60]) // block_size),
        "max_model_len": random.choice([12, 24, 64]),
        "eos_token_ids": random.choice([(), (1,), (1, 2, 3)]),
        "seed": random.randint(0, 3),
        "scheduler": SchedulerConfig(
            max_num_seqs=random.choice([1, 2, 4, 8]),
            max_num_batched_tokens=random.choice([1, 2, 4, 8, 16, 100]),
            prefill_chunk=random.choice([1, 2, 3, 7, 64]),
            max_waiting_tokens=1 << 20,  # pools are small here: nobody is to be refused
        ),
        "costs": random.choice(COSTS),
        "max_plans_in_flight": random.choice(["auto", "auto", 8, 20]),
        "drafter": None if random.random() < 0.5 else drafter_of(random.choice(CHANCES)),
        "num_drafts": random.randint(1, 8),
    }


def random_operation(random: Random) -> tuple[str, int, Any]:
    name = random.choices(["add", "abort", "settle", "wait"], [4, 1, 6, 2])[0]
    if name != "add":
        return name, random.randint(0, 99 if name == "abort" else 5), None
    sampling = {
        "max_tokens": random.choice([1, 1, 2, 5, 12, 30, None]),
        "temperature": random.choice([0.0, 1.0]),
        "ignore_eos": random.random() < 0.5,
        "min_tokens": random.randint(0, 1),
        "stop_token_ids": [random.randrange(VOCAB_SIZE) for _ in range(random.choice([0, 0, 1, 4]))],
    }
    return name, random.choice([1, 2, 3, 4, 7, 8, 14, 20]), sampling


def run_random_trace(seed: int) -> Trace:
    random = Random(seed)
    trace = Trace(CoreRig(**random_rig(random)))
    for _ in range(random.randint(10, 120)):
        trace.apply(random_operation(random))
    trace.check_end()
    return trace


def test_d2_d10_d11_d13_long_random_traces() -> None:
    traces = [run_random_trace(seed) for seed in range(60)]
    preempting = [trace.rig.core.stats().scheduler.num_preemptions > 0 for trace in traces]
    assert sum(preempting) > 8, "traces too tame"
    assert sum(trace.rig.num_dropped > 0 for trace in traces) > 10, "traces too tame"
    assert sum(len(trace.aborted) > 0 for trace in traces) > 10, "traces too tame"
    assert sum(trace.rig.most_in_flight > 4 + 2 for trace in traces) > 3, "traces too tame"
    drafting = [trace.rig.core.stats().scheduler.speculation for trace in traces]
    assert sum(0 < stats.num_accepted < stats.num_drafted for stats in drafting) > 10, "traces too tame"
    assert sum(stats.num_cancelled > 0 for stats in drafting) > 3, "traces too tame"


@pytest.mark.soak
def test_d2_d10_d11_d13_many_long_random_traces() -> None:
    for seed in (*range(60, 100), *range(1000, 4000)):
        run_random_trace(seed)
