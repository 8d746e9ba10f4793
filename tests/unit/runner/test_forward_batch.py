"""Inputs of a step against loops over rows and tokens."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from hand_core import Part, make_plan, new_row
from penstock.batch import ScheduledBatch
from penstock.errors import ProtocolError
from penstock.runner.buffers import BufferPool
from penstock.runner.forward_batch import (
    ForwardBatch,
    begin_batch,
    complete_batch,
    input_ids,
)
from penstock.runner.request_rows import RequestRows

BLOCK, MAX_TOKENS, NUM_ROWS, MAX_LEN = 4, 40, 6, 31


def make_rows() -> RequestRows:
    return RequestRows(NUM_ROWS, MAX_LEN, BLOCK)


def make_pool(rows: RequestRows, depth: int = 2) -> BufferPool:
    return BufferPool(
        depth,
        max_num_tokens=MAX_TOKENS,
        max_num_rows=NUM_ROWS,
        max_num_samples=MAX_TOKENS,
        max_blocks_per_row=rows.tables.width,
        device=torch.device("cpu"),
    )


def build(plan: ScheduledBatch, rows: RequestRows, pool: BufferPool) -> ForwardBatch:
    rows.apply(plan)
    buffers = pool.for_step(plan.step_id)
    return complete_batch(begin_batch(plan, rows, buffers), rows, buffers)


def expected_tokens(parts: list[Part], known: dict[int, list[int]], blocks: dict[int, list[int]]) -> list:
    """(input id, position, slot) of every token, by loops."""
    return [
        (known[part.row][p], p, blocks[part.row][p // BLOCK] * BLOCK + p % BLOCK)
        for part in parts
        for p in range(part.start, part.start + part.num_tokens)
    ]


def check(
    batch: ForwardBatch, ids: list[int], parts: list[Part], known: dict[int, list[int]], blocks: dict
) -> None:
    found = list(
        zip(
            ids,
            batch.positions.tolist(),
            batch.metadata.slot_mapping.tolist(),
            strict=True,
        )
    )
    assert found == expected_tokens(parts, known, blocks)
    ends = [part.start + part.num_tokens for part in parts]
    starts = batch.metadata.query_starts
    assert starts == [sum(p.num_tokens for p in parts[:i]) for i in range(len(parts) + 1)]
    assert batch.metadata.seq_lens == ends
    for part, end, table in zip(parts, ends, batch.metadata.block_tables.tolist(), strict=True):
        assert table[: -(-end // BLOCK)] == blocks[part.row][: -(-end // BLOCK)]
    check_kernel_step(batch, ids)
    sampled = [i for i, part in enumerate(parts) if part.sampled]
    assert batch.samples.indices == [starts[i + 1] - 1 for i in sampled]
    assert batch.sampled.rows.tolist() == [parts[i].row for i in sampled]


def check_kernel_step(batch: ForwardBatch, ids: list[int]) -> None:
    """What the kernels are told is what torch is told."""
    step, metadata = batch.metadata.kernel_step, batch.metadata
    assert step is not None

    def numbers(address: int, count: int) -> list[int]:
        return list((ctypes.c_int64 * count).from_address(address))

    num_rows, width = metadata.block_tables.shape
    assert (step.num_tokens, step.num_rows, step.block_table_stride) == (batch.num_tokens, num_rows, width)
    assert numbers(step.input_ids, step.num_tokens) == ids
    assert numbers(step.positions, step.num_tokens) == batch.positions.tolist()
    assert numbers(step.slot_mapping, step.num_tokens) == metadata.slot_mapping.tolist()
    assert numbers(step.query_starts, num_rows + 1) == metadata.query_starts
    assert numbers(step.seq_lens, num_rows) == metadata.seq_lens
    assert numbers(step.block_tables, num_rows * width) == metadata.block_tables.flatten().tolist()


def test_d7_chunked_prompts_and_decodes_mix_in_one_step() -> None:
    rng = random.Random(0)
    for _ in range(20):
        rows = make_rows()
        pool = make_pool(rows)
        prompts = {r: [rng.randrange(90) for _ in range(rng.randint(3, 20))] for r in (4, 1, 3)}
        spare = rng.sample(range(100), 24)
        blocks = {r: [spare.pop() for _ in range(8)] for r in prompts}
        enter = [new_row(r, p) for r, p in prompts.items()]
        # First step: row 4 whole, rows 1 and 3 in part. Second: row 4 decodes, the others go on.
        first = [
            Part(row=4, num_tokens=len(prompts[4]), start=0, blocks=blocks[4]),
            Part(row=1, num_tokens=1, start=0, blocks=blocks[1], sampled=False),
            Part(row=3, num_tokens=2, start=0, blocks=blocks[3][:1], sampled=False),
        ]
        batch = build(make_plan(0, first, new_rows=enter), rows, pool)
        check(batch, input_ids(batch, rows, pool.for_step(0)).tolist(), first, prompts, blocks)
        assert batch.samples.output_index == [0]
        rows.post_update(0, batch.sampled, [[77]], [0])
        prompts[4].append(77)
        second = [
            Part(row=4, start=len(prompts[4]) - 1, token_from=0),
            Part(row=1, num_tokens=len(prompts[1]) - 1, start=1),
            Part(row=3, num_tokens=len(prompts[3]) - 2, start=2, blocks=blocks[3][1:]),
        ]
        batch = build(make_plan(1, second), rows, pool)
        check(batch, input_ids(batch, rows, pool.for_step(1)).tolist(), second, prompts, blocks)
        assert batch.samples.output_index == [1, 0, 0]
        assert batch.metadata.num_decodes >= 1


def test_d10_output_index_counts_from_the_prompt_after_a_preemption() -> None:
    rows = make_rows()
    enter = new_row(0, [1, 2, 3, 4, 5], prompt_len=3)
    batch = build(
        make_plan(0, [Part(row=0, num_tokens=5, start=0, blocks=[0, 1])], new_rows=[enter]),
        rows,
        make_pool(rows),
    )
    assert batch.samples.output_index == [2]


@pytest.mark.parametrize("rejected", [0, 1])
def test_e5_samples_that_come_while_the_batch_is_begun_give_the_same_batch(rejected: int) -> None:
    """Begun early and completed late, or built after the samples: the same, with rejected drafts, too."""

    def after_drafts() -> tuple[RequestRows, BufferPool, ForwardBatch]:
        rows = make_rows()
        pool = make_pool(rows)
        enter = [new_row(0, [1, 2, 3]), new_row(2, [4, 5])]
        parts = [
            Part(row=0, num_tokens=3, start=0, blocks=[3, 4]),
            Part(row=2, num_tokens=2, start=0, blocks=[1]),
        ]
        batch = build(make_plan(0, parts, new_rows=enter), rows, pool)
        rows.post_update(0, batch.sampled, [[7], [8]], [0, 0])
        rows.put_drafts(0, 5, [60])
        drafted = [Part(row=0, num_tokens=2, start=3, token_from=0), Part(row=2, start=2, token_from=0)]
        return rows, pool, build(make_plan(1, drafted), rows, pool)

    plan = make_plan(2, [Part(row=2, start=3, token_from=1), Part(row=0, start=5, token_from=1)])
    samples = [[61] if rejected else [60, 62], [9]]
    batches, ids = [], []
    for early in (True, False):
        rows, pool, drafted = after_drafts()
        if early:
            begun = begin_batch(plan, rows, pool.for_step(2))
            rows.post_update(1, drafted.sampled, samples, [rejected, 0])
            batches.append(complete_batch(begun, rows, pool.for_step(2)))
        else:
            rows.post_update(1, drafted.sampled, samples, [rejected, 0])
            batches.append(build(plan, rows, pool))
        ids.append(input_ids(batches[-1], rows, pool.for_step(2)).tolist())
        assert [rows.num_computed[row] for row in (0, 2)] == [6 - rejected, 4]
    first, second = batches
    assert ids == [[9, 61 if rejected else 62]] * 2
    assert first.positions.tolist() == second.positions.tolist() == [3, 5 - rejected]
    assert first.metadata.slot_mapping.tolist() == second.metadata.slot_mapping.tolist()
    assert first.metadata.seq_lens == second.metadata.seq_lens
    assert first.samples.output_index == second.samples.output_index


def test_a_batch_whose_samples_have_not_come_cannot_be_completed() -> None:
    rows = make_rows()
    pool = make_pool(rows)
    build(
        make_plan(0, [Part(row=0, num_tokens=2, start=0, blocks=[3])], new_rows=[new_row(0, [1, 2])]),
        rows,
        pool,
    )
    begun = begin_batch(make_plan(1, [Part(row=0, start=2, token_from=0)]), rows, pool.for_step(1))
    with pytest.raises(ProtocolError, match="needs the sample of a different step"):
        complete_batch(begun, rows, pool.for_step(1))


def test_an_empty_plan_is_a_batch_without_tokens() -> None:
    rows = make_rows()
    batch = build(make_plan(0), rows, make_pool(rows))
    assert batch.num_tokens == 0
    assert batch.metadata.query_starts == [0]
    assert batch.metadata.seq_lens == []
    assert batch.metadata.block_tables.shape[0] == 0
    assert len(batch.sampled) == 0


def test_a_chunk_that_ends_at_the_prompts_end_samples() -> None:
    rows = make_rows()
    pool = make_pool(rows)
    first = Part(row=0, num_tokens=4, start=0, blocks=[5, 6], sampled=False)
    batch = build(make_plan(0, [first], new_rows=[new_row(0, list(range(8)))]), rows, pool)
    assert batch.samples.indices == []
    batch = build(make_plan(1, [Part(row=0, num_tokens=4, start=4)]), rows, pool)
    assert batch.samples.indices == [3]
    assert batch.samples.output_index == [0]


def test_c7_tensors_of_every_step_lie_at_the_same_addresses() -> None:
    rows = make_rows()
    pool = make_pool(rows, depth=1)
    tokens = list(range(20))
    addresses = set()
    for step, (start, count) in enumerate([(0, 7), (7, 1), (8, 12)]):
        enter = [new_row(0, tokens)] if step == 0 else []
        blocks = [step * 2, step * 2 + 1]
        part = Part(row=0, num_tokens=count, start=start, blocks=blocks)
        batch = build(make_plan(step, [part], new_rows=enter), rows, pool)
        views = (
            input_ids(batch, rows, pool.for_step(step)),
            batch.positions,
            batch.metadata.slot_mapping,
            batch.metadata.block_tables,
            pool.for_step(step).sample_indices.publish(batch.samples.indices),
        )
        addresses.add(tuple(view.data_ptr() for view in views))
    assert len(addresses) == 1


def test_e9_buffers_are_not_used_again_while_their_step_may_be_in_flight() -> None:
    rows = make_rows()
    pool = make_pool(rows, depth=3)
    sets = [pool.for_step(step) for step in range(6)]
    assert len({id(buffers) for buffers in sets[:3]}) == 3
    assert [id(b) for b in sets[3:]] == [id(b) for b in sets[:3]]
    assert len({b.input_ids.host_address for b in sets[:3]}) == 3
