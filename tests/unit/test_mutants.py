"""The mutation check: what it names is there, and what it says of a mutant is so."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import mutants
from mutants import BROKEN, KILLED, SURVIVED, TIMED_OUT, Finding, Findings, Mutant
from named_tests import fast_tests_in
from paths import REPOSITORY

MUTANTS = mutants.load()
NAMES = [mutant.name for mutant in MUTANTS]
by_name = pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)


def test_there_are_enough_and_each_has_a_name() -> None:
    assert len(set(NAMES)) == len(MUTANTS) >= 40
    assert all(name.replace("-", "").isalpha() and name.islower() for name in NAMES)


@by_name
def test_a_mutant_is_a_change_of_one_place_that_python_can_read(mutant: Mutant) -> None:
    source = (REPOSITORY / mutant.file).read_text(encoding="utf-8")
    changed = mutant.changed(source)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
    assert mutant.breaks.endswith(".")


@by_name
def test_the_tests_that_a_mutant_names_are_fast_tests_that_exist(mutant: Mutant) -> None:
    assert 1 <= len(set(mutant.tests)) == len(mutant.tests) <= 3
    for test in mutant.tests:
        file, _, case = test.partition("::")
        assert case.partition("[")[0] in fast_tests_in(REPOSITORY / file), f"{test} is not a fast test"


@pytest.mark.parametrize(
    ("status", "output", "verdict", "by"),
    [
        (1, "..F\nFAILED tests/a.py::test_b - assert 1 == 2\n", KILLED, "tests/a.py::test_b"),
        (0, "...\n", SURVIVED, "all its tests pass"),
        (2, "ERROR tests/a.py - SyntaxError\n", BROKEN, "pytest ended with 2"),
        (4, "ERROR: not found: tests/a.py::test_b\n", BROKEN, "pytest ended with 4"),
        (None, "..", TIMED_OUT, "the tests did not end"),
    ],
)
def test_only_a_test_that_fails_kills(status: int | None, output: str, verdict: str, by: str) -> None:
    finding = mutants.judged(status, output, 1.0)
    assert (finding.verdict, finding.by) == (verdict, by)


def test_shards_are_all_mutants_once() -> None:
    parts = [mutants.chosen(MUTANTS, "", f"{part}/3") for part in (1, 2, 3)]
    assert sorted(mutant.name for part in parts for mutant in part) == sorted(NAMES)
    assert [mutant.name for mutant in mutants.chosen(MUTANTS, NAMES[4], "1/1")] == [NAMES[4]]


@pytest.mark.parametrize(("only", "shard"), [("nobody", "1/1"), ("", "0/2"), ("", "3/2"), ("", "half")])
def test_what_is_no_part_is_refused(only: str, shard: str) -> None:
    with pytest.raises(ValueError, match=r"mutant|--shard"):
        mutants.chosen(MUTANTS, only, shard)


def test_what_was_found_is_kept_until_the_mutant_is_another(tmp_path: Path) -> None:
    findings, found = Findings(tmp_path / "state"), Finding(verdict=KILLED, seconds=1.5, by="a test")
    assert findings.find(MUTANTS[0]) is None
    findings.keep(MUTANTS[0], found)
    assert findings.find(MUTANTS[0]) == found
    assert findings.find(replace(MUTANTS[0], tests=["another"])) is None
    findings.forget()
    assert findings.find(MUTANTS[0]) is None


def test_the_changed_package_is_what_tests_import_and_the_checkout_stays() -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "cost-of-attention")
    before = (REPOSITORY / mutant.file).read_bytes()
    assert mutants.try_out(mutant).verdict == KILLED
    assert (REPOSITORY / mutant.file).read_bytes() == before
