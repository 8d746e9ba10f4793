"""The command `penstock simulate`: what it asks for, refuses and prints."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest

from penstock.cli.program import run
from penstock.cli.terminal import Invocation
from penstock.families.registry import load_spec
from small_shapes import write_small_llama


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_small_llama(tmp_path)


def simulate(*words: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    code = run(["simulate", *words], Invocation(stdout=out, stderr=err, stdin=StringIO(), environ={}))
    return code, out.getvalue(), err.getvalue()


LOAD = ("--num-requests", "6", "--input-len", "20", "--output-len", "5")


def test_the_report_is_json_and_the_same_again(model: str) -> None:
    words = (model, "--devices", "a100-80g:2", "--pp", "2", "--num-blocks", "200", *LOAD, "--json")
    code, out, err = simulate(*words)
    assert (code, err) == (0, "")
    numbers = json.loads(out)
    assert (numbers["completed"], numbers["total_output_tokens"]) == (6, 30)
    assert [stage["stage"] for stage in numbers["replicas"][0]["stages"]] == [0, 1]
    assert simulate(*words)[1] == out


def test_replicas_losses_and_guesses_by_flags(model: str, tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    code, out, err = simulate(
        model,
        *("--devices", "cpu:4c:8g:1x4@10GB/s@1Gbit@2ms"),
        *("--pp", "2", "--dp", "2", "--num-blocks", "200", "--jitter-ms", "1", "--acceptance", "0.5"),
        *("--lose-stage", "1.0@0.001:0.5", "--timeline", str(timeline), *LOAD),
    )
    assert (code, err) == (0, "")
    assert "replica 1 stage 0: busy" in out
    assert "lost" in out
    assert {event["ph"] for event in json.loads(timeline.read_text())["traceEvents"]} >= {"M", "X"}


def test_a_trace_is_replayed_scaled(model: str, tmp_path: Path) -> None:
    trace = tmp_path / "own.jsonl"
    rows = [{"input_len": 160, "output_len": 32, "arrival_s": 10.0 * number} for number in range(3)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (model, "--devices", "a100-80g", "--trace", str(trace), "--length-scale", "16", "--json")
    numbers = json.loads(simulate(*words, "--num-blocks", "200")[1])
    assert (numbers["total_input_tokens"], numbers["total_output_tokens"]) == (30, 6)
    assert numbers["duration"] == pytest.approx(20.0, abs=0.5)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--devices", "a100-80g:2", "--pp", "4"), "do not fit the 2 devices"),
        (("--devices", "a100-80g:3", "--tp", "3"), "--tensor-parallel-size is 3, but the model has 8"),
        (
            ("--devices", "a100-80g:2", "--tp", "2", "--model-impl", "transformers"),
            "--tensor-parallel-size is 2; LlamaForCausalLM runs through transformers' layers",
        ),
        (("--devices", "a100-80g", "--quantization", "int8"), "the weights are quantised, but a100-80g is"),
        (("--devices", "a100-80g:2", "--pp", "2", "--lose-stage", "2@1:1"), "no such stage"),
        (("--devices", "a100-80g:2", "--pp", "2", "--lose-stage", "x"), "no such stage"),
        (("--devices", "a100-80g:2", "--pp", "2", "--lose-stage", "1@.:1"), "a time is missing"),
        (("--devices", "a100-80g:2", "--pp", "2", "--lose-stage", "1@1.2.3:1"), "a time is missing"),
        (("--devices", "a100-80g", "--jitter-ms", "nan"), "--jitter-ms is nan; it must be between 0 and"),
        (("--devices", "a100-80g", "--jitter-ms", "inf"), "--jitter-ms is inf; it must be between 0 and"),
        (("--devices", "a100-80g", "--jitter-ms", "-5"), "--jitter-ms is -5; it must be between 0 and"),
        (("--devices", "a100-80g", "--step-spread", "nan"), "--step-spread is nan; it must be between 0"),
        (("--devices", "a100-80g", "--step-spread", "-1"), "--step-spread is -1; it must be between 0"),
        (("--devices", "here"), "--devices here stands for machines that are there"),
        (("--devices", "a100-80g:2", "--pp", "2", "--partition", "1,1,1"), "partition"),
        (("--devices", "a100-80g", "--acceptance", "1"), "acceptance is 1.0"),
        (("--devices", "a100-80g", "--max-concurrency", "0"), "max_concurrency is 0"),
        ((), "no devices are given"),
    ],
)
def test_what_cannot_be_simulated_is_refused(model: str, words: tuple[str, ...], why: str) -> None:
    code, _, err = simulate(model, *words)
    assert code == 2
    assert why in err


def test_the_layers_of_the_stages_are_those_that_the_user_gives(model: str) -> None:
    words = (model, "--devices", "cpu:4c:8g:2", "--num-blocks", "200", *LOAD, "--json")
    layers = load_spec(Path(model)).num_layers
    assert layers > 2
    stages = ("--pp", "2", "--partition", f"1,{layers - 1}")
    few, many = json.loads(simulate(*words, *stages)[1])["replicas"][0]["stages"]
    assert few["busy"] < many["busy"]
    other = ("--pp", "2", "--partition", f"{layers - 1},1")
    assert simulate(*words, *other)[1] != simulate(*words, *stages)[1]


def test_equal_stages_are_simulated_if_they_are_asked_for(tmp_path: Path) -> None:
    model = write_small_llama(tmp_path, num_hidden_layers=8)
    words = (model, "--devices", "cpu:16c:8g@200GB/s + cpu:1c:8g@5GB/s@1Gbit", "--pp", "2", *LOAD, "--json")
    outputs = [simulate(*words, "--partition", split)[1] for split in ("even", "4,4", "auto")]
    assert all(outputs)
    assert outputs[0] == outputs[1] != outputs[2]
    assert simulate(*words)[1] == outputs[2]


def test_a_seed_below_zero_is_one_of_its_own(model: str) -> None:
    words = (model, "--devices", "cpu:4c:8g:1x2@1Gbit", "--pp", "2", "--jitter-ms", "3", *LOAD, "--json")
    code, out, err = simulate(*words, "--seed", "-1")
    assert (code, err) == (0, "")
    assert simulate(*words, "--seed", "1")[1] != out


def test_a_trace_out_of_order_is_sent_at_its_times(model: str, tmp_path: Path) -> None:
    rows = [{"input_len": 8, "output_len": 4, "arrival_s": second} for second in (0.0, 20.0, 10.0)]
    outputs = []
    for name, own in (("mixed", rows), ("sorted", [rows[0], rows[2], rows[1]])):
        trace = tmp_path / f"{name}.jsonl"
        trace.write_text("".join(json.dumps(row) + "\n" for row in own))
        outputs.append(simulate(model, "--devices", "cpu:4c:8g", "--trace", str(trace), "--json")[1])
    numbers = [json.loads(out) for out in outputs]
    use = [each["replicas"][0]["kv"]["peak_use"] for each in numbers]
    assert use[0] == use[1]
    assert numbers[0]["p99_ttft_ms"] == pytest.approx(numbers[1]["p99_ttft_ms"])


def test_clients_beyond_the_requests_need_no_memory(model: str) -> None:
    words = (model, "--devices", "cpu:4c:8g", *LOAD, "--json")
    assert simulate(*words, "--max-concurrency", "1000000000")[1] == simulate(*words)[1]
