"""The engine over two hosts, the second of which an agent serves: same tokens, also after a loss."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_supervisor import MODEL, MODULE
from checkpoints import make_checkpoint
from disturbed import started_processes
from paths import REPOSITORY
from penstock import LLM, SamplingParams
from penstock.process import entry_points
from served import title_of

PROMPTS = [{"prompt_token_ids": [(7 * i + 3 * j) % 90 for j in range(5 + 11 * i)]} for i in range(4)]
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=7, max_tokens=12, ignore_eos=True),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), layers=3, vocab_size=150, seed=3)


@pytest.fixture
def two_hosts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are started in the test have two hosts."""
    support = str(REPOSITORY / "tests" / "support")
    paths = [support, *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv(MODEL, str(model))
    monkeypatch.setattr(entry_points, "SUPERVISOR", MODULE)


def make_llm(model: Path, backend: str = "mp", **layout: Any) -> LLM:
    return LLM(
        str(model),
        dtype="float32",
        threads_per_rank=1,
        distributed_executor_backend=backend,  # type: ignore[arg-type]
        **layout,
    )


def tokens(llm: LLM) -> list[list[int]]:
    return [
        output.outputs[0].token_ids for sampling in SAMPLINGS for output in llm.generate(PROMPTS, sampling)
    ]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with make_llm(model, "inprocess") as llm:
        return tokens(llm)


def titled(words: str) -> list[psutil.Process]:
    return [process for process in started_processes() if words in title_of(process)]


@pytest.mark.parametrize("layout", [{"pipeline_parallel_size": 3}], ids=str)
def test_g1_two_hosts_give_the_tokens_of_one(
    two_hosts: None, model: Path, expected: list[list[int]], layout: dict[str, Any]
) -> None:
    with make_llm(model, **layout) as llm:
        assert tokens(llm) == expected
        (agent,) = titled("penstock agent")
        stages = {title_of(process) for process in agent.children() if "stage" in title_of(process)}
        assert stages == {"penstock stage 2 tp 0"}, "the stages go to the hosts in order"
        assert len(titled("penstock stage")) == 3


def test_g1_r4_a_stage_of_another_host_that_is_killed_comes_back(
    two_hosts: None, model: Path, expected: list[list[int]]
) -> None:
    with make_llm(model, pipeline_parallel_size=2) as llm:
        assert tokens(llm) == expected
        (victim,) = titled("penstock stage 1")
        victim.kill()
        assert tokens(llm) == expected
        assert victim.pid not in {process.pid for process in titled("penstock stage")}
