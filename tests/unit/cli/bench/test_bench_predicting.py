"""What is predicted beside a benchmark: the layout that runs, under its load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.cli.bench.predicting import predictions, served_config, served_layers
from penstock.config.declared import configured_engine
from penstock.config.engine import EngineConfig
from penstock.errors import NotEnoughMemoryError, UsageError
from small_shapes import write_small_llama


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_small_llama(tmp_path)


def engine(model: str, **given: Any) -> EngineConfig:
    return configured_engine({"pipeline_parallel_size": 2, "num_blocks": 400, **given}, model)


def test_each_concurrency_has_its_prediction(model: str) -> None:
    found = predictions(engine(model), "a100-80g:2", [1, 32], (16, 8), print)
    assert list(found) == [1, 32]
    assert found[32].tokens_per_s > found[1].tokens_per_s
    assert found[1].bubble >= 0.5  # one request keeps one of two stages busy
    assert found[1].basis.startswith("Predictions assume that devices reach a fixed share")


def test_the_split_that_runs_is_predicted(model: str) -> None:
    even = predictions(engine(model), "a100-80g:2", [32], (16, 8), print)
    named = predictions(engine(model, partition="5,1"), "a100-80g:2", [32], (16, 8), print)
    assert named[32].time_per_token_s > even[32].time_per_token_s
    assert predictions(engine(model), "a100-80g:2", [32], (16, 8), print, layers=[5, 1]) == named


def test_longer_prompts_have_a_later_first_token(model: str) -> None:
    short = predictions(engine(model), "cpu:2c:64g:1x2@1Gbit@1ms", [4], (16, 8), print)
    long = predictions(engine(model), "cpu:2c:64g:1x2@1Gbit@1ms", [4], (1600, 8), print)
    assert long[4].ttft_s > 2 * short[4].ttft_s


def test_what_cannot_run_is_not_predicted(model: str) -> None:
    with pytest.raises(UsageError, match="do not fit the 1 devices"):
        predictions(engine(model), "a100-80g:1", [1], (16, 8), print)
    with pytest.raises(UsageError, match="different numbers of ranks"):
        predictions(engine(model, tensor_parallel_size="2,1"), "a100-80g:4", [1], (16, 8), print)
    with pytest.raises(NotEnoughMemoryError, match="does not fit"):
        predictions(engine(model, num_blocks=10**9), "a100-80g:2", [1], (16, 8), print)


def test_a_server_tells_its_layout(model: str) -> None:
    stages = [{"start_layer": 0, "end_layer": 4}, {"start_layer": 4, "end_layer": 6}]
    settings = {"tensor-parallel-size": 2, "num-blocks": 33, "api-key": "set", "port": 9, "dtype": "float16"}
    info = {"stages": stages, "settings": settings}
    config = served_config(info, model)
    assert (config.parallel.pipeline_parallel_size, config.parallel.tp_sizes) == (2, [2, 2])
    assert (config.cache.num_blocks, config.model.dtype) == (33, "float16")
    assert served_layers(info) == [4, 2]
    assert served_layers({}) is None
