"""Plans made by hand, a model that is arithmetic, and a pipe of threads: what tests of the stages share.

`ArithmeticModel` reads the whole context back out of the KV storage at each stage and adds it up, so that a
wrong slot, block table, position, row or input id anywhere changes the sampled ids; `arithmetic_tokens` is
its oracle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from penstock.attention.metadata import AttentionMetadata, LayerKV
from penstock.batch import KNOWN, NewRow, RewoundRow, RowSampling, ScheduledBatch, StepResult
from penstock.kernels.candidates import HeadOutput, HeadRequest, head_output_of
from penstock.models.intermediate import IntermediateTensors
from penstock.pipeline.decision_log import DecisionLog

VOCAB = 97
GREEDY = RowSampling(0.0, 0, 1.0, 0.0, 0, 0, [], -1)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One row's share of a hand-made plan."""

    row: int
    num_tokens: int = 1
    start: int
    blocks: Sequence[int] = ()
    sampled: bool = True
    token_from: int = KNOWN
    drafts: Sequence[int] = ()


def make_plan(
    step_id: int,
    parts: Sequence[Part] = (),
    *,
    new_rows: Sequence[NewRow] = (),
    freed_rows: Sequence[int] = (),
    rewound: Sequence[RewoundRow] = (),
    consume_through: int = -1,
    epoch: int = 0,
) -> ScheduledBatch:
    """A plan, sealed as the first of its epoch."""
    return DecisionLog(epoch, step_id).seal(
        ScheduledBatch(
            step_id=step_id,
            epoch=epoch,
            rows=[part.row for part in parts],
            num_tokens=[part.num_tokens for part in parts],
            start_positions=[part.start for part in parts],
            new_blocks=[list(part.blocks) for part in parts],
            need_sampled=[part.sampled for part in parts],
            token_from=[part.token_from for part in parts],
            consume_through=max([consume_through, *(part.token_from for part in parts)]),
            new_rows=list(new_rows),
            freed_rows=list(freed_rows),
            rewound=list(rewound),
            drafts={index: list(part.drafts) for index, part in enumerate(parts) if part.drafts},
        )
    )


def new_row(
    row: int, token_ids: Sequence[int], *, generation: int = 0, prompt_len: int | None = None, name: str = ""
) -> NewRow:
    """A greedy request that enters a row."""
    known = len(token_ids) if prompt_len is None else prompt_len
    return NewRow(row, generation, name or f"request-{row}-{generation}", known, list(token_ids), GREEDY)


