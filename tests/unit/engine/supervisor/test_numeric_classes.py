"""What is said of the numeric classes of ranks: nothing, that they are mixed, or that one has changed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from checkpoints import make_checkpoint
from penstock.engine.supervisor.numeric_classes import NumericClasses, unlike_replicas
from penstock.process.config import RankConfig
from rank_configs import make_rank_configs

FAST, SLOW = "avx512-bf16 1f0a2b3c", "avx2 99aabbcc"


@pytest.fixture
def ranks(tmp_path: Path) -> list[RankConfig]:
    first, second = make_rank_configs(make_checkpoint(tmp_path), 2)
    return [first, msgspec.structs.replace(second, host="desk")]


def test_g1_of_one_class_nothing_is_said(ranks: list[RankConfig]) -> None:
    classes = NumericClasses()
    assert classes.settle(ranks, [FAST, FAST]) == []
    assert classes.settle(ranks, [FAST, FAST]) == []


def test_g1_mixed_classes_are_said_with_who_has_which_and_what_makes_them_one(
    ranks: list[RankConfig],
) -> None:
    (said,) = NumericClasses().settle(ranks, [FAST, SLOW])
    assert said.startswith(f"numeric classes are mixed (stage 0: {FAST}; stage 1 on desk: {SLOW})")
    assert said.endswith("--numeric-class avx2 makes all ranks use one class.")


def test_g1_where_the_class_was_chosen_compilers_differ(ranks: list[RankConfig]) -> None:
    chosen = [msgspec.structs.replace(rank, numeric_class="avx2") for rank in ranks]
    (said,) = NumericClasses().settle(chosen, [SLOW, "avx2 00000000"])
    assert said.endswith("Use the same compiler and C library on all hosts for one class.")


@pytest.mark.parametrize("other", ["torch 2.13 on avx2", f"{FAST}, torch 2.13 on avx512", "rvv 1", ""])
def test_g1_where_others_compute_no_class_of_our_kernels_is_named(
    ranks: list[RankConfig], other: str
) -> None:
    (said,) = NumericClasses().settle(ranks, [FAST, other])
    assert said.endswith("Run every rank with our kernels for one class.")


def test_g1_a_rank_that_comes_back_in_another_class_is_named(ranks: list[RankConfig]) -> None:
    classes = NumericClasses()
    classes.settle(ranks, [FAST, FAST])
    changed, mixed = classes.settle(ranks, [FAST, SLOW])
    assert changed.startswith(f"stage 1 on desk now computes in {SLOW} instead of {FAST}")
    assert mixed.startswith("numeric classes are mixed")
    assert classes.settle(ranks, [FAST, SLOW]) == [mixed], "said in each epoch, with no change any more"
    (back,) = classes.settle(ranks, [FAST, FAST])
    assert back.startswith(f"stage 1 on desk now computes in {FAST} instead of {SLOW}")


def test_g1_a_rank_is_named_with_the_host_that_it_runs_on_now(ranks: list[RankConfig]) -> None:
    classes = NumericClasses()
    classes.settle(ranks, [FAST, FAST])
    taken_over = [ranks[0], msgspec.structs.replace(ranks[1], host="shelf")]
    changed, mixed = classes.settle(taken_over, [FAST, SLOW])
    assert changed.startswith(f"stage 1 on shelf now computes in {SLOW} instead of {FAST}")
    assert f"stage 1 on shelf: {SLOW}" in mixed


def test_g1_replicas_that_differ_are_named(ranks: list[RankConfig]) -> None:
    replicas = [NumericClasses(), NumericClasses()]
    assert unlike_replicas(replicas) == [], "nothing is known yet"
    replicas[0].settle(ranks, [FAST, FAST])
    replicas[1].settle(ranks, [FAST, FAST])
    assert unlike_replicas(replicas) == unlike_replicas(replicas[:1]) == []
    replicas[1].settle(ranks, [SLOW, SLOW])
    (said,) = unlike_replicas(replicas)
    assert f"(replica 0 {FAST}; replica 1 {SLOW})" in said
    replicas[1].settle(ranks, [FAST, SLOW])
    assert unlike_replicas(replicas) == [], "which says more of itself"
