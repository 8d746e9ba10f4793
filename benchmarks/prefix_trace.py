"""Conversations with shared beginnings, and how many of their blocks a cache of some size would find.

Three answers for the same trace, one request after the other: of the engine's own scheduler over ranks that
compute nothing; of a plain LRU that is written down here once more, as its definition says; and of who knows
the future (Belady), which nothing can beat. Used by `prefix_cache.py`, and tested with it.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.batch import StepResult
from penstock.config.engine import SchedulerConfig
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_hash import block_hashes, root_hash
from penstock.kvcache.block_pool import BlockPool
from penstock.kvcache.eviction import eviction_order
from penstock.kvcache.prefix_cache import PrefixCache
from penstock.request import GenerationRequest, SamplingParams
from penstock.scheduler.scheduler import Scheduler

BLOCK = 16
MAX_LEN = 4096


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A prompt, and the answer that the model is going to give."""

    prompt: list[int]
    answer: list[int]
    hashes: list[bytes]  # of the blocks that it could begin with: all but that of its last token
    leaves: list[bytes]  # of the blocks that are whole when it has ended

    @property
    def num_blocks(self) -> int:
        """That it holds in the end; the last token that was sampled is never run."""
        return math.ceil((len(self.prompt) + len(self.answer) - 1) / BLOCK)


def traced(prompt: list[int], answer: list[int]) -> TracedRequest:
    run = [*prompt, *answer[:-1]]
    leaves = block_hashes(root_hash(), run, BLOCK)
    return TracedRequest(prompt, answer, leaves[: (len(prompt) - 1) // BLOCK], leaves)


def conversations(
    seed: int, num_requests: int, *, num_systems: int = 48, num_alive: int = 40, zipf: float = 1.1
) -> list[TracedRequest]:
    """Turns of conversations that run side by side.

    Args:
        num_systems: beginnings (system prompts) that conversations share; the k-th is begun with k ** -zipf
            as often as the first.
        num_alive: conversations at a time; each has two turns on average, and another one takes its place.
    """
    source = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [source.randrange(1 << 15) for _ in range(count)]

    def length(middle: int) -> int:
        return max(1, round(source.lognormvariate(math.log(middle), 0.7)))

    systems = [ids(min(length(120), 1024)) for _ in range(num_systems)]
    weights = [(rank + 1) ** -zipf for rank in range(num_systems)]
    alive: list[list[int]] = []
    trace: list[TracedRequest] = []
    while len(trace) < num_requests:
        if len(alive) < num_alive:
            alive.append(list(source.choices(systems, weights)[0]))
        history = source.choice(alive)
        history += ids(min(length(180), 512))
        answer = ids(min(length(50), 512))
        trace.append(traced(list(history), answer))
        history += answer
        if source.random() < 1 / 2 or len(history) > MAX_LEN // 2:
            alive.remove(history)
    return trace


def ideal_hits(trace: Sequence[TracedRequest]) -> int:
    """Blocks that a cache without end would find."""
    seen: set[bytes] = set()
    found = 0
    for request in trace:
        found += _beginning(request.hashes, seen.__contains__)
        seen.update(request.leaves)
    return found


def lru_hits(trace: Sequence[TracedRequest], num_blocks: int) -> list[int]:
    """Blocks that each request finds if the block let go longest ago is given up first, and of those that one
    request lets go at once the last."""
    idle: OrderedDict[bytes, None] = OrderedDict()
    hits = []
    for request in trace:
        found = _beginning(request.hashes, idle.__contains__)
        hits.append(found)
        for name in request.hashes[:found]:
            del idle[name]
        while len(idle) + request.num_blocks > num_blocks:
            idle.popitem(last=False)
        for name in reversed(request.leaves):
            idle.pop(name, None)
            idle[name] = None
    return hits


def belady_hits(trace: Sequence[TracedRequest], num_blocks: int) -> int:
    """Blocks found if the block is given up whose next use is farthest; of those that are equally far, the
    deepest."""
    uses: dict[bytes, deque[int]] = defaultdict(deque)
    for number, request in enumerate(trace):
        for name in request.hashes:
            uses[name].append(number)
    idle: dict[bytes, tuple[int, int]] = {}
    heap: list[tuple[int, int, bytes]] = []
    hits = 0
    for request in trace:
        found = _beginning(request.hashes, idle.__contains__)
        hits += found
        for name in request.hashes:
            uses[name].popleft()
        for name in request.hashes[:found]:
            del idle[name]
        while len(idle) + request.num_blocks > num_blocks:
            far, depth, name = heapq.heappop(heap)
            if idle.get(name) == (far, depth):
                del idle[name]
        for depth, name in enumerate(request.leaves):
            worth = (-uses[name][0] if uses[name] else -len(trace) - 1, -depth)
            idle[name] = worth
            heapq.heappush(heap, (*worth, name))
    return hits


def served_hits(trace: Sequence[TracedRequest], num_blocks: int) -> list[int]:
    """Blocks that each request finds in the engine's scheduler."""
    cache = PrefixCache(num_blocks, eviction_order("lru"))
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=MAX_LEN, prefill_chunk=MAX_LEN),
        BlockAllocator(BlockPool(num_blocks, cache), BLOCK),
        num_stages=1,
        max_model_len=MAX_LEN,
        eos_token_ids=[],
        seed=0,
        clock=lambda: 0.0,
    )
    hits, step = [], 0
    for number, request in enumerate(trace):
        sampling = SamplingParams(temperature=0.0, max_tokens=len(request.answer), ignore_eos=True)
        scheduler.add_request(
            GenerationRequest(request_id=str(number), prompt_token_ids=request.prompt, sampling=sampling)
        )
        answer = iter(request.answer)
        while scheduler.has_requests:
            plan = scheduler.plan_step(step)
            assert plan is not None
            tokens = [[next(answer)] for _ in plan.sampled_rows]
            updates = scheduler.settle_result(plan, StepResult(step_id=step, token_ids=tokens))
            step += 1
            hits += [
                update.num_cached_tokens // BLOCK for update in updates if update.queue_seconds is not None
            ]
    return hits


def _beginning(names: Sequence[bytes], is_there: Callable[[bytes], bool]) -> int:
    """How many of the first ones are there."""
    return next((count for count, name in enumerate(names) if not is_there(name)), len(names))