class ArithmeticModel:
    """One stage with one "layer" of one KV head of width one; the hidden width is 2: token id, running
    sum."""

    def embed(self, input_ids: Tensor) -> IntermediateTensors:
        hidden = torch.stack([input_ids.float(), torch.zeros(len(input_ids))], dim=1)
        return IntermediateTensors({"hidden_states": hidden, "residual": torch.zeros_like(hidden)})

    def forward(
        self,
        tensors: IntermediateTensors,
        positions: Tensor,
        kv: Sequence[LayerKV],
        metadata: AttentionMetadata,
        before_layer: object = None,
    ) -> IntermediateTensors:
        hidden = tensors["hidden_states"].clone()
        keys = kv[0].key
        keys[metadata.slot_mapping, 0, 0] = hidden[:, 0]
        for row, table in enumerate(metadata.block_tables.tolist()):
            first, end = metadata.query_starts[row], metadata.query_starts[row + 1]
            assert end == first or int(positions[end - 1]) == metadata.seq_lens[row] - 1
            for token in range(first, end):
                position = torch.arange(int(positions[token]) + 1)
                block = torch.tensor(table)[position // metadata.block_size]
                context = keys[block * metadata.block_size + position % metadata.block_size, 0, 0]
                hidden[token, 1] += ((position + 1) * context).sum()
        return IntermediateTensors({"hidden_states": hidden, "residual": tensors["residual"]})

    def compute_logits(self, tensors: IntermediateTensors, indices: Tensor) -> Tensor:
        logits = torch.zeros(len(indices), VOCAB)
        logits[torch.arange(len(indices)), (tensors["hidden_states"][indices, 1].long() + 1) % VOCAB] = 1.0
        return logits

    def final_states(self, tensors: IntermediateTensors, indices: Tensor) -> Tensor:
        return tensors["hidden_states"][indices]

    def compute_candidates(
        self, tensors: IntermediateTensors, indices: Tensor, request: HeadRequest
    ) -> HeadOutput:
        return head_output_of(self.compute_logits(tensors, indices), request)


def arithmetic_kv(num_blocks: int, block_size: int) -> list[LayerKV]:
    """Storage of one stage, full of NaN: reading what was never written shows at once."""
    empty = torch.full((num_blocks * block_size, 1, 1), float("nan"))
    return [LayerKV(key=empty, value=empty)]


def arithmetic_tokens(prompt: Sequence[int], count: int, num_stages: int) -> list[int]:
    """What `num_stages` stages of `ArithmeticModel` say after `prompt`."""
    known = list(prompt)
    for _ in range(count):
        known.append((num_stages * sum((i + 1) * t for i, t in enumerate(known)) + 1) % VOCAB)
    return known[len(prompt) :]


class PlanRunner(Protocol):
    """What `generate` drives: an executor, or anything with these two methods of one."""

    def submit_plan(self, plan: ScheduledBatch) -> None: ...

    def poll_results(self, timeout_s: float) -> list[StepResult]: ...


@dataclass
class Wanted:
    """A request for `generate`."""

    prompt: list[int]
    count: int
    output: list[int] = field(default_factory=list)
    row: int = -1
    generation: int = 0
    computed: int = 0
    in_flight: int = 0  # samples on their way
    sampled_at: int = KNOWN
    blocks: list[int] = field(default_factory=list)

    @property
    def scheduled_count(self) -> int:
        return len(self.output) + self.in_flight


class HandCore:
    """A small core: rows and blocks are used again at once, rows in turn, up to `depth` plans in flight."""

    def __init__(
        self,
        *,
        num_stages: int,
        depth: int,
        num_rows: int,
        num_blocks: int,
        block_size: int,
        chunk: int,
        epoch: int = 0,
        first_step: int = 0,
    ) -> None:
        self.epoch = epoch
        self.num_stages, self.depth, self.block_size, self.chunk = num_stages, depth, block_size, chunk
        self.free_rows = list(range(num_rows))
        self.free_blocks = list(range(num_blocks))[::-1]
        self.generations = [0] * num_rows
        self.freed: list[int] = []
        self.running: list[Wanted] = []
        self.plans: dict[int, list[Wanted]] = {}
        self.step = first_step
        self.returned = first_step - 1
        self.results: list[StepResult] = []

    def generate(self, runner: PlanRunner, wanted: Sequence[Wanted]) -> None:
        """Fill `output` of every request."""
        waiting = list(wanted)
        while waiting or self.running or self.plans:
            while len(self.plans) < self.depth and (plan := self.next_plan(waiting)) is not None:
                runner.submit_plan(plan)
            for result in runner.poll_results(20.0):
                self.settle(result)

    def next_plan(self, waiting: list[Wanted]) -> ScheduledBatch | None:
        entered = self._admit(waiting)
        ready = [w for w in self.running if self._is_ready(w)]
        if not ready and not entered:
            return None
        share = -(-len(ready) // self.num_stages)
        chosen = sorted(ready[:share], key=lambda w: w.computed < len(w.prompt))
        parts = [self._part(w) for w in chosen]
        plan = make_plan(
            self.step,
            parts,
            epoch=self.epoch,
            new_rows=entered,
            freed_rows=self.freed,
            consume_through=self.returned,
        )
        self.plans[self.step] = [w for w, part in zip(chosen, parts, strict=True) if part.sampled]
        self.running.sort(key=lambda w: w in chosen)  # whoever has waited longest comes first
        self.freed = []
        self.step += 1
        return plan

    def settle(self, result: StepResult) -> None:
        self.results.append(result)
        assert result.step_id == self.returned + 1
        self.returned = result.step_id
        for w, ids in zip(self.plans.pop(result.step_id), result.token_ids, strict=True):
            w.output += ids
            w.in_flight -= 1
            if len(w.output) == w.count:
                self._release(w)

    def _release(self, w: Wanted) -> None:
        self.running.remove(w)
        self.freed.append(w.row)
        self.free_rows.insert(0, w.row)
        self.free_blocks += w.blocks

    def _admit(self, waiting: list[Wanted]) -> list[NewRow]:
        entered = []
        while waiting and self.free_rows:
            w = waiting.pop(0)
            w.row = self.free_rows.pop(0)
            w.generation = self.generations[w.row]
            self.generations[w.row] += 1
            self.running.append(w)
            entered.append(new_row(w.row, w.prompt, generation=w.generation))
        return entered

    def _is_ready(self, w: Wanted) -> bool:
        if w.computed < len(w.prompt):
            return True
        has_come_round = w.in_flight == 0 or self.step - w.sampled_at >= self.num_stages
        return w.scheduled_count < w.count and has_come_round

    def _part(self, w: Wanted) -> Part:
        start, in_prompt = w.computed, w.computed < len(w.prompt)
        num_tokens = min(self.chunk, len(w.prompt) - start) if in_prompt else 1
        sampled = start + num_tokens >= len(w.prompt)
        missing = -(-(start + num_tokens) // self.block_size) - len(w.blocks)
        blocks = [self.free_blocks.pop() for _ in range(missing)]
        w.blocks += blocks
        token_from = KNOWN if in_prompt else w.sampled_at
        w.computed += num_tokens
        if sampled:
            w.sampled_at = self.step
            w.in_flight += 1
        return Part(
            row=w.row,
            num_tokens=num_tokens,
            start=start,
            blocks=blocks,
            sampled=sampled,
            token_from=token_from,
        )


class Crew:
    """Threads of a test: whatever one raises is raised by `join`, and nobody is left behind."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def start(self, work: Callable[[], object]) -> None:
        thread = threading.Thread(target=self._guard, args=(work,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, timeout_s: float = 30.0) -> None:
        self.wait(timeout_s)
        if self.errors:
            raise self.errors[0]

    def wait(self, timeout_s: float = 30.0) -> None:
        """Wait until all threads have ended; `errors` has what they have raised."""
        for thread in self._threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), "a thread of the test hangs"

    def _guard(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self.errors.append(error)


def small_core(num_stages: int, async_depth: int, chunk: int) -> HandCore:
    """One for the ranks of `rank_configs.make_rank_configs`."""
    return HandCore(
        num_stages=num_stages,
        depth=num_stages + async_depth,
        num_rows=4,
        num_blocks=64,
        block_size=16,
        chunk=chunk,
    )
