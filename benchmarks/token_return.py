"""Deferred against lock-step token return, and equal against unequal micro-batches (row E13).

    python benchmarks/token_return.py MODEL [--batches 16,32] [--partition 16,8] [--rounds 3]

One engine with two stages of one thread, as threads of this process, in which its rules are changed between
runs: *lock-step* makes every stage wait for the samples of the step before, as engines do that broadcast them
within the step; *unequal* lets a plan take every decode that is ready. Decode rate as in `cpu_peers.py`.
Prints Markdown for docs/perf-log.md.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from peers.report import markdown
from pipeline_decode import INPUT, generate

from penstock import LLM
from penstock.scheduler.chunking import TokenBudget
from penstock.scheduler.plan_builder import PlanBuilder

OUTPUT = 96
DEFERRED, LOCK_STEP, UNEQUAL = "deferred, equal", "lock-step, equal", "deferred, unequal"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batches", default="16,32")
    parser.add_argument("--partition", default="16,8")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    rates: dict[tuple[int, str], list[float]] = defaultdict(list)
    with LLM(
        options.model,
        dtype="bfloat16",
        pipeline_parallel_size=2,
        threads_per_rank=1,
        partition=options.partition,
        micro_batches=2,
        max_num_seqs=max(batches),
        max_model_len=INPUT + OUTPUT + 1,
        speculative_method="off",
        distributed_executor_backend="inprocess",
    ) as llm:
        generate(llm, 2, 4)
        for _, batch, rule in itertools.product(
            range(options.rounds), batches, (DEFERRED, LOCK_STEP, UNEQUAL)
        ):
            with ruled_by(rule):
                first, whole = generate(llm, batch, 1), generate(llm, batch, OUTPUT)
            rates[batch, rule].append(batch * (OUTPUT - 1) / (whole - first))
    rows = []
    for (batch, rule), found in rates.items():
        middle, base = statistics.median(found), statistics.median(rates[batch, DEFERRED])
        spread = f"{min(found):.1f} to {max(found):.1f}"
        rows.append([str(batch), rule, f"{middle:.1f}", spread, f"{middle / base:.2f}"])
    print(markdown(["batch", "rule", "tokens/s", "spread", "of deferred, equal"], rows))


@contextmanager
def ruled_by(rule: str) -> Iterator[None]:
    """The engine's rules are changed within."""
    finish = PlanBuilder.finish

    def finish_in_lock_step(draft: PlanBuilder, *, consume_through: int, **others: Any) -> Any:
        return finish(draft, consume_through=draft.step_id - 1, **others)

    def take_all(budget: TokenBudget, num_decoding: int, *others: Any) -> int:
        return num_decoding

    with mock.patch.object(PlanBuilder, "finish", finish_in_lock_step if rule == LOCK_STEP else finish):
        if rule == UNEQUAL:
            with mock.patch.object(TokenBudget, "decode_quota", take_all):
                yield
        else:
            yield


if __name__ == "__main__":
    main()
