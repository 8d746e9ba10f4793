"""A rank that was started and loaded beside a running pipe takes the place of one that is killed."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from checkpoints import make_checkpoint
from disturbed import started_processes
from hand_core import Crew
from linked_engines import make_llm, tokens
from paths import REPOSITORY
from penstock import LLM
from penstock.process import entry_points
from served import is_alive, title_of, wait_until
from standby_supervisor import MODULE, STAGE
from worker_programs import WorkerPrograms

pytestmark = pytest.mark.doors
WAIT_S = 60.0


@pytest.fixture
def standbys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are started in the test keep a standby of the last of two stages."""
    paths = [str(REPOSITORY / "tests" / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setattr(entry_points, "SUPERVISOR", MODULE)


def ranks() -> list[psutil.Process]:
    """Of the last stage, on any host: that of the pipe and its standby."""
    return [process for process in started_processes() if f"penstock stage {STAGE}" in title_of(process)]


def lose_rank_and_have_standby(llm: LLM, round_number: int, caplog: pytest.LogCaptureFixture) -> None:
    """Kill the rank of the pipe, once its standby waits; what is asked afterwards goes to the standby."""

    def noted(text: str) -> int:
        return sum(text in record.getMessage() for record in caplog.records)

    expected = tokens(llm)
    wait_until(lambda: noted("has loaded its weights and is ready") == round_number, WAIT_S)
    victim, standby = sorted(ranks(), key=lambda process: process.create_time())
    victim.kill()
    assert tokens(llm) == expected
    assert noted("takes over, with its weights in memory") == round_number
    assert is_alive(standby)
    assert victim.pid not in {process.pid for process in ranks()}


def test_g1_r4_a_standby_takes_over_with_its_weights_and_the_tokens_stay_the_same(
    standbys: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_checkpoint(tmp_path / "model", layers=3, vocab_size=150, seed=3)
    caplog.set_level(logging.INFO, "penstock")
    with make_llm(model, pipeline_parallel_size=2, warm_spare=False) as llm:
        for round_number in (1, 2):
            lose_rank_and_have_standby(llm, round_number, caplog)
        wait_until(lambda: len(ranks()) == 2, WAIT_S)
        family = ranks()
    assert not any(map(is_alive, family))


def test_g1_r15_a_standby_at_another_host_takes_over_there(
    standbys: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_checkpoint(tmp_path / "head" / "model", layers=3, vocab_size=150, seed=3)
    shutil.copytree(model, tmp_path / "workers" / "model")
    caplog.set_level(logging.INFO, "penstock")
    programs = WorkerPrograms(tmp_path, tmp_path / "workers", 2)
    crew = Crew()

    def join() -> None:
        programs.await_token()
        programs.start("desk")

    crew.start(join)
    settings: dict[str, Any] = programs.settings()
    try:
        with make_llm(model, pipeline_parallel_size=2, warm_spare=False, **settings) as llm:
            crew.join()
            lose_rank_and_have_standby(llm, 1, caplog)
            (desk,) = programs.running
            assert {process.pid for process in desk.stages} >= {process.pid for process in ranks()}
    finally:
        programs.close()
