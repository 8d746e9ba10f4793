"""`penstock replay`: what it says, and with which exit code."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest

from penstock.cli.program import run
from penstock.cli.terminal import Invocation
from penstock.scheduler.chunking import TokenBudget
from recorded_runs import prompt, recorded


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log"
    with recorded(path) as recorded_run:
        for number in range(3):
            recorded_run.add(f"r{number}", prompt(8, start=number), max_tokens=6, ignore_eos=True)
    return path


def said(*words: str, code: int = 0) -> str:
    out, err = StringIO(), StringIO()
    invocation = Invocation(stdout=out, stderr=err, stdin=StringIO(), environ={})
    assert run(["replay", *words], invocation) == code, err.getvalue()
    return out.getvalue() + err.getvalue()


def test_equal_plans_are_counted(log: Path) -> None:
    assert "steps, all plans equal; 3 requests\n" in said(str(log))
    numbers = json.loads(said(str(log), "--json"))
    assert (numbers["equal"], numbers["whole"], numbers["requests"]) == (True, True, 3)
    assert said(str(log)).startswith(f"{numbers['plans']} steps")


def test_a_step_is_explained(log: Path) -> None:
    shown = said(str(log), "--explain", "2")
    assert shown.startswith("step 2: ")
    assert "all plans equal" in shown


def test_a_step_that_is_not_there_is_told(log: Path) -> None:
    assert "step 7000 is not among the" in said(str(log), "--explain", "7000", code=2)


def test_both_plans_are_shown_where_they_differ(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenBudget, "decode_quota", lambda *arguments: 1)
    lines = said(str(log), code=1).splitlines()
    assert " plans were equal; step " in lines[0]
    assert lines[1].split() == ["recorded", "made", "now"]
    assert any(line.split()[0] == "rows" for line in lines[2:])
    difference = json.loads(said(str(log), "--json", code=1))["difference"]
    assert difference["recorded"]["rows"] != difference["made"].get("rows")


def test_a_file_that_was_cut_says_so(log: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(log.read_bytes()[:-40])
    assert "the file ends early" in said(str(part))


def test_no_file_is_a_usage_error() -> None:
    assert "--record-decisions FILE` writes one" in said(code=2)
