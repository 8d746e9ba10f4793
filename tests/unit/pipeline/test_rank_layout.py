"""Rank numbers: rows C1 and D8, facts e3."""

from __future__ import annotations

import pytest

from penstock.pipeline.rank_layout import RankLayout


def groups(layout: RankLayout, kind: str) -> set[tuple[int, ...]]:
    return {getattr(layout, kind)(rank).ranks for rank in range(layout.world_size)}


def test_c1_c2_e3_groups_of_tp2_pp4() -> None:
    layout = RankLayout(num_stages=4, tensor_parallel_size=2)
    assert groups(layout, "tensor_group") == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert groups(layout, "pipeline_group") == {(0, 2, 4, 6), (1, 3, 5, 7)}


def test_c1_c2_e3_groups_of_tp4_pp2() -> None:
    layout = RankLayout(num_stages=2, tensor_parallel_size=4)
    assert groups(layout, "tensor_group") == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert groups(layout, "pipeline_group") == {(0, 4), (1, 5), (2, 6), (3, 7)}


@pytest.mark.parametrize(
    ("rank", "in_group", "is_first", "is_last", "next_rank", "prev_rank"),
    [(0, 0, True, False, 1, 2), (1, 1, False, False, 2, 0), (2, 2, False, True, 0, 1)],
)
def test_c1_neighbours_form_a_ring(
    rank: int, in_group: int, is_first: bool, is_last: bool, next_rank: int, prev_rank: int
) -> None:
    layout = RankLayout(num_stages=3)
    group = layout.pipeline_group(rank)
    assert layout.stage(rank) == rank
    assert (group.size, group.rank_in_group) == (3, in_group)
    assert (group.is_first, group.is_last) == (is_first, is_last)
    assert (group.next_rank, group.prev_rank) == (next_rank, prev_rank)


def test_c1_a_single_stage_is_its_own_neighbour() -> None:
    group = RankLayout(num_stages=1).pipeline_group(0)
    assert (group.is_first, group.is_last, group.next_rank, group.prev_rank) == (True, True, 0, 0)


@pytest.mark.parametrize(
    ("num_stages", "tp", "expected"), [(1, 1, 0), (2, 1, 1), (4, 1, 3), (2, 4, 4), (4, 2, 6), (1, 2, 0)]
)
def test_d8_output_rank_is_the_first_of_the_last_stage(num_stages: int, tp: int, expected: int) -> None:
    layout = RankLayout(num_stages=num_stages, tensor_parallel_size=tp)
    assert layout.output_rank == layout.world_size - tp == expected
    assert layout.stage(layout.output_rank) == num_stages - 1
