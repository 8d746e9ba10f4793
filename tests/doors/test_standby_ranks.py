"""A rank that was started and loaded beside a running pipe takes the place of one that is killed."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import psutil
import pytest

from checkpoints import make_checkpoint
from disturbed import started_processes
from linked_engines import make_llm, tokens
from paths import REPOSITORY
from penstock.process import entry_points
from served import is_alive, title_of, wait_until
from standby_supervisor import MODULE, STAGE

pytestmark = pytest.mark.doors
WAIT_S = 60.0


@pytest.fixture
def standbys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are started in the test keep a standby of the last of two stages."""
    paths = [str(REPOSITORY / "tests" / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setattr(entry_points, "SUPERVISOR", MODULE)


def ranks() -> list[psutil.Process]:
    """Of the last stage: that of the pipe and its standby."""
    return [process for process in started_processes() if f"penstock stage {STAGE}" in title_of(process)]


def noted(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


def test_g1_r4_a_standby_takes_over_with_its_weights_and_the_tokens_stay_the_same(
    standbys: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_checkpoint(tmp_path / "model", layers=3, vocab_size=150, seed=3)
    caplog.set_level(logging.INFO, "penstock")
    waits, takes = "has loaded its weights, and waits", "takes its place, with its weights in memory"
    with make_llm(model, pipeline_parallel_size=2, warm_spare=False) as llm:
        expected = tokens(llm)
        for round_number in (1, 2):
            wait_until(lambda number=round_number: noted(caplog, waits) == number, WAIT_S)
            victim, standby = sorted(ranks(), key=lambda process: process.create_time())
            victim.kill()
            assert tokens(llm) == expected
            assert noted(caplog, takes) == round_number
            assert is_alive(standby)
            assert victim.pid not in {process.pid for process in ranks()}
        wait_until(lambda: noted(caplog, waits) == 3, WAIT_S)
        family = ranks()
    assert len(family) == 2
    assert not any(map(is_alive, family))
