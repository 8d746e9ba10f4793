"""A plan while it is written: columns stay aligned, and the scheduled clock moves."""

from __future__ import annotations

from penstock.batch import KNOWN, RowSampling
from penstock.scheduler.plan_builder import PlanBuilder
from penstock.scheduler.queues import RequestState


def state(row: int, **fields: int) -> RequestState:
    request = RequestState(
        request_id=f"r{row}",
        arrival=row,
        arrival_time=0.0,
        prompt_len=5,
        max_len=9,
        stop_ids=frozenset(),
        sampling=RowSampling(0.0, 0, 1.0, 0.0, 1, 0, [], -1),
        token_ids=[4] * 5,
        row=row,
        prefill_len=5,
    )
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def test_columns_of_decodes_and_chunks() -> None:
    decoding = state(3, num_scheduled=5, num_pending=1, last_sampled_step=6)
    ending, beginning = state(0, num_scheduled=3), state(1)
    building = PlanBuilder(8)
    building.add_decode(decoding, [40])
    building.add_chunk(ending, 2, [])
    building.add_chunk(beginning, 3, [41, 42])
    plan = building.finish(consume_through=6, freed_rows=[2], dropped_grammars=[])
    assert plan.step_id == 8
    assert plan.rows == [3, 0, 1]
    assert plan.num_tokens == [1, 2, 3]
    assert plan.start_positions == [5, 3, 0]
    assert plan.new_blocks == [[40], [], [41, 42]]
    assert plan.need_sampled == [True, True, False]
    assert plan.token_from == [6, KNOWN, KNOWN]
    assert (plan.consume_through, plan.freed_rows) == (6, [2])
    assert building.sampling == [decoding, ending]
    assert (building.num_decodes, building.prefill_tokens) == (1, 5)


def test_placing_moves_the_scheduled_clock() -> None:
    decoding, chunked = state(3, num_scheduled=5, num_pending=1, last_sampled_step=6), state(1)
    building = PlanBuilder(8)
    building.add_decode(decoding, [])
    building.add_chunk(chunked, 3, [])
    assert (decoding.num_scheduled, decoding.num_pending, decoding.last_sampled_step) == (6, 2, 8)
    assert (chunked.num_scheduled, chunked.num_pending, chunked.last_sampled_step) == (3, 0, -1)
