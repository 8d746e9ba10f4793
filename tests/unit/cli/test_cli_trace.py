"""`trace` against a made-up server."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import trace as cli_trace
from penstock.cli.program import run
from penstock.cli.terminal import Invocation

TRACE = {"traceEvents": [{"ph": "X"}, {"ph": "X"}], "otherData": {"bubbles": ["stage 0: \x1b[2J busy"]}}


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the server answers; then the url that was asked."""
    answers: list[Any] = [TRACE]

    def get_json(target: Any, path: str, timeout_s: float) -> Any:
        answers.append(target.url + path)
        return answers[0]

    monkeypatch.setattr(cli_trace, "get_json", get_json)
    return answers


def trace(*words: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    code = run(["trace", *words], Invocation(stdout=out, stderr=err, stdin=StringIO(), environ={}))
    return code, out.getvalue(), err.getvalue()


def test_d6_the_trace_is_saved_and_its_report_is_printed(answer: list[Any], tmp_path: Path) -> None:
    code, out, _ = trace("--url", "http://127.0.0.1:81", "--out", str(tmp_path / "t.json"))
    assert code == 0
    assert answer[1] == "http://127.0.0.1:81/debug/trace"
    assert json.loads((tmp_path / "t.json").read_text()) == TRACE
    assert "stage 0:" in out
    assert "\x1b" not in out
    assert "2 events" in out
    assert "ui.perfetto.dev" in out


def test_no_reports_are_said_to_be_none(answer: list[Any], tmp_path: Path) -> None:
    answer[0] = {"traceEvents": [], "otherData": {"bubbles": []}}
    assert "no stage has reported yet" in trace("--out", str(tmp_path / "t.json"))[1]


@pytest.mark.parametrize("found", [{}, {"traceEvents": 3, "otherData": {}}, {"traceEvents": []}])
def test_another_servers_answer_is_refused(answer: list[Any], tmp_path: Path, found: Any) -> None:
    answer[0] = found
    code, _, err = trace("--out", str(tmp_path / "t.json"))
    assert code == 5
    assert "not a trace" in err
    assert not (tmp_path / "t.json").exists()


def test_a_file_that_cannot_be_written_is_a_usage_error(answer: list[Any], tmp_path: Path) -> None:
    code, _, err = trace("--out", str(tmp_path / "missing" / "t.json"))
    assert code == 2
    assert "--out" in err
