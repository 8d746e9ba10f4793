"""The ranks that benchmarks start in place of real ones: the rest of the engine takes them for such."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paths import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
NUM_STAGES, SLEEP_MS, NUM_TOKENS = 2, 60.0, 5

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(BENCHMARKS))
    pipeline_fill: Any = importlib.import_module("pipeline_fill")
    checkpoint: Any = importlib.import_module("peers.checkpoint")


def run(*words: str) -> str:
    """A program in the folder of the benchmarks; what it prints. That a bar is missed is no failure here."""
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=110, check=False, cwd=BENCHMARKS
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout + done.stderr


@pytest.mark.soak
def test_a_stub_rank_answers_every_plan(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ["--requests", "2", "--steps", "100", "--cadence-ms", "5", "--json", str(file)]
    text = run("core_step_cost.py", *words)
    assert "Ledger: 2 requests, 600 tokens, each exactly once" in text, text
    assert json.loads(file.read_text())["steps"] > 0


SMALL_SHAPE = """
import load_memory
load_memory.HIDDEN, load_memory.INTERMEDIATE = 64, 128
load_memory.HEADS, load_memory.KV_HEADS = 4, 2
load_memory.main()
"""


@pytest.mark.soak
def test_a_measured_rank_writes_down_what_it_has_read() -> None:
    text = run("-c", SMALL_SHAPE, "--layers", "2")
    found = re.findall(r"stage (\d)  own tensors +([\d.]+) MB   read +([\d.]+) MB", text)
    assert [int(stage) for stage, _, _ in found] == [0, 1], text
    for _, own, read in found:
        assert float(read) == pytest.approx(float(own), rel=0.03)


@pytest.mark.soak
def test_a_sleeping_rank_sleeps_once_a_step_and_stage(tmp_path: Path) -> None:
    model = tmp_path / "model"
    checkpoint.make_checkpoint(model, checkpoint.TINY_SHAPE)
    options = argparse.Namespace(stages=NUM_STAGES, sleep_ms=SLEEP_MS)
    server = pipeline_fill.start(model, options, 0)
    try:
        server.wait_ready(pipeline_fill.START_S)
        began, ended = pipeline_fill.run(server, 1, NUM_TOKENS)
    finally:
        server.close()
    assert (ended - began) / 1e6 >= NUM_STAGES * NUM_TOKENS * SLEEP_MS
