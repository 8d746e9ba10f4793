"""Conversations over two levels, pool and store, with a restart between: blocks found against an LRU of both.

    python benchmarks/tiered_trace.py [--requests 400] [--seed 0]

The first half of a trace (`prefix_trace.conversations`) is served, then the pool is lost and the store is
kept, then comes the second half. Two answers, request by request: of the engine's scheduler, storage tier,
catalogue and a store with a quota, over ranks that copy at once and compute nothing; and of the rules of
docs/kv-cache.md, written down once more over two plain queues. Beside them what who knows the future (Belady)
would find in one cache as large as both, without a restart. Prints Markdown for docs/perf-log.md; exit code 1
if the two differ.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prefix_trace import BLOCK, MAX_LEN, TracedRequest, belady_hits, conversations, ideal_hits

from penstock.batch import NO_STORE_USE, OrderResult, StepResult, TierOrder
from penstock.config.engine import SchedulerConfig
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_pool import BlockPool
from penstock.kvcache.eviction import eviction_order
from penstock.kvcache.hosts_catalogue import HostsCatalogue
from penstock.kvcache.prefix_cache import PrefixCache
from penstock.kvcache.storage_tier import StorageTier, TierPolicy
from penstock.kvstore.catalogue import StoreCatalogue
from penstock.kvstore.found import Found
from penstock.kvstore.guard import GuardedStore
from penstock.kvstore.layer_share import WHOLE, LayerShare
from penstock.kvstore.names import KEY_BYTES, record_key
from penstock.kvstore.record import overhead_bytes
from penstock.kvstore.store import KVStore
from penstock.request import GenerationRequest, SamplingParams
from penstock.scheduler.scheduler import Scheduler

SPACE = bytes(16)
PART_BYTES = 10_000  # that a rank keeps of a block
ENTRY_SIZE = KEY_BYTES + overhead_bytes(bytes(KEY_BYTES))  # key and record, in the store
PART_SIZE = ENTRY_SIZE + PART_BYTES
BLOCK_SIZE = PART_SIZE + ENTRY_SIZE
TRACES: list[dict[str, Any]] = [  # from much that comes again to little
    {"num_systems": 12, "zipf": 1.4, "num_alive": 20},
    {},
    {"num_systems": 2000, "zipf": 0.0, "num_alive": 400},
]


class Hits(NamedTuple):
    """Blocks of a request that were found in the pool, and those that came from the store."""

    pool: int
    store: int


# --- the engine -------------------------------------------------------------------------------------


class BoundedStore:
    """A `KVStore` that gives up what was used longest ago, by the rules of `LmdbStore`, to the byte."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._records: OrderedDict[bytes, bytes] = OrderedDict()

    def __iter__(self) -> Iterator[bytes]:
        """Keys, that of the oldest record first."""
        return iter(self._records)

    def scan(self, prefix: bytes = b"") -> Iterator[list[Found]]:
        yield [Found(key, len(r)) for key, r in self._records.items() if key.startswith(prefix)]

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.used(keys)
        return [self._records.get(key) for key in keys]

    def used(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self._records:
                self._records.move_to_end(key)

    def put(self, records: Mapping[bytes, bytes]) -> None:
        for key in reversed(list(records)):
            self.delete([key])
            self._num_bytes += len(key) + len(records[key])
            while self._num_bytes > self._max_bytes:
                self.delete([next(iter(self._records))])
            self._records[key] = records[key]

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            record = self._records.pop(key, None)
            self._num_bytes -= 0 if record is None else len(key) + len(record)

    def close(self) -> None:
        pass


class PromptCatalogue(StoreCatalogue):
    """Has answered when it was asked."""

    def look_up(self, ticket: int, names: Sequence[bytes], share: LayerShare = WHOLE) -> None:
        super().look_up(ticket, names, share)
        self._wait()

    def enter(self, names: Sequence[bytes], share: LayerShare = WHOLE) -> None:
        super().enter(names, share)
        self._wait()

    def strike(self, names: Sequence[bytes]) -> None:
        super().strike(names)
        self._wait()

    def _wait(self) -> None:
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()


class TieredEngine:
    """The core's part of an engine, and ranks that do what they are told at once; one request at a time."""

    def __init__(self, num_blocks: int, store: KVStore) -> None:
        self._store = GuardedStore(store)
        cache = PrefixCache(num_blocks, eviction_order("lru"))
        self._allocator = BlockAllocator(BlockPool(num_blocks, cache), BLOCK)
        clock = lambda: 0.0  # noqa: E731
        self.catalogue = PromptCatalogue(self._store, SPACE)
        self._scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=MAX_LEN, prefill_chunk=MAX_LEN),
            self._allocator,
            num_stages=1,
            max_model_len=MAX_LEN,
            eos_token_ids=[],
            seed=0,
            clock=clock,
            tier=StorageTier(self._allocator, HostsCatalogue(self.catalogue), clock, TierPolicy()),
        )
        self._step = self._num_requests = 0

    def serve(self, request: TracedRequest) -> Hits:
        in_pool = len(self._allocator.find(request.hashes))
        sampling = SamplingParams(temperature=0.0, max_tokens=len(request.answer), ignore_eos=True)
        self._num_requests += 1
        self._scheduler.add_request(
            GenerationRequest(
                request_id=str(self._num_requests), prompt_token_ids=request.prompt, sampling=sampling
            )
        )
        answer, found = iter(request.answer), 0
        self._scheduler.settle_orders([], NO_STORE_USE)
        while self._scheduler.has_requests or self._scheduler.prefixes.has_orders:
            plan = self._scheduler.plan_step(self._step)
            assert plan is not None
            have_come = self._carry_out(plan.orders) or not plan.awaited  # else the result is dropped
            tokens = [[next(answer) if have_come else 0] for _ in plan.sampled_rows]
            while (
                self._scheduler.prefixes.has_orders and plan.rows
            ):  # what it has named is stored before it ends
                self._carry_out(self._scheduler.prefixes.take_orders())
            updates = self._scheduler.settle_result(plan, StepResult(step_id=self._step, token_ids=tokens))
            self._step += 1
            found += sum(u.num_cached_tokens // BLOCK for u in updates if u.queue_seconds is not None)
        return Hits(min(in_pool, found), max(0, found - in_pool))

    def _carry_out(self, orders: Sequence[TierOrder]) -> bool:
        """Whether all that was to be loaded was."""
        keys = {order: record_key(SPACE, order.name, 0, 0) for order in orders}
        loads = [order for order in orders if order.is_load]
        # One by one, as layers come, which leaves the last block used last; what was used together is told.
        records = [self._store.get([keys[order]])[0] for order in loads]
        come = zip(loads, records, strict=True)
        self._store.used([keys[order] for order, record in come if record is not None])
        done: list[OrderResult] = [
            OrderResult(order.order, "failed" if record is None else "done")
            for order, record in zip(loads, records, strict=True)
        ]
        stores = [order for order in orders if not order.is_load]
        if stores:
            self._store.put({keys[order]: order.name[:1] * PART_BYTES for order in stores})
        finished: list[OrderResult] = [*done, *(OrderResult(order.order, "done") for order in stores)]
        self._scheduler.settle_orders(finished, NO_STORE_USE)
        return all(result.status == "done" for result in done)


def served_hits(
    trace: Sequence[TracedRequest], num_blocks: int, open_store: Callable[[], KVStore]
) -> list[Hits]:
    """What each request finds, if between the halves the engine is started anew over what is stored."""
    hits = []
    for half in halves(trace):
        engine = TieredEngine(num_blocks, open_store())
        hits += [engine.serve(request) for request in half]
        engine.catalogue.close()
    return hits


def halves(trace: Sequence[TracedRequest]) -> tuple[Sequence[TracedRequest], Sequence[TracedRequest]]:
    middle = len(trace) // 2
    return trace[:middle], trace[middle:]


# --- the rules once more ----------------------------------------------------------------------------


class Queue:
    """Things by when they were used last; the oldest go when there is no room for a new one."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sizes: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        self.taken = 0

    def use(self, thing: tuple[str, bytes], size: int = 0) -> None:
        """It is the newest; one that has a size is new, and room is made for it."""
        if size:
            self.drop(thing)
            self.make_room(size)
            self.taken += size
            self.sizes[thing] = size
        elif thing in self.sizes:
            self.sizes.move_to_end(thing)

    def make_room(self, size: int) -> None:
        while self.taken + size > self.room:
            self.drop(next(iter(self.sizes)))

    def drop(self, thing: tuple[str, bytes]) -> None:
        self.taken -= self.sizes.pop(thing, 0)

    def settle(self) -> None:
        """What was put in one go is there."""


@dataclass
class Rules:
    """Of a pool of blocks and a store of bytes.

    A request first asks the pool, then, for what lies behind, the store. What is there is loaded if it finds
    room, what the request has found in the pool staying; then it runs. Its blocks are stored when their plan
    is issued, unless this engine knows that they were: it believes that until the store misses one. A hit in
    the pool is no use of what the store has.
    """

    pool: Queue
    store: Queue
    believed: set[bytes]

    def serve(self, request: TracedRequest) -> Hits:
        in_pool = self._in_pool(request.hashes)
        self._load(request.hashes, in_pool)
        found = self._in_pool(request.hashes)
        for name in request.hashes[:found]:  # held: neither idle nor to be given up
            self.pool.drop(("block", name))
        self.pool.make_room(request.num_blocks)
        prompt = len(request.prompt) // BLOCK
        again = [name for name in request.hashes[:found] if name not in self.believed]
        size = min(256, max(1, self.pool.room // 4))  # that are copied at once
        self._save(again[:size])
        rest = again[size:] + [name for name in request.leaves[found:prompt] if name not in self.believed]
        for first in range(0, len(rest), size):
            self._save(rest[first : first + size])
        for name in request.leaves[prompt:]:  # each when the answer has come so far
            self._save([name] if name not in self.believed else [])
        self._let_go(request.leaves)
        return Hits(min(in_pool, found), max(0, found - in_pool))

    def _in_pool(self, names: Sequence[bytes]) -> int:
        return _beginning(names, lambda name: ("block", name) in self.pool.sizes)

    def _load(self, names: Sequence[bytes], in_pool: int) -> None:
        missing, found = names[in_pool:], 0
        for first in range(0, len(missing), 64):  # entries that are asked for together
            some = missing[first : first + 64]
            there = [name for name in some if ("entry", name) in self.store.sizes]
            for name in reversed(there):
                self.store.use(("entry", name))
            found += _beginning(some, there.__contains__)
            if len(there) < len(some):
                break
        self.believed.difference_update(missing[found:])
        held = names[:in_pool]
        for name in held:
            self.pool.drop(("block", name))
        loaded = missing[: min(found, self.pool.room - len(held))]
        self.pool.make_room(len(held) + len(loaded))
        self.believed.update(missing[:found])
        good = [name for name in loaded if ("part", name) in self.store.sizes]
        for name in reversed(good):
            self.store.use(("part", name))
        for name in set(loaded) - set(good):
            self.store.drop(("entry", name))
            self.believed.discard(name)
        self._let_go([*held, *loaded[: _beginning(loaded, good.__contains__)]])

    def _save(self, names: Sequence[bytes]) -> None:
        if not names:
            return
        for kind, size in (("part", PART_SIZE), ("entry", ENTRY_SIZE)):
            for name in reversed(names):
                self.store.use((kind, name), size)
            self.store.settle()
        self.believed.update(names)

    def _let_go(self, names: Iterable[bytes]) -> None:
        for name in reversed(list(names)):
            self.pool.use(("block", name), 1)


def lru_hits(trace: Sequence[TracedRequest], num_blocks: int, store: Queue) -> list[Hits]:
    """What each request finds by the rules, the pool being empty at the start of the second half."""
    hits = []
    for half in halves(trace):
        rules = Rules(Queue(num_blocks), store, set())
        hits += [rules.serve(request) for request in half]
    return hits


def _beginning(names: Sequence[bytes], is_there: Callable[[bytes], bool]) -> int:
    return next((count for count, name in enumerate(names) if not is_there(name)), len(names))


# --- the command ------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    same = True
    for settings in TRACES:
        same &= print_hits(conversations(options.seed, options.requests, **settings))
    print(f"\nrequest by request {'the same' if same else 'NOT THE SAME'} as the rules")
    return 0 if same else 1


def print_hits(trace: Sequence[TracedRequest]) -> bool:
    wanted, ideal = sum(len(request.hashes) for request in trace), ideal_hits(trace)
    print(f"\n{wanted:,} blocks wanted, {ideal / wanted:.1%} of them seen before\n")
    print("| pool | store | found: pool, store | second half: pool, store | by the rules | the best |")
    print("|---|---|---|---|---|---|")
    same = True
    for num_blocks, num_stored in ((256, 256), (256, 1024), (256, 4096), (1024, 1024), (1024, 16384)):
        store = BoundedStore(num_stored * BLOCK_SIZE)
        served = served_hits(trace, num_blocks, lambda: store)  # noqa: B023
        rules = lru_hits(trace, num_blocks, Queue(num_stored * BLOCK_SIZE))
        best = belady_hits(trace, num_blocks + num_stored)
        same &= served == rules
        second = served[len(trace) // 2 :]
        cells = [
            *(f"{sum(h.pool for h in some):,}, {sum(h.store for h in some):,}" for some in (served, second)),
            f"{sum(map(sum, rules)) / wanted:.1%}",
            f"{best / wanted:.1%}",
        ]
        print(f"| {num_blocks} | {num_stored} | {' | '.join(cells)} |")
    return same


if __name__ == "__main__":
    sys.exit(main())
