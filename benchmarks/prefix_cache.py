"""The prefix cache: time to the first token with and without it, what an index costs, hits against the best.

    python benchmarks/prefix_cache.py MODEL [--prefix 2048] [--rounds 5]

Four parts. Time to the first token of prompts that begin alike, against fresh ones of the same length, taken
in turns, and of prompts that another engine has put into a store. Then prompts that go on differently far
behind what is in the store, against the longer of loading that and computing the rest: what an engine that
loads one layer while it computes another comes close to. Then the index by itself, as the scheduler
uses it: what it takes to look up a long prompt in a full tree, its memory, and what a step pays where nothing
is ever found. Then a trace of conversations, run one request after the other through the real scheduler over
ranks that compute nothing, for caches of several sizes: blocks that were found, those that a plain LRU over
whole chains finds, which must be the same, and those that who knows the future would have found. Prints
Markdown for docs/perf-log.md; exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence

from prefix_trace import belady_hits, conversations, ideal_hits, lru_hits, served_hits

from penstock import LLM, SamplingParams
from penstock.batch import GREEDY
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_hash import block_hashes, root_hash
from penstock.kvcache.block_pool import BlockPool
from penstock.kvcache.eviction import eviction_order
from penstock.kvcache.prefix_cache import PrefixCache
from penstock.kvcache.sessions import Sessions
from penstock.kvcache.storage_tier import NoStorageTier
from penstock.scheduler.prefix_reuse import PrefixReuse
from penstock.scheduler.queues import RequestQueues, RequestState
from penstock.scheduler.residency_ledger import NoLedger

BLOCK = 32  # the default
LOOKUP_TOKENS, TREE_BLOCKS = 32_768, 100_000
DECODES, STEP_MS = 32, 50.0  # a step of a 0.5B model on two good cores
TAILS = (1, 16, 64, 256)  # tokens behind what is in the store; behind one nothing can overlap
BARS = {"hit": 0.05, "stored": 0.25, "overlap": 1.15, "lookup_ms": 3.0, "bytes": 350.0, "unused": 0.01}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="without it only the index and the trace")
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    rows = first_tokens(options) if options.model else []
    rows += index_costs()
    print("| | found | bar | |\n|---|---|---|---|")
    for what, found, bar, met in rows:
        print(f"| {what} | {found} | {bar} | {'met' if met else 'missed'} |")
    same = print_hits()
    return 0 if same and all(met for *_, met in rows) else 1


def first_tokens(options: argparse.Namespace) -> list[tuple[str, str, str, bool]]:
    source = random.Random(0)
    fresh = lambda count: [source.randrange(1000, 90_000) for _ in range(count)]  # noqa: E731
    tail, one = 16, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    shared = fresh(options.prefix)
    with LLM(
        options.model,
        dtype="bfloat16",
        threads_per_rank=options.threads,
        max_model_len=options.prefix + 2 * tail,
        max_num_seqs=4,
    ) as llm:

        def seconds(prompt: list[int]) -> float:
            began = time.perf_counter()
            llm.generate({"prompt_token_ids": prompt}, one)
            return time.perf_counter() - began

        seconds([*shared, *fresh(tail)])
        cold, warm = [], []
        for _ in range(options.rounds):
            cold.append(seconds(fresh(options.prefix + tail)))
            warm.append(seconds([*shared, *fresh(tail)]))
    rows = [first_token_row("in the cache", warm, cold, BARS["hit"], options)]
    with tempfile.TemporaryDirectory() as store:
        stored = stored_first_tokens(options, store, tail)
        rows.append(first_token_row("in the store", stored, cold, BARS["stored"], options))
        return [*rows, *overlap_rows(options, store)]


def first_token_row(
    where: str, warm: list[float], cold: list[float], bar: float, options: argparse.Namespace
) -> tuple[str, str, str, bool]:
    ratio = statistics.median(warm) / statistics.median(cold)
    spread = f"{1000 * statistics.median(warm):.0f} of {1000 * statistics.median(cold):.0f} ms"
    name = f"first token behind {options.prefix} tokens {where}, of one without"
    return name, f"{ratio:.1%} ({spread})", f"{bar:.0%}", ratio <= bar


def stored_first_tokens(options: argparse.Namespace, store: str, tail: int) -> list[float]:
    """Seconds to the first token of prompts whose beginning another engine has stored."""
    source = random.Random(2)
    prompts = [
        [source.randrange(1000, 90_000) for _ in range(options.prefix + tail)] for _ in range(options.rounds)
    ]
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    settings = {
        "dtype": "bfloat16",
        "threads_per_rank": options.threads,
        "max_model_len": options.prefix + 2 * tail,
        "max_num_seqs": 4,
        "kv_store": store,
        "kv_store_patience_s": 60.0,
    }
    seconds = []
    with LLM(options.model, **settings) as llm:
        for prompt in prompts:
            llm.generate({"prompt_token_ids": prompt}, one)
        while (stats := llm.stats()) is None or stats.store.stored_blocks < len(prompts) * (
            options.prefix // BLOCK
        ):
            llm.generate({"prompt_token_ids": [5]}, one)
    with LLM(options.model, **settings) as llm:
        llm.generate({"prompt_token_ids": [5]}, one)
        for prompt in prompts:
            began = time.perf_counter()
            (output,) = llm.generate({"prompt_token_ids": prompt}, one)
            seconds.append(time.perf_counter() - began)
            assert output.num_cached_tokens >= options.prefix, output.num_cached_tokens
    return seconds


def overlap_rows(options: argparse.Namespace, store: str) -> list[tuple[str, str, str, bool]]:
    """First tokens behind a beginning that is loaded, and behind the same one once it is in the pool, in
    turns. The pool has no room for all beginnings, so that each is loaded anew."""
    source, one = random.Random(3), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    fresh = lambda count: [source.randrange(1000, 90_000) for _ in range(count)]  # noqa: E731
    beginnings = [fresh(options.prefix) for _ in range(3)]
    num_blocks = options.prefix // BLOCK
    settings = {
        "dtype": "bfloat16",
        "threads_per_rank": options.threads,
        "max_model_len": options.prefix + 2 * TAILS[-1],
        "max_num_seqs": 4,
        "kv_store": store,
        "kv_store_patience_s": 60.0,
        "num_blocks": 2 * num_blocks - 8,
    }
    loaded: dict[int, list[float]] = {tail: [] for tail in TAILS}
    there: dict[int, list[float]] = {tail: [] for tail in TAILS}
    with LLM(options.model, **settings) as llm:

        def seconds(beginning: list[int], tail: int) -> float:
            began = time.perf_counter()
            (output,) = llm.generate({"prompt_token_ids": [*beginning, *fresh(tail)]}, one)
            took = time.perf_counter() - began
            assert output.num_cached_tokens >= options.prefix or not is_stored, output.num_cached_tokens
            return took

        is_stored = False
        for beginning in beginnings:
            seconds(beginning, 1)
        while (stats := llm.stats()) is None or stats.store.stored_blocks < len(beginnings) * num_blocks:
            llm.generate({"prompt_token_ids": [5]}, one)
        is_stored = True
        seconds(beginnings[0], 1)  # what the store takes is known from now on
        for _ in range(options.rounds):
            for tail in TAILS:
                for beginning in (*beginnings[1:], beginnings[0]):
                    loaded[tail].append(seconds(beginning, tail))
                    there[tail].append(seconds(beginning, tail))
    copy = statistics.median(loaded[1]) - statistics.median(there[1])
    rows = []
    for tail in TAILS[1:]:
        took, compute = statistics.median(loaded[tail]), statistics.median(there[tail])
        ratio = took / max(copy, compute)
        rows.append(
            (
                f"first token {tail} tokens behind {options.prefix} in the store, of the longer of loading "
                f"({1000 * copy:.0f} ms) and computing ({1000 * compute:.0f} ms)",
                f"{ratio:.2f} ({1000 * took:.0f} ms)",
                f"{BARS['overlap']:g}",
                ratio <= BARS["overlap"],
            )
        )
    return rows


def index_costs() -> list[tuple[str, str, str, bool]]:
    source = random.Random(1)
    gc.collect()
    tracemalloc.start()
    pool = BlockPool(TREE_BLOCKS, PrefixCache(TREE_BLOCKS, eviction_order("lru")))
    allocator = BlockAllocator(pool, BLOCK)
    root = root_hash()
    prompts = [
        [source.randrange(1 << 17) for _ in range(LOOKUP_TOKENS)]
        for _ in range(TREE_BLOCKS * BLOCK // LOOKUP_TOKENS)
    ]
    before = tracemalloc.get_traced_memory()[0] - 8 * TREE_BLOCKS  # the list of free blocks gets empty
    own = sum(sys.getsizeof(column) for column in (pool._holders, pool._free))
    for owner, prompt in enumerate(prompts):
        hold(allocator, owner, prompt, root)
        allocator.free(owner)
    num_bytes = (tracemalloc.get_traced_memory()[0] - before + own) / pool.cache.num_cached
    tracemalloc.stop()
    lookup = 1000 * median_seconds(lambda: allocator.find(block_hashes(root, prompts[0], BLOCK)), 15)
    unused = 1000 * unused_step() / STEP_MS
    return [
        (
            f"look-up of {LOOKUP_TOKENS:,} tokens among {TREE_BLOCKS:,} blocks, ms",
            f"{lookup:.2f}",
            f"{BARS['lookup_ms']:g}",
            lookup <= BARS["lookup_ms"],
        ),
        (
            "memory of the index, bytes a block",
            f"{num_bytes:.0f}",
            f"{BARS['bytes']:g}",
            num_bytes <= BARS["bytes"],
        ),
        (
            f"{DECODES} decodes that nothing is found for, of a step of {STEP_MS:g} ms",
            f"{unused:.2%}",
            f"{BARS['unused']:.0%}",
            unused <= BARS["unused"],
        ),
    ]


def hold(allocator: BlockAllocator, owner: int, prompt: Sequence[int], root: bytes) -> None:
    hashes = block_hashes(root, prompt, BLOCK)
    found = allocator.find(hashes)
    allocator.attach(owner, found)
    allocator.grow(owner, len(prompt))
    allocator.name(owner, len(found), hashes[len(found) :])


def unused_step() -> float:
    """Seconds that the cache adds to a step: two notes of each decode, and a new block every so often."""
    cache = PrefixCache(4096, eviction_order("lru"))
    allocator = BlockAllocator(BlockPool(4096, cache), BLOCK)
    prefixes = PrefixReuse(
        allocator,
        RequestQueues(),
        Sessions(allocator, max_sessions=1, clock=time.monotonic),
        NoStorageTier(),
        NoLedger(),
    )
    requests = [
        RequestState(
            request_id=str(number),
            arrival=number,
            arrival_time=0.0,
            prompt_len=1,
            max_len=4096,
            stop_ids=frozenset(),
            sampling=GREEDY,
            token_ids=[number],
            cache_root=root_hash(),
        )
        for number in range(DECODES)
    ]
    for request in requests:
        prefixes.attach(request, [])
        allocator.grow(request.arrival, 2048)
    steps = 1024
    began = time.perf_counter()
    for step in range(steps):
        for request in requests:
            request.num_scheduled += 1
            prefixes.note(request)
            request.token_ids.append(step)
            prefixes.note(request)
    return (time.perf_counter() - began) / steps


def median_seconds(call: Callable[[], object], count: int) -> float:
    """Of several runs."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def print_hits() -> bool:
    """Whether the engine found just what LRU finds, for every size."""
    trace = conversations(seed=0, num_requests=600)
    wanted, ideal = sum(len(request.hashes) for request in trace), ideal_hits(trace)
    print(f"\n{wanted:,} blocks wanted, {ideal / wanted:.1%} of them seen before\n")
    print("| blocks of the cache | LRU finds | the engine finds | the best, by who knows the future |")
    print("|---|---|---|---|")
    same = True
    for num_blocks in (256, 512, 1024, 4096):
        lru, served = lru_hits(trace, num_blocks), served_hits(trace, num_blocks)
        best = belady_hits(trace, num_blocks)
        same &= lru == served
        shares = (f"{sum(lru) / wanted:.1%}", f"{sum(served) / wanted:.1%}", f"{best / wanted:.1%}")
        print(f"| {num_blocks} | {shares[0]} | {shares[1]} | {shares[2]} |")
    print(f"\nrequest by request {'the same' if same else 'NOT THE SAME'} as LRU")
    return same


if __name__ == "__main__":
    sys.exit(main())
