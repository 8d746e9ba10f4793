"""`bench sweep` with real engines: a layout that runs, and one that the model does not have layers for."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest

from penstock.cli.program import run
from penstock.cli.terminal import Invocation

SMALL = "--dtype float32 --threads-per-rank 1 --num-blocks 64 --max-model-len 128"
LOAD = "--input-len 8 --output-len 12 --depth 1 --concurrency 2 --predict off --json"


def test_i12_a_sweep_measures_what_runs_and_records_what_does_not(tmp_path: Path) -> None:
    out, err = StringIO(), StringIO()
    invocation = Invocation(stdout=out, stderr=err, stdin=StringIO(), environ={})
    words = ["bench", "sweep", "demo", "--pp", "2,99", *SMALL.split(), *LOAD.split()]
    words += ["--results", str(tmp_path / "sweep.jsonl")]
    assert run(words, invocation) == 1
    report = json.loads(out.getvalue())
    (swept,) = report["runs"]
    assert (swept["series"], swept["completed"], swept["output_tokens"]) == ("PP 2 x TP 1, depth 1", 8, 96)
    assert {name: each["count"] for name, each in swept["latencies_ms"].items() if name != "itl"} == {
        "ttft": 8,
        "tpot": 8,
        "e2el": 8,
    }
    first, last = swept["stages"]
    assert first["sampling"] == 0.0
    assert 0.0 < last["sampling"] < 1.0
    assert 0.0 < swept["bubble"] < 1.0
    for stage in (first, last):
        assert stage["busy"] + sum(stage["causes"].values()) + stage["overhead"] == pytest.approx(1.0)
        assert stage["weight_bytes"] > 0
        assert stage["resident_bytes"] > stage["weight_bytes"]
    (failed,) = report["failed"]
    assert (failed["series"], failed["concurrency"]) == ("PP 99 x TP 1, depth 1", 2)
    assert "99" in failed["error"]
