"""The engine as processes that streams join, as ranks on several hosts: same tokens, also after a loss."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from checkpoints import make_checkpoint
from disturbed import started_processes
from linked_engines import make_llm, tokens
from paths import REPOSITORY
from penstock.process import entry_points
from served import title_of
from stream_supervisor import ENVIRONMENT, MODULE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), layers=3, vocab_size=150, seed=3)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Engines that are started in the test have processes that streams join."""
    support = str(REPOSITORY / "tests" / "support")
    paths = [support, *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv(ENVIRONMENT, request.param)
    monkeypatch.setattr(entry_points, "SUPERVISOR", MODULE)


def stages() -> list[psutil.Process]:
    return [process for process in started_processes() if "penstock stage" in title_of(process)]


def has_streams(process: psutil.Process) -> bool:
    return any(joined.status == psutil.CONN_ESTABLISHED for joined in process.net_connections("tcp"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with make_llm(model, "inprocess") as llm:
        return tokens(llm)


@pytest.mark.parametrize(
    ("streams", "layout"),
    [
        ("tcp", {"pipeline_parallel_size": 3, "async_depth": 1}),
        pytest.param(
            "tls", {"pipeline_parallel_size": 2, "tensor_parallel_size": "1,2"}, marks=pytest.mark.soak
        ),
    ],
    indirect=["streams"],
    ids=str,
)
def test_g1_a10_processes_that_streams_join_give_the_same_tokens(
    streams: None, model: Path, expected: list[list[int]], layout: dict[str, Any]
) -> None:
    with make_llm(model, **layout) as llm:
        assert tokens(llm) == expected
        assert all(map(has_streams, stages()))


@pytest.mark.parametrize("streams", ["tls"], indirect=True)
def test_g1_r4_a_stage_that_is_killed_comes_back_over_new_streams(
    streams: None, model: Path, expected: list[list[int]]
) -> None:
    with make_llm(model, pipeline_parallel_size=2) as llm:
        assert tokens(llm) == expected
        (victim,) = [process for process in stages() if "stage 1" in title_of(process)]
        victim.kill()
        assert tokens(llm) == expected
        assert victim.pid not in {process.pid for process in stages()}
        assert all(map(has_streams, stages()))
