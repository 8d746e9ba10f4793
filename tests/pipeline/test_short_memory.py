"""F9 in whole engines: a stage without memory for a plan, a host without memory for newcomers, the start."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints
from penstock.engine.core import core_assembly, memory_gate
from penstock.errors import PlanMemoryError
from penstock.models.decoder import Decoder
from small_engines import run, small_engine

PROMPTS = [[(11 * index + 5 * number) % 90 for index in range(25)] for number in range(2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    checkpoints.make_checkpoint(directory, layers=3, vocab_size=150, seed=2)
    return directory


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with small_engine(model) as llm:
        return run(llm, PROMPTS)[0]


@pytest.mark.parametrize("first_layer", [0, 1, 2])
def test_f9_a_plan_without_memory_ends_its_request_and_the_engine_goes_on(
    model: Path, expected: list[list[int]], first_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row F9, on a GPU that is played: one forward pass of one stage out of three has no memory."""
    forward, is_short = Decoder.forward, [False]

    @functools.wraps(forward)
    def short(decoder: Decoder, *inputs: Any) -> Any:
        if is_short[0] and decoder.start_layer == first_layer:
            is_short[0] = False
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(decoder, *inputs)

    monkeypatch.setattr(Decoder, "forward", short)
    with small_engine(model, pipeline_parallel_size=3) as llm:
        is_short[0] = True
        with pytest.raises(PlanMemoryError, match=f"stage {first_layer} had no memory left"):
            run(llm, PROMPTS[:1])
        assert run(llm, PROMPTS) == (expected, 0), "nothing of the plan that failed is found"
        stats = llm.stats()
        assert stats is not None
        assert (stats.scheduler.failed_steps, stats.restarts.core) == (1, 0)


def test_f9_requests_wait_while_the_host_is_short_of_memory_and_then_go_on(
    model: Path,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    short: list[int] = []  # what is free at the next looks; then there is enough

    monkeypatch.setattr(memory_gate, "LOOK_S", 0.0)
    monkeypatch.setattr(core_assembly, "host_available_bytes", lambda: short.pop() if short else 1 << 30)
    with caplog.at_level(logging.WARNING), small_engine(model) as llm:
        assert run(llm, PROMPTS[:1])[0] == expected[:1]
        short += [0, 0]
        assert run(llm, PROMPTS[1:])[0] == expected[1:]
    assert short == [], "it has waited for two looks"
    told = [record.getMessage() for record in caplog.records if "of free memory" in record.getMessage()]
    assert len(told) == 2, "once when it begins, once when it ends"
    assert told[0].endswith("no waiting request starts until more is free.")
    assert told[1].endswith("waiting requests start again.")


def test_f9_the_memory_of_each_stage_is_known_and_no_token_changes(
    model: Path, expected: list[list[int]]
) -> None:
    """Processes measure; threads of one would not know what is whose."""
    with small_engine(model, pipeline_parallel_size=2, distributed_executor_backend="mp") as llm:
        assert run(llm, PROMPTS)[0] == expected
        stats = llm.stats()
    assert stats is not None
    for stage in stats.stage_memory:
        assert stage.weight_bytes > 0
        assert stage.kv_bytes > 0
        assert stage.peak_bytes > 0, "our kernels' outputs are counted"
        assert stage.margin_bytes == 64 << 20
