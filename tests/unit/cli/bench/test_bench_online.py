"""`bench serve` from the command line against a made-up server: exact replay, exit codes, no leaked key."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from fake_completions_server import Script, completion_events, completions_server
from penstock.cli.bench.http_stream import Target
from penstock.cli.http_client import wait_ready
from penstock.cli.program import run
from penstock.cli.terminal import Invocation
from penstock.errors import WaitTimeoutError
from small_shapes import write_small_llama


def bench(url: str, *flags: str, environ: dict[str, str] | None = None) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    invocation = Invocation(stdout=out, stderr=err, stdin=StringIO(), environ=environ or {})
    code = run(["bench", "serve", "--base-url", url, *flags], invocation)
    return code, out.getvalue(), err.getvalue()


LOAD = ["--num-prompts", "12", "--random-input-len", "5", "--random-output-len", "6"]


def test_r1_a_load_in_order_is_booked_whole(tmp_path: Path) -> None:
    script = Script(lambda body, number: completion_events(body, number, per_chunk=2))
    result_file = tmp_path / "r.json"
    with completions_server(script) as url:
        code, out, _ = bench(url, *LOAD, "--result-file", str(result_file))
    assert code == 0
    assert "Ledger: 12 requests, 72 tokens, each exactly once" in out
    found = json.loads(result_file.read_text())
    assert (found["completed"], found["total_input_tokens"], found["total_output_tokens"]) == (12, 60, 72)
    assert found["request_rate"] == "inf"
    assert len(script.requests) == 12
    for body in script.requests:
        assert body["path"] == "/v1/completions"
        assert body["ignore_eos"] is True
        assert body["return_token_ids"] is True
        assert body["stream_options"] == {"include_usage": True}
        assert body["max_tokens"] == 6
        assert all(0 <= token < 64 for token in body["prompt"])


def test_concurrency_is_bounded() -> None:
    script = Script(completion_events)
    with completions_server(script) as url:
        code, out, _ = bench(url, *LOAD, "--max-concurrency", "1")
    assert code == 0
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("Peak")] == ["1"]


def without_token(body: dict[str, Any], number: int) -> list[bytes | None]:
    events = completion_events(body, number)
    return events[:2] + events[3:] if number == 3 else events


def cut(body: dict[str, Any], number: int) -> list[bytes | None]:
    return [*completion_events(body, number)[:2], None] if number == 3 else completion_events(body, number)


def typed_error(body: dict[str, Any], number: int) -> list[bytes | None]:
    error = b'{"error":{"message":"stage 1 is lost","type":"x","param":null,"code":"x"}}'
    return [completion_events(body, number)[0], error] if number == 3 else completion_events(body, number)


@pytest.mark.parametrize(
    ("events", "told"), [(without_token, "1 tokens lost"), (cut, "closed the connection early")]
)
def test_r1_a_lost_token_or_a_cut_stream_fails_the_run(events: Any, told: str) -> None:
    with completions_server(Script(events)) as url:
        code, out, _ = bench(url, *LOAD)
    assert code == 1
    assert told in out


def test_r1_a_typed_error_fails_the_run_unless_allowed() -> None:
    with completions_server(Script(typed_error)) as url:
        assert bench(url, *LOAD)[0] == 1
    with completions_server(Script(typed_error)) as url:
        code, out, _ = bench(url, *LOAD, "--allow-errors")
    assert code == 0
    assert "1 ended with an error" in out


def test_a_full_server_is_reported_with_its_words() -> None:
    body = b'{"error":{"message":"the queue is full","type":"x","param":null,"code":"queue_full"}}'
    with completions_server(Script(completion_events, status=429, error_body=body)) as url:
        code, out, _ = bench(url, *LOAD, "--allow-errors")
    assert code == 0
    assert "12 ended with an error" in out
    assert "Successful requests:                     0" in out


def test_the_key_comes_from_the_environment_and_is_never_shown(tmp_path: Path) -> None:
    script = Script(completion_events)
    result_file = tmp_path / "r.json"
    with completions_server(script) as url:
        environ = {"PENSTOCK_API_KEY": "s3cret,other"}
        code, out, err = bench(url, *LOAD, "--result-file", str(result_file), environ=environ)
    assert code == 0
    assert {headers["Authorization"] for headers in script.headers} == {"Bearer s3cret"}
    assert "s3cret" not in out + err + result_file.read_text()


def test_a_trace_is_replayed_at_its_scale(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,64,32\n2023-11-16 18:15:50.9951690,160,3\n"
    )
    script = Script(completion_events)
    flags = ["--dataset-name", "azure", "--dataset-path", str(trace), "--num-prompts", "2"]
    with completions_server(script) as url:
        code, out, _ = bench(url, *flags, "--length-scale", "16", "--time-scale", "0.001")
    assert code == 0
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in script.requests) == [(4, 2), (10, 1)]
    assert "lengths / 16, times x 0.001" in out  # the scale is stated beside the numbers


def test_a_load_that_the_model_cannot_take_is_refused_before_it_starts() -> None:
    script = Script(completion_events, card={"id": "tiny", "vocab_size": 64, "max_model_len": 10})
    with completions_server(script) as url:
        code, _, err = bench(url, *LOAD)
    assert code == 2
    assert "needs 11 tokens (5 + 6), more than the model's 10" in err
    assert script.requests == []


def test_an_unknown_vocabulary_asks_for_the_flag() -> None:
    script = Script(completion_events, card={"id": "tiny"})
    with completions_server(script) as url:
        code, _, err = bench(url, *LOAD)
        assert code == 2
        assert "--vocab-size" in err
        assert bench(url, *LOAD, "--vocab-size", "3")[0] == 0
    assert {token for body in script.requests for token in body["prompt"]} <= {0, 1, 2}


def test_a_run_begins_when_the_server_is_ready() -> None:
    script = Script(completion_events, health=[503, 503, 200])
    pauses: list[float] = []
    with completions_server(script) as url:
        wait_ready(Target.parse(url), 60.0, lambda: 0.0, pauses.append)
    assert len(pauses) == 2
    times = iter([0.0, 59.0, 60.0])
    with (
        completions_server(Script(completion_events, health=[503] * 9)) as url,
        pytest.raises(WaitTimeoutError, match=r"not ready after 60 s.*loading"),
    ):
        wait_ready(Target.parse(url), 60.0, lambda: next(times), pauses.append)
    assert len(pauses) == 3
    with completions_server(Script(completion_events, health=[404])) as url:
        wait_ready(Target.parse(url), 60.0, lambda: 0.0, pauses.append)
    assert len(pauses) == 3


def test_the_errors_of_a_run_are_shown() -> None:
    with completions_server(Script(typed_error)) as url:
        assert "  1 x stage 1 is lost" in bench(url, *LOAD)[1]


def test_an_unknown_model_and_a_missing_server_are_named() -> None:
    with completions_server(Script(completion_events)) as url:
        code, _, err = bench(url, *LOAD, "--model", "other")
    assert code != 0
    assert "does not serve other" in err
    assert "The server has: tiny" in err
    code, _, err = bench(url, *LOAD)
    assert code == 5
    assert "no server at" in err
    assert "penstock serve" in err


class StagesThatReport:
    """A server whose stages report anew at every look."""

    def __init__(self) -> None:
        self.looks = 0

    def answer(self, path: str) -> Any:
        if path == "/server_info":
            stages = [{"start_layer": 0, "end_layer": 3}, {"start_layer": 3, "end_layer": 5}]
            return {"stages": stages, "settings": {"block-size": 16, "kv-cache-bytes": 1 << 20, "host": "x"}}
        if path != "/debug/pipeline":
            return None
        self.looks += 1
        rows: list[dict[str, float]] = [
            {"stage": stage, "num_ranks": 1, "wall_s": self.looks, "busy_s": self.looks / 2, "kv_bytes": 4096}
            for stage in (0, 1)
        ]
        return {"replicas": [{"replica": 0, "stages": rows}]}


def test_several_concurrencies_make_one_report(tmp_path: Path) -> None:
    script = Script(completion_events, answer=StagesThatReport().answer)
    page = tmp_path / "r.html"
    with completions_server(script) as url:
        code, out, err = bench(url, *LOAD, "--concurrency", "1,3", "--json", "--html", str(page))
    assert (code, err) == (0, "")
    report = json.loads(out)  # and nothing else is printed
    assert [(run["series"], run["concurrency"], run["completed"]) for run in report["runs"]] == [
        ("PP 2 x TP 1", 1, 12),
        ("PP 2 x TP 1", 3, 12),
    ]
    for run_figures in report["runs"]:
        assert [stage["busy"] for stage in run_figures["stages"]] == pytest.approx([0.5, 0.5])
        assert run_figures["stages"][0]["kv_bytes"] == 4096
        assert set(run_figures["latencies_ms"]) == {"ttft", "tpot", "itl", "e2el"}
    assert "Throughput against concurrency" in page.read_text()
    first, second = (
        {tuple(body["prompt"]) for body in script.requests[start : start + 12]} for start in (0, 12)
    )
    assert first.isdisjoint(second)  # no cache of prefixes helps the second run


def test_a_server_is_compared_with_what_the_planner_says(tmp_path: Path) -> None:
    model = write_small_llama(tmp_path, num_hidden_layers=5, max_position_embeddings=256)
    with completions_server(Script(completion_events, answer=StagesThatReport().answer)) as url:
        flags = ("--predict", "a100-80g:2", "--predict-model", model, "--json")
        code, out, err = bench(url, *LOAD, "--concurrency", "4", *flags)
        assert (code, err) == (0, "")
        (found,) = json.loads(out)["runs"]
        assert found["predicted"]["basis"].startswith("Predictions assume that devices reach a fixed share")
        assert 0 < found["predicted"]["time_per_token_s"] < 1
        code, out, err = bench(url, *LOAD, "--predict", "a100-80g:1", "--json")
    assert code == 0
    assert "predictions are not available:" in err
    assert json.loads(out)["runs"][0]["predicted"] is None


def test_another_server_gets_a_report_without_stages() -> None:
    with completions_server(Script(completion_events)) as url:
        code, out, _ = bench(url, *LOAD, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["runs"][0]["stages"] == []
    assert report["notes"] == ["The server does not report what its stages do."]


def test_flags_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with completions_server(Script(completion_events)) as url:
        code, _, err = bench(url, *LOAD, "--concurrency", "1,2", "--max-concurrency", "3")
        assert code == 2
        assert "both set the requests in flight" in err
        code, _, err = bench(url, *LOAD, "--concurrency", "1,2", "--result-file", str(tmp_path / "r"))
    assert code == 2
    assert "--result-file holds one run" in err


def test_a_trace_can_come_at_another_rate(tmp_path: Path) -> None:
    trace = tmp_path / "own.jsonl"
    trace.write_text('{"input_len": 3, "output_len": 2, "arrival_s": 0}\n' * 20)
    flags = ["--dataset-name", "custom", "--dataset-path", str(trace), "--num-prompts", "20"]
    result_file = tmp_path / "r.json"
    with completions_server(Script(completion_events)) as url:
        code, out, _ = bench(url, *flags, "--request-rate", "400", "--result-file", str(result_file))
    assert code == 0
    assert "own.jsonl, lengths / 1, 400 a second" in out
    found = json.loads(result_file.read_text())
    assert (found["request_rate"], found["length_scale"], found["completed"]) == (400.0, 1.0, 20)
    assert found["duration"] > 0.02  # 19 gaps of 2.5 ms on average, and of none at once


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--metric-percentiles", "150", "--metric-percentiles has 150; each must be between 0 and 100"),
        ("--metric-percentiles", "nan", "--metric-percentiles has nan; each must be between 0 and 100"),
        ("--stall-seconds", "nan", "--stall-seconds is nan; it must be above 0"),
        ("--ready-check-timeout-sec", "nan", "--ready-check-timeout-sec is nan; it must be at least 0"),
    ],
)
def test_numbers_that_would_spoil_a_run_are_refused_before_it_begins(
    flag: str, value: str, said: str
) -> None:
    script = Script(completion_events)
    with completions_server(script) as url:
        code, _, err = bench(url, *LOAD, flag, value)
    assert (code, script.requests) == (2, [])
    assert said in err
