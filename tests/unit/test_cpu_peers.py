"""What `benchmarks/cpu_peers.py` reads from its arguments and computes from times; its checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paths import REPOSITORY
from penstock.families.registry import load_spec

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    report: Any = importlib.import_module("peers.report")
    checkpoint: Any = importlib.import_module("peers.checkpoint")
    cpu_peers: Any = importlib.import_module("cpu_peers")
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


FORMS = {
    "penstock": {SHORT: [400.0]},
    "penstock:int8": {SHORT: [200.0]},
    "vllm": {SHORT: [500.0]},
    "openvino:fp16": {SHORT: [800.0]},
    "openvino:int8": {SHORT: [100.0]},
    "ik_llama:q8_0": {SHORT: [50.0]},
    "ik_llama:iq4_nl": {SHORT: [25.0]},
}


def test_engines_are_compared_with_those_whose_weights_have_as_many_bits() -> None:
    tables = report.ratio_tables([SHORT], FORMS)
    assert [table.splitlines()[2:] for table in tables] == [
        [
            "| penstock / vllm | 0.80 |",
            "| penstock / openvino:fp16 | 0.50 |",
            "| penstock / best peer | 0.80 |",
        ],
        [
            "| penstock:int8 / openvino:int8 | 2.00 |",
            "| penstock:int8 / ik_llama:q8_0 | 4.00 |",
            "| penstock:int8 / best peer | 4.00 |",
        ],
        ["| penstock:int8 / penstock | 0.50 |"],
    ]


@pytest.mark.parametrize("names", [["penstock"], ["penstock:int8"], ["vllm", "openvino:int8"], []])
def test_there_are_no_ratio_tables_of_one_engine_or_without_us(names: list[str]) -> None:
    assert report.ratio_tables([SHORT], {name: FORMS[name] for name in names}) == []


def test_an_engine_with_a_form_of_its_own_has_no_share_of_the_bandwidth() -> None:
    samples = {"penstock": {ALONE: [30.0]}, "penstock:int8": {ALONE: [50.0]}}
    table = report.results_table([ALONE], samples, step_bytes=10**9, bytes_per_s=40e9)
    assert table.splitlines()[2:] == ["| penstock | 30.0 | - | 75% |", "| penstock:int8 | 50.0 | - | - |"]


def test_engines_without_an_environment_by_default_run_if_they_are_given_one() -> None:
    usual = ["penstock", "transformers", "llama", "vllm"]
    assert cpu_peers.parse_options([]).engines == usual
    assert cpu_peers.parse_options(["--openvino-python", "x"]).engines == [*usual, "openvino"]
    assert cpu_peers.parse_options(["--engines", "vllm,ik_llama:q8_0"]).engines == ["vllm", "ik_llama:q8_0"]


@pytest.mark.parametrize("words", ["penstok", "penstok:int8", "vllm:int8", "transformers:"])
def test_an_unknown_engine_and_a_form_of_one_without_forms_are_refused(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cpu_peers.parse_options(["--engines", words])
    assert f"{words.partition(':')[0]} is none of penstock, " in capsys.readouterr().err


def test_lengths_may_be_chosen_and_are_otherwise_those_of_the_model() -> None:
    chosen = cpu_peers.parse_options(
        ["--inputs", "512,4096,16384", "--batches", "8", "--input", "1024", "--rounds", "1"]
    )
    cases = cpu_peers.cases_of(chosen)
    assert [(case.kind, case.batch, case.input, case.output) for case in cases] == [
        ("prefill", 1, 512, 1),
        ("prefill", 1, 4096, 1),
        ("prefill", 1, 16384, 1),
        ("decode", 8, 1024, 128),
    ]
    usual, quick = (cpu_peers.cases_of(cpu_peers.parse_options(words)) for words in ([], ["--quick"]))
    assert usual == [SHORT, LONG, *(dataclasses.replace(DECODE, batch=batch) for batch in (1, 8, 32))]
    assert [case.input for case in quick] == [32, 256, 16, 16]


def test_the_shown_command_has_the_choices_and_no_paths() -> None:
    words = ["--engines", "penstock:int8,ik_llama:q8_0", "--quick", "--model", "/somewhere/model"]
    words += ["--ik-llama-python", "/somewhere/python", "--ik-llama-programs", "/somewhere/bin"]
    assert cpu_peers.shown_command(cpu_peers.parse_options(words)) == (
        "python benchmarks/cpu_peers.py --engines penstock:int8,ik_llama:q8_0 --cases prefill,decode"
        " --inputs 32,256 --batches 1,2 --input 16 --threads 2 --rounds 3 --quick"
        " --ik-llama-python ... --ik-llama-programs ..."
    )


class StartedEngines:
    """Records what `measure` starts, in place of a `Run`."""

    def __init__(self) -> None:
        self.results = cpu_peers.Results()
        self.started: list[tuple[Any, ...]] = []

    def start(self, *arguments: Any) -> None:
        self.started.append(arguments)

    def start_probe(self) -> None: ...

    def warm_up(self) -> None: ...


def test_each_engine_is_started_with_its_form_and_its_programs(tmp_path: Path) -> None:
    run = StartedEngines()
    words = ["--engines", "penstock,openvino,openvino:int8,ik_llama:q8_0", "--rounds", "0"]
    words += ["--penstock-python", "p", "--openvino-python", "o", "--ik-llama-python", "i"]
    cpu_peers.measure(run, cpu_peers.parse_options([*words, "--ik-llama-programs", str(tmp_path)]))
    assert run.started == [
        ("penstock", "p", "penstock", []),
        ("openvino", "o", "openvino", []),
        ("openvino:int8", "o", "openvino", ["--weights", "int8"]),
        ("ik_llama:q8_0", "i", "ik_llama", ["--weights", "q8_0", "--programs", str(tmp_path)]),
    ]


def test_an_engine_that_lacks_an_option_is_left_out_and_the_option_is_named() -> None:
    run = StartedEngines()
    words = ["--engines", "vllm,openvino:int8,ik_llama", "--ik-llama-python", "i", "--rounds", "0"]
    cpu_peers.measure(run, cpu_peers.parse_options(words))
    assert run.started == []
    assert run.results.notes == [
        "vllm is left out: give --vllm-python",
        "openvino:int8 is left out: give --openvino-python",
        "ik_llama is left out: give --ik-llama-programs",
    ]


class CountingEngine:
    """Returns the seconds of the test in place of its own."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds

    def generate(self, prompts: list[list[int]], num_tokens: int) -> float | None:
        assert len(prompts) == 2
        assert num_tokens == 5
        return self._seconds

    def close(self) -> None: ...


@pytest.mark.parametrize("counted", [12.5, 0.0, None])
def test_seconds_that_an_engine_counts_itself_take_the_place_of_the_clock(
    counted: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')
    answers: list[float] = []

    def answer_one(_: Any, answer: Callable[[dict[str, int]], dict[str, float]], **__: Any) -> None:
        answers.append(answer({"batch": 2, "input": 3, "output": 5, "seed": 1})["seconds"])

    settings = protocol.Settings(model=tmp_path, threads=1, max_batch=2, max_len=8)
    monkeypatch.setattr(protocol, "claim_stdout", contextlib.nullcontext)
    monkeypatch.setattr(protocol, "die_with_parent", lambda: None)
    monkeypatch.setattr(protocol, "read_settings", lambda: settings)
    monkeypatch.setattr(protocol, "answer_lines", answer_one)
    protocol.serve(lambda _: protocol.Loaded(generator=CountingEngine(counted), packages=()))
    assert answers == [counted] if counted is not None else 0 < answers[0] < 12
