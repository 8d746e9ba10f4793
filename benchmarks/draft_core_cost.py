"""What drafts cost the engine core: CPU time of the scheduler a step and a token, with and without.

    python benchmarks/draft_core_cost.py [--rows 32] [--steps 200] [--rounds 15]

A scheduler without stages plans steps of so many requests and settles results that are made up: each request
says a piece of text again and again, one that never repeats, or one whose words are as frequent as in prose,
in no order, so that there is always something to guess and it is hardly ever right. Without speculation, and
with the suffix drafter; there drafts cost a stage as much as tokens ("dear", so that many rows send none), or
nothing ("free"). Prints Markdown for docs/perf-log.md.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Sequence
from random import Random

from peers.report import markdown
from ratios import in_turns, shown

from penstock.batch import ScheduledBatch, StepResult
from penstock.config.engine import SchedulerConfig
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_pool import BlockPool
from penstock.request import GenerationRequest, SamplingParams
from penstock.scheduler.cost_model import CostModel, StepSample, StepShape
from penstock.scheduler.pacing import FixedDepth
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.windows import DraftWindows, NoWindows
from penstock.speculation.guard import GuardedDrafter
from penstock.speculation.suffix import SuffixDrafter

VOCAB_SIZE, PIECE, PROMPT_LEN, LENGTH = 50_000, 24, 96, 1 << 15
MOST_DRAFTS = 8
TEXTS = ("new", "prose", "repeats")


class Rig:
    """One scheduler with its requests.

    Args:
        text: one of `TEXTS`.
        costs: of the stage; None: so much a token.
    """

    def __init__(self, num_rows: int, *, drafts: bool, text: str, costs: CostModel | None) -> None:
        allocator = BlockAllocator(BlockPool(1 << 16), 32)
        depth = FixedDepth(1)
        windows = NoWindows()
        if drafts:
            drafter = GuardedDrafter(SuffixDrafter(), VOCAB_SIZE, time.monotonic)
            windows = DraftWindows(
                drafter,
                allocator,
                costs,
                most=MOST_DRAFTS,
                max_tokens=2048,
                depth=depth,
                clock=time.monotonic,
            )
        self._scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=8192),
            allocator,
            num_stages=1,
            max_model_len=1 << 16,
            eos_token_ids=(),
            seed=0,
            clock=time.monotonic,
            depth=depth,
            windows=windows,
        )
        random = Random(1)
        self._texts = []
        for number in range(num_rows):
            self._texts.append(said(text, random))
            sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH)
            prompt = self._texts[number][:PROMPT_LEN]
            self._scheduler.add_request(
                GenerationRequest(request_id=f"{number}", prompt_token_ids=prompt, sampling=sampling)
            )
        self._lengths = [PROMPT_LEN] * num_rows
        self._step = 0
        while self._scheduler._placement.has_prompts or self._step == 0:
            self.step()

    def step(self) -> int:
        """Plan a step and settle it; the tokens that it has yielded."""
        plan = self._scheduler.plan_step(self._step)
        assert plan is not None
        self._step += 1
        result = self._result(plan)
        self._scheduler.settle_result(plan, result)
        return sum(map(len, result.token_ids))

    def _result(self, plan: ScheduledBatch) -> StepResult:
        token_ids, rejected = [], []
        for index, row in enumerate(plan.rows):
            if plan.need_sampled[index]:
                drafts = plan.drafts.get(index, [])
                ids = self._said(row, drafts)
                token_ids.append(ids)
                rejected.append(1 + len(drafts) - len(ids))
        return StepResult(step_id=plan.step_id, token_ids=token_ids, num_rejected=rejected)

    def _said(self, row: int, drafts: Sequence[int]) -> list[int]:
        text, ids = self._texts[row], []
        for draft in (*drafts, -1):
            ids.append(text[self._lengths[row]])
            self._lengths[row] += 1
            if ids[-1] != draft:
                break
        return ids


def said(text: str, random: Random) -> list[int]:
    """What one request says."""
    if text == "prose":  # Zipf's law
        ids = range(VOCAB_SIZE)
        return random.choices(ids, cum_weights=list(itertools.accumulate(1 / (1 + x) for x in ids)), k=LENGTH)
    num_fresh = PIECE if text == "repeats" else LENGTH
    piece = [random.randrange(VOCAB_SIZE) for _ in range(num_fresh)]
    return (piece * -(-LENGTH // num_fresh))[:LENGTH]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rows = []
    for num_rows in map(int, options.rows.split(",")):
        for text, is_free in itertools.product(TEXTS, (False, True)):
            rows.append(compared(num_rows, options, text=text, is_free=is_free))
    header = [
        "rows",
        "text",
        "drafts",
        "off, us a step",
        "suffix",
        "more",
        "tokens a step",
        "us a token, suffix/off",
    ]
    print(markdown(header, rows))


def free_drafts() -> CostModel:
    """Steps of any size take the same."""
    model = CostModel(1)
    shapes = [StepShape(count, 40 * count, count) for count in (1, 2, 4, 8, 16, 32, 64, 256)]
    for is_alone in (False, True):
        model.learn(0, [StepSample(shape, 0.02, 1e-5, 1e-5) for shape in shapes], alone=is_alone)
    return model


def compared(num_rows: int, options: argparse.Namespace, *, text: str, is_free: bool) -> list[str]:
    """A line of the table."""

    def take(drafts: bool) -> tuple[float, float]:
        costs = free_drafts() if is_free else None
        rig = Rig(num_rows, drafts=drafts, text=text, costs=costs)
        for _ in range(10):
            rig.step()
        gc.collect()
        began, tokens = time.process_time(), sum(rig.step() for _ in range(options.steps))
        return (time.process_time() - began) / options.steps * 1e6, tokens / options.steps

    rounds = in_turns((False, True), take, options.rounds, warm_up=1)
    off, on = (statistics.median(of_round[which][0] for of_round in rounds) for which in (0, 1))
    per_token = [(b[0] / b[1]) / (a[0] / a[1]) for a, b in rounds]
    return [
        str(num_rows),
        text,
        "free" if is_free else "dear",
        f"{off:.0f}",
        f"{on:.0f}",
        f"{on - off:.0f}",
        f"{rounds[0][1][1]:.1f}",
        shown(per_token),
    ]


if __name__ == "__main__":
    main()
