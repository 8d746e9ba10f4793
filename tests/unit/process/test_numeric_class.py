"""What pipes that compute the same bits have in common."""

from __future__ import annotations

import msgspec

from penstock.batch import RankLoaded
from penstock.process.numeric_class import class_of_pipe
from stand_in_hosts import LOADED


def ranks(*classes: str) -> list[RankLoaded]:
    return [
        msgspec.structs.replace(LOADED, stage=stage, end_layer=4 * stage + 4, numeric_class=name)
        for stage, name in enumerate(classes)
    ]


def test_g1_a_pipe_of_one_class_is_any_pipe_of_it() -> None:
    assert class_of_pipe(ranks("a")) == class_of_pipe(ranks("a", "a", "a")) == "a"
    assert class_of_pipe([]) == ""


def test_g1_a_mixed_pipe_is_the_same_where_the_same_layers_are_in_the_same_class() -> None:
    mixed = [ranks("a", "b"), ranks("b", "a"), ranks("a", "b", "b"), ranks("a", "a", "b")]
    assert len({class_of_pipe(each) for each in mixed}) == len(mixed)
    assert class_of_pipe(ranks("a", "b")) == class_of_pipe(ranks("a", "b"))
