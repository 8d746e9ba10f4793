"""Rank numbers: rows C1, C2, D8, I1 and I5, facts e3."""

from __future__ import annotations

import pytest

from penstock.pipeline.rank_layout import RankCoordinates, RankLayout


def groups(layout: RankLayout, kind: str) -> set[tuple[int, ...]]:
    return {getattr(layout, kind)(rank).ranks for rank in range(layout.world_size)}


def test_c1_c2_e3_groups_of_tp2_pp4() -> None:
    layout = RankLayout.regular(4, 2)
    assert groups(layout, "tensor_group") == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert groups(layout, "pipeline_group") == {(0, 2, 4, 6), (1, 3, 5, 7)}


def test_c1_c2_e3_groups_of_tp4_pp2() -> None:
    layout = RankLayout.regular(2, 4)
    assert groups(layout, "tensor_group") == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert groups(layout, "pipeline_group") == {(0, 4), (1, 5), (2, 6), (3, 7)}


def test_c2_e3_groups_of_dp2_pp2() -> None:
    layout = RankLayout.regular(2, data_parallel_size=2)
    assert groups(layout, "pipeline_group") == {(0, 1), (2, 3)}
    assert groups(layout, "data_group") == {(0, 2), (1, 3)}


def test_c2_i1_i5_groups_of_all_kinds_at_once() -> None:
    layout = RankLayout.regular(2, 2, data_parallel_size=2, context_parallel_size=2)
    assert layout.world_size == 16
    assert layout.tensor_group(5).ranks == (4, 5)
    assert layout.context_group(5).ranks == (5, 7)
    assert layout.pipeline_group(5).ranks == (1, 5)
    assert layout.data_group(5).ranks == (5, 13)
    assert layout.places[13] == RankCoordinates(replica=1, stage=1, context_rank=0, tp_rank=1)
    for kind in ("tensor_group", "context_group", "pipeline_group", "data_group"):
        ranks = sorted(rank for group in groups(layout, kind) for rank in group)
        assert ranks == list(range(16)), "each rank is in one group of a kind"


def test_d13_groups_of_ragged_stages() -> None:
    layout = RankLayout(tp_sizes=(2, 1, 4), data_parallel_size=2)
    assert layout.world_size == 14
    assert groups(layout, "tensor_group") >= {(0, 1), (2,), (3, 4, 5, 6), (7, 8), (9,)}
    assert layout.pipeline_group(0).ranks == (0, 2, 3)
    assert layout.pipeline_group(1).ranks == (1, 4)
    assert layout.pipeline_group(6).ranks == (6,)
    assert [layout.output_rank(replica) for replica in (0, 1)] == [3, 10]


@pytest.mark.parametrize(
    ("rank", "in_group", "is_first", "is_last", "next_rank", "prev_rank"),
    [(0, 0, True, False, 1, 2), (1, 1, False, False, 2, 0), (2, 2, False, True, 0, 1)],
)
def test_c1_neighbours_form_a_ring(
    rank: int, in_group: int, is_first: bool, is_last: bool, next_rank: int, prev_rank: int
) -> None:
    layout = RankLayout.regular(3)
    group = layout.pipeline_group(rank)
    assert layout.places[rank].stage == rank
    assert (group.size, group.rank_in_group) == (3, in_group)
    assert (group.is_first, group.is_last) == (is_first, is_last)
    assert (group.next_rank, group.prev_rank) == (next_rank, prev_rank)


def test_c1_a_single_stage_is_its_own_neighbour() -> None:
    group = RankLayout.regular(1).pipeline_group(0)
    assert (group.is_first, group.is_last, group.next_rank, group.prev_rank) == (True, True, 0, 0)


@pytest.mark.parametrize(
    ("num_stages", "tp", "expected"), [(1, 1, 0), (2, 1, 1), (4, 1, 3), (2, 4, 4), (4, 2, 6), (1, 2, 0)]
)
def test_d8_output_rank_is_the_first_of_the_last_stage(num_stages: int, tp: int, expected: int) -> None:
    layout = RankLayout.regular(num_stages, tp)
    assert layout.output_rank() == layout.world_size - tp == expected
    assert layout.places[layout.output_rank()].stage == num_stages - 1
    assert RankLayout.regular(num_stages, tp, context_parallel_size=2).output_rank() == 2 * expected
