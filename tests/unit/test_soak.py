"""The program of `./run soak`: shards, results that are kept, and parts that fail."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

import soak

WEIGHTS = {f"tests/test_{letter}.py": weight for weight, letter in enumerate("abcdefgh", 1)}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9])
def test_shards_together_are_all_parts_and_none_twice(count: int) -> None:
    shards = [soak.shard_of(WEIGHTS, index, count) for index in range(1, count + 1)]
    assert sorted(part for shard in shards for part in shard) == sorted(WEIGHTS)


def test_shards_are_about_equal_and_begin_with_what_is_heaviest() -> None:
    shards = [soak.shard_of(WEIGHTS, index, 2) for index in (1, 2)]
    loads = [sum(WEIGHTS[part] for part in shard) for shard in shards]
    assert loads == [18, 18]
    assert shards[0][0] == "tests/test_h.py"


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", ""])
def test_a_shard_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write i/n"):
        soak.shard(text)


def test_results_are_kept_by_commit_and_can_be_forgotten(tmp_path: Path) -> None:
    outcome = soak.Outcome(passed=True, seconds=1.5, summary="3 passed in 1.5s")
    soak.Results(tmp_path, "abc").record("tests/test_a.py", outcome)
    again = soak.Results(tmp_path, "abc")
    assert again.get("tests/test_a.py") == outcome
    assert soak.Results(tmp_path, "def").get("tests/test_a.py") is None
    again.forget()
    assert again.get("tests/test_a.py") is None


def test_what_failed_is_told_and_runs_again_and_what_passed_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("print('1 passed')", encoding="utf-8")
    bad.write_text("print('1 failed'); raise SystemExit(1)", encoding="utf-8")
    parts = {str(good): 2, str(bad): 1}
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    monkeypatch.setattr(soak, "WEIGHTS", {})
    monkeypatch.setattr(soak, "collect", lambda: parts)
    monkeypatch.setattr(soak, "commit_name", lambda: "abc")
    monkeypatch.setattr(soak, "command_of", lambda part: [sys.executable, part])
    assert soak.main([]) == 1
    first = capsys.readouterr()
    assert "2 parts, 0 of them have passed before" in first.out
    assert first.err.endswith(f"soak: failed: {bad}.\n")
    bad.write_text("print('1 passed')", encoding="utf-8")
    assert soak.main([]) == 0
    assert "2 parts, 1 of them have passed before" in capsys.readouterr().out
    assert soak.main(["--list"]) == 0
    assert capsys.readouterr().out.count(" ok ") == 2


def test_a_part_of_which_no_test_ran_has_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        soak, "command_of", lambda part: [sys.executable, "-c", "print('592 skipped, 8 deselected in 0.60s')"]
    )
    outcome, _ = soak.run_part("tests/test_a.py")
    assert not outcome.passed
    assert outcome.summary == "592 skipped, 8 deselected in 0.60s: no test of it ran"


def test_one_part_has_no_compiler_and_takes_every_test_of_what_computes() -> None:
    assert soak.variables_of(soak.NO_COMPILER) == {"PENSTOCK_CXX": "/nonexistent"}
    assert soak.variables_of("tests/unit/test_soak.py") == {}
    assert set(soak.COMPUTING) <= set(soak.command_of(soak.NO_COMPILER))
    assert all((soak.ROOT / place).exists() for place in soak.COMPUTING)
