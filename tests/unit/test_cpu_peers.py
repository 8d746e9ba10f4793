"""What `benchmarks/cpu_peers.py` computes from times, and the checkpoint that it makes."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from paths import REPOSITORY
from penstock.families.registry import load_spec

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    report: Any = importlib.import_module("peers.report")
    checkpoint: Any = importlib.import_module("peers.checkpoint")
    protocol: Any = importlib.import_module("peers.peer_protocol")

SHORT = report.Case(kind="prefill", batch=1, input=512, output=1)
LONG = report.Case(kind="prefill", batch=1, input=4096, output=1)
DECODE = report.Case(kind="decode", batch=8, input=128, output=128)
ALONE = report.Case(kind="decode", batch=1, input=128, output=128)


def test_a_prefill_counts_milliseconds_and_a_decode_only_what_follows_the_first_token() -> None:
    assert SHORT.value(0.5, 0.0) == 500
    assert DECODE.value(1.0, 3.0) == 8 * 127 / 2


def test_a_difference_swallowed_by_noise_is_no_sample() -> None:
    values = [DECODE.value(1.0, 1.0), DECODE.value(1.0, 0.9)]
    assert all(math.isnan(value) for value in values)
    assert report.medians({DECODE: [*values, 10.0, 30.0, 20.0], ALONE: values}) == {DECODE: 20.0}
    assert report.format_samples(values) == "-"


def test_samples_are_shown_as_median_and_spread() -> None:
    assert report.format_samples([40.04, 41.26, 39.9]) == "40.0 (39.9 to 41.3)"
    assert report.format_samples([1234.5]) == "1,234"


def test_the_results_table_has_growth_and_share_of_bandwidth() -> None:
    samples = {"penstock": {SHORT: [512.0], LONG: [6144.0], ALONE: [36.0]}, "vllm": {SHORT: [600.0]}}
    table = report.results_table([SHORT, LONG, ALONE], samples, step_bytes=10**9, bytes_per_s=40e9)
    assert table.splitlines()[2:] == [
        "| penstock | 512 | 6,144 | 36.0 | 1.50 | 90% |",
        "| vllm | 600 | - | - | - | - |",
    ]


def test_ratios_are_ours_over_each_peer_and_over_the_best_of_each_case() -> None:
    samples = {
        "penstock": {SHORT: [400.0], DECODE: [300.0]},
        "llama": {SHORT: [800.0], DECODE: [200.0]},
        "vllm": {SHORT: [500.0], DECODE: [150.0], ALONE: [1.0]},
    }
    assert report.ratio_table([SHORT, LONG, DECODE, ALONE], samples).splitlines() == [
        "| ratio of medians | TTFT of 512 | TTFT of 4,096 | decode B=8 | decode B=1 |",
        "| --- | --- | --- | --- | --- |",
        "| penstock / llama | 0.50 | - | 1.50 | - |",
        "| penstock / vllm | 0.80 | - | 2.00 | - |",
        "| penstock / best peer | 0.80 | - | 1.50 | - |",
    ]


@pytest.mark.parametrize("names", [["penstock"], ["llama", "vllm"], []])
def test_there_are_no_ratios_without_us_or_without_peers(names: list[str]) -> None:
    assert report.ratio_table([SHORT], {name: {SHORT: [1.0]} for name in names}) == ""


def test_prompts_depend_on_the_seed_alone_and_hold_no_special_token() -> None:
    prompts = protocol.random_prompts(3, 50, 512, seed=7)
    assert prompts == protocol.random_prompts(3, 50, 512, seed=7)
    assert prompts != protocol.random_prompts(3, 50, 512, seed=8)
    assert [len(prompt) for prompt in prompts] == [50] * 3
    assert all(protocol.FIRST_ID <= token < 512 for prompt in prompts for token in prompt)


def test_the_checkpoint_has_the_parameters_that_its_config_names(tmp_path: Path) -> None:
    checkpoint.make_checkpoint(tmp_path, checkpoint.TINY_SHAPE)
    spec = load_spec(tmp_path)
    tensor_bytes = checkpoint.weight_bytes(tmp_path)
    assert tensor_bytes == checkpoint.ITEM_BYTES * spec.stage_parameters(0, spec.num_layers)
    content = (tmp_path / "model.safetensors").read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    assert len(content) == 8 + header_bytes + tensor_bytes
    assert "model.norm.weight" in json.loads(content[8 : 8 + header_bytes])
    checkpoint.make_checkpoint(tmp_path, checkpoint.FULL_SHAPE)  # there is one: kept as it is
    assert (tmp_path / "model.safetensors").read_bytes() == content
