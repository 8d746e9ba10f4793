"""Rank numbers: rows C2, I1 and I5, facts e3. The supervisor's `test_launch.py` tests how they are joined."""

from __future__ import annotations

import pytest

from penstock.pipeline.rank_layout import RankCoordinates, RankLayout


@pytest.mark.parametrize(
    ("tp_sizes", "groups"),
    [
        ((2, 2, 2, 2), [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ((4, 4), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ((1, 1, 1), [(0,), (1,), (2,)]),
        ((2, 1, 4), [(0, 1), (2,), (3, 4, 5, 6)]),
    ],
)
def test_c2_d13_ranks_of_a_stage_are_side_by_side(
    tp_sizes: tuple[int, ...], groups: list[tuple[int, ...]]
) -> None:
    layout = RankLayout(tp_sizes=tp_sizes)
    assert layout.tensor_groups == groups
    stages = [[layout.places[rank].stage for rank in group] for group in groups]
    assert stages == [[stage] * tp_size for stage, tp_size in enumerate(tp_sizes)]


def test_c2_replicas_follow_one_another() -> None:
    layout = RankLayout(tp_sizes=(1, 1), data_parallel_size=2)
    assert [(place.replica, place.stage) for place in layout.places] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_c2_i1_i5_numbers_of_all_dimensions_at_once() -> None:
    layout = RankLayout(tp_sizes=(2, 2), data_parallel_size=2, context_parallel_size=2)
    assert len(layout.places) == 16
    assert layout.places[5] == RankCoordinates(replica=0, stage=1, context_rank=0, tp_rank=1)
    assert layout.places[7] == RankCoordinates(replica=0, stage=1, context_rank=1, tp_rank=1)
    assert layout.places[13] == RankCoordinates(replica=1, stage=1, context_rank=0, tp_rank=1)
    assert layout.tensor_groups == [(first, first + 1) for first in range(0, 16, 2)]
