"""Layers to stages: rows A1-A3, S6, S7, facts e1 and e2."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.engine import PARTITION_VARIABLE, EngineConfig, ModelConfig, ParallelConfig
from penstock.errors import PartitionError
from penstock.llm.arguments import engine_config
from penstock.pipeline.partition import partition_layers


def counts(num_layers: int, num_stages: int, policy: str | list[int] = "even") -> list[int]:
    ranges = partition_layers(num_layers, num_stages, policy)
    return [end - start for start, end in ranges]


def overridden(num_stages: int, policy: str, text: str) -> str:
    """Return the policy in force where the environment asks for layers per stage."""
    parallel = ParallelConfig(pipeline_parallel_size=num_stages, partition=policy)
    config = EngineConfig(model=ModelConfig(model="m"), parallel=parallel)
    return config.with_partition_of({PARTITION_VARIABLE: text}).parallel.partition


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 12), st.integers(0, 200), st.sampled_from(["even", "last"]))
def test_a1_ranges_tile_the_layers_in_order(num_stages: int, extra: int, policy: str) -> None:
    num_layers = num_stages + extra
    ranges = partition_layers(num_layers, num_stages, policy)
    assert len(ranges) == num_stages
    assert [layer for start, end in ranges for layer in range(start, end)] == list(range(num_layers))
    sizes = [end - start for start, end in ranges]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [
        (2, 2, [1, 1]),
        (3, 2, [2, 1]),
        (3, 3, [1, 1, 1]),
        (4, 3, [1, 2, 1]),
        (5, 3, [2, 2, 1]),
        (7, 4, [2, 2, 2, 1]),
        (10, 4, [2, 3, 3, 2]),
        (16, 3, [5, 6, 5]),
        (22, 4, [5, 6, 6, 5]),
        (23, 4, [6, 6, 6, 5]),
        (27, 4, [7, 7, 7, 6]),
        (28, 3, [9, 10, 9]),
        (32, 4, [8, 8, 8, 8]),
        (61, 4, [15, 15, 16, 15]),
        (80, 4, [20, 20, 20, 20]),
    ],
)
def test_a2_remainder_goes_to_stages_from_the_second_last_backwards(
    num_layers: int, num_stages: int, expected: list[int]
) -> None:
    assert counts(num_layers, num_stages) == expected


def test_s6_remainder_spares_both_ends_only_while_it_is_small() -> None:
    for num_stages in range(3, 9):
        for remainder in range(1, num_stages):
            sizes = counts(4 * num_stages + remainder, num_stages)
            assert sizes[-1] == 4
            assert sizes[0] == (4 if remainder <= num_stages - 2 else 5)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [
        (22, 4, [5, 5, 6, 6]),
        (5, 3, [1, 2, 2]),
        (4, 3, [1, 1, 2]),
        (3, 2, [1, 2]),
        (61, 4, [15, 15, 15, 16]),
    ],
)
def test_s7_last_gives_the_remainder_to_the_last_stages(
    num_layers: int, num_stages: int, expected: list[int]
) -> None:
    assert counts(num_layers, num_stages, "last") == expected


E2 = [
    ("5,5,5,5", 20, [(0, 5), (5, 10), (10, 15), (15, 20)]),
    ("4,6,6,4", 20, [(0, 4), (4, 10), (10, 16), (16, 20)]),
    ("5,6,5,6", 22, [(0, 5), (5, 11), (11, 16), (16, 22)]),
]


@pytest.mark.parametrize(("text", "num_layers", "expected"), E2)
def test_a3_override_by_environment(text: str, num_layers: int, expected: list[tuple[int, int]]) -> None:
    assert partition_layers(num_layers, 4, overridden(4, "even", text)) == expected


@pytest.mark.parametrize(("text", "num_layers", "expected"), E2)
def test_s7_explicit_list_as_text_or_numbers(
    text: str, num_layers: int, expected: list[tuple[int, int]]
) -> None:
    assert partition_layers(num_layers, 4, text) == expected
    assert partition_layers(num_layers, 4, [int(entry) for entry in text.split(",")]) == expected


def test_a3_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"model": "m", "seed": 0, "pipeline_parallel_size": 2}
    monkeypatch.setenv(PARTITION_VARIABLE, "1,7")
    assert engine_config(given, "mp").parallel.partition == "1,7"
    assert partition_layers(8, 2) == [(0, 4), (4, 8)]  # read where arguments are, and nowhere else
    monkeypatch.delenv(PARTITION_VARIABLE)
    assert engine_config(given, "mp").parallel.partition == "even"


def test_a3_override_yields_to_a_policy_that_was_asked_for() -> None:
    assert counts(5, 2, overridden(2, "last", "4,1")) == [2, 3]
    assert counts(5, 2, overridden(2, "3,2", "4,1")) == [3, 2]


def test_a3_one_stage_ignores_the_override() -> None:
    assert counts(22, 1, overridden(1, "even", "5,6,5,6")) == [22]


@pytest.mark.parametrize(
    ("text", "num_layers", "message"),
    [
        ("5,5,5,5,", 20, "not a list of layer counts"),
        ("5,a,5,5", 20, "not a list of layer counts"),
        ("5,-5,10,10", 20, "not a list of layer counts"),
        ("5,٥,5,5", 20, "not a list of layer counts"),
        ("9" * 5000 + ",5,5,5", 20, "not a list of layer counts"),
        ("5,5,10", 20, "has 3 entries for 4 stages"),
        ("5,5,5,5", 21, "sums to 20, the model has 21 layers"),
        ("0,5,5,10", 20, "leaves a stage without layers"),
    ],
)
def test_a3_a_wrong_override_is_named(text: str, num_layers: int, message: str) -> None:
    with pytest.raises(PartitionError, match=message) as by_environment:
        partition_layers(num_layers, 4, overridden(4, "even", text))
    assert isinstance(by_environment.value, ValueError)
    assert text in str(by_environment.value)
    assert by_environment.value.remedy


def test_a1_more_stages_than_layers_says_how_many_there_are() -> None:
    with pytest.raises(PartitionError) as caught:
        partition_layers(5, 8)
    assert str(caught.value) == "`--pp 8` is more than the model's 5 layers. Use at most 5."
    assert caught.value.exit_code == 2


def test_a1_no_stage_at_all_is_refused() -> None:
    with pytest.raises(PartitionError, match="number of stages is 0"):
        partition_layers(5, 0)


def test_d5_auto_is_all_layers_on_one_stage_and_must_be_measured_for_more() -> None:
    assert partition_layers(5, 1, "auto") == [(0, 5)]
    with pytest.raises(PartitionError, match="the 5 layers have not been measured for 2 stages"):
        partition_layers(5, 2, overridden(2, "auto", "4,1"))


def test_s7_an_unknown_policy_is_refused() -> None:
    with pytest.raises(PartitionError, match=r'partition is "middle".*even, last or auto'):
        partition_layers(5, 2, "middle")
