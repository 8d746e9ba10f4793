"""The trace of conversations, and what its judges find: they must agree, with each other and the engine."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from paths import REPOSITORY

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    prefix_trace: Any = importlib.import_module("prefix_trace")


def test_the_trace_has_the_hits_that_it_is_meant_to_have() -> None:
    trace = prefix_trace.conversations(seed=0, num_requests=300)
    assert trace == prefix_trace.conversations(seed=0, num_requests=300)
    wanted = sum(len(request.hashes) for request in trace)
    assert 0.3 <= prefix_trace.ideal_hits(trace) / wanted <= 0.65


@pytest.mark.parametrize("num_blocks", [160, 400, 100_000])
def test_h10_the_engine_finds_what_lru_finds_and_nobody_more_than_the_future(num_blocks: int) -> None:
    trace = prefix_trace.conversations(seed=1, num_requests=120)
    served = prefix_trace.served_hits(trace, num_blocks)
    assert served == prefix_trace.lru_hits(trace, num_blocks)
    best = prefix_trace.belady_hits(trace, num_blocks)
    assert sum(served) <= best <= prefix_trace.ideal_hits(trace)
    assert (sum(served) < best) == (num_blocks < 100_000)


def test_the_future_knows_what_to_keep() -> None:
    """a b a with room for one: LRU gives a up, who knows the future never lets it go for b."""
    block = prefix_trace.BLOCK
    a, b = ([number] * (block + 1) for number in (1, 2))
    trace = [prefix_trace.traced(prompt, [3]) for prompt in (a, b, a)]
    assert prefix_trace.lru_hits(trace, 2) == [0, 0, 0]
    assert prefix_trace.lru_hits(trace, 3) == [0, 0, 1]
    assert prefix_trace.belady_hits(trace, 3) == 1
