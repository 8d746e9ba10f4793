"""Fault points: what is armed happens once, at its call, in its stage; what is not leaves nothing behind."""

from __future__ import annotations

import pytest

from penstock.errors import UsageError
from penstock.faults import Fault, InjectedError, armed, parse


def add(left: int, right: int) -> int:
    return left + right


def test_where_nothing_is_armed_the_function_is_itself() -> None:
    faults = parse("stage.forward@1:1=raise, rank.load@0:1=raise")
    assert armed(faults, "stage.forward", 0, add) is add
    assert armed(faults, "stage.put", 1, add) is add
    assert armed([], "rank.load", 0, add) is add


def test_it_happens_once_at_its_call_of_those_that_count() -> None:
    faults = parse("stage.forward@1:2=raise")
    broken = armed(faults, "stage.forward", 1, add, lambda left, right: left > 0)
    assert broken(1, 1) == 2
    assert broken(0, 1) == 1
    with pytest.raises(InjectedError, match=r"stage\.forward"):
        broken(1, 2)
    assert [broken(1, 3), broken(1, 4)] == [4, 5]


def test_a_list_of_faults_is_read() -> None:
    assert parse("stage.put@2:64=kill") == [Fault("stage.put", 2, 64, "kill")]
    assert parse(" , ") == []


@pytest.mark.parametrize(
    "text",
    ["stage.put", "stage.put@1=kill", "stage.putt@1:1=kill", "stage.put@1:1=smash", "stage.put@x:1=kill"],
)
def test_what_is_no_fault_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(UsageError, match=r"POINT@STAGE:COUNT=ACTION.*stage\.put.*kill"):
        parse(text)
