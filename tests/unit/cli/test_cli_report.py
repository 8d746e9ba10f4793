"""What `serve` shows while it starts and ends."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from certificates import Certificate
from penstock.cli.reporter import JsonReporter, ServeReporter, curl_example
from penstock.cli.terminal import Invocation
from penstock.config.engine import EngineConfig, ModelConfig, ParallelConfig
from penstock.config.server import ServerConfig
from penstock.engine.supervisor.reports import (
    Caution,
    Draining,
    EngineFailed,
    EngineReady,
    LoadProgress,
    ModelFound,
    Notice,
    PartitionChosen,
    StageReady,
)
from penstock.errors import ErrorInfo, ModelConfigError, NotEnoughMemoryError
from penstock.process.child import PromptForm


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


ENGINE = EngineConfig(model=ModelConfig(model="demo"), parallel=ParallelConfig(pipeline_parallel_size=2))
STAGE = StageReady(
    stage=1,
    process="pid 42",
    parts="layers 3-5, norm, head",
    tensor_bytes=2_400_000,
    num_blocks=512,
    stranded_bytes=0,
)


def progress(stage: int, done: int) -> LoadProgress:
    return LoadProgress(stage=stage, done_bytes=done, total_bytes=2_000_000)


def reporter(out: StringIO, clock: Clock, **server: Any) -> tuple[ServeReporter, StringIO]:
    err = StringIO()
    invocation = Invocation(stdout=out, stderr=err, stdin=StringIO(), environ={"NO_COLOR": "1"})
    return ServeReporter(invocation, ENGINE, ServerConfig(**server), clock), err


def test_a_start_is_the_plan_a_line_per_stage_and_the_address() -> None:
    out = StringIO()
    made, err = reporter(out, Clock())
    made.report(ModelFound(directory="/models/demo"))
    made.report(progress(0, 1_000_000))
    made.report(STAGE)
    made.report(EngineReady(address="http://127.0.0.1:8000", seconds=2.14))
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("model demo   dtype auto   stages 2 x tp 1")
    assert "key off (loopback only)" in lines[1]
    assert lines[2] == "        stage 1  pid 42  layers 3-5, norm, head  2.4 MB  512 KV blocks"
    assert lines[3] == "ready in 2.1 s   http://127.0.0.1:8000   page /   metrics /metrics"
    assert lines[4].startswith("Try: curl http://127.0.0.1:8000/v1/chat/completions")
    assert len(lines) == 5
    assert err.getvalue() == ""


def test_the_plan_is_not_shown_before_the_model_was_found() -> None:
    """Issue 25, point 11."""
    out = StringIO()
    made, err = reporter(out, Clock())
    assert out.getvalue() == ""
    made.report(EngineFailed(error=ModelConfigError("model x is not there.", remedy="Download it.").info()))
    assert out.getvalue() == ""
    assert err.getvalue().startswith("error: model x is not there.")


def test_the_plan_comes_before_the_first_news_and_once() -> None:
    """With --partition auto, news of the measuring come before those of the processes."""
    out = StringIO()
    made, _ = reporter(out, Clock())
    made.report(Notice(text="measuring 2 stages."))
    made.report(ModelFound(directory="/models/demo"))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("penstock ")
    assert lines[2:] == ["note: measuring 2 stages."]


def test_a_caution_is_a_warning_on_standard_error() -> None:
    out = StringIO()
    made, err = reporter(out, Clock())
    made.report(Caution(text="tools will not work."))
    assert err.getvalue() == "warning: tools will not work.\n"


def example_of(model: str, prompt_form: PromptForm, **server: Any) -> tuple[str, dict[str, Any]]:
    """The URL and the body of the request that is suggested when the server is ready."""
    out = StringIO()
    invocation = Invocation(stdout=out, stderr=StringIO(), stdin=StringIO(), environ={})
    engine = EngineConfig(model=ModelConfig(model=model))
    made = ServeReporter(invocation, engine, ServerConfig(**server), Clock())
    made.report(EngineReady(address="http://h:1", seconds=1.0, prompt_form=prompt_form))
    words = shlex.split(out.getvalue().splitlines()[-1].removeprefix("Try: "))
    return words[1], json.loads(words[words.index("-d") + 1])


def test_the_suggested_request_asks_for_the_model_by_the_name_it_is_served_under(tmp_path: Path) -> None:
    """Issue 25, point 11."""
    for model in (str(tmp_path), f"{tmp_path}/"):
        url, body = example_of(model, "messages")
        assert (url, body["model"]) == ("http://h:1/v1/chat/completions", tmp_path.name)
    assert example_of("org/small", "messages")[1]["model"] == "org/small"
    named = {"served_model_names": ["first", "second"]}
    assert example_of(str(tmp_path), "messages", **named)[1]["model"] == "first"


@pytest.mark.parametrize(("prompt_form", "kind"), [("text", str), ("token_ids", list)])
def test_no_chat_is_suggested_to_a_model_without_a_template(prompt_form: PromptForm, kind: type) -> None:
    """Issue 25, point 11."""
    url, body = example_of("demo", prompt_form)
    assert url == "http://h:1/v1/completions"
    assert isinstance(body["prompt"], kind)
    assert "messages" not in body


def test_progress_off_a_terminal_is_a_line_now_and_then() -> None:
    out, clock = StringIO(), Clock()
    made, _ = reporter(out, clock)
    made.report(progress(0, 200_000))
    assert "loading" not in out.getvalue()
    clock.now += 5.0
    made.report(progress(0, 1_000_000))
    made.report(progress(0, 1_100_000))
    assert out.getvalue().splitlines()[2:] == ["        stage 0  loading 50 % of 2.0 MB"]


def test_progress_on_a_terminal_is_one_line_for_all_stages_and_is_cleared() -> None:
    out = Terminal()
    made, _ = reporter(out, Clock())
    made.report(progress(1, 500_000))
    made.report(progress(0, 2_000_000))
    made.report(STAGE)
    text = "\n".join(out.getvalue().split("\n")[2:])  # behind the plan
    assert "stage 0 [##########] 2.0 MB  stage 1 [##........] 2.0 MB" in text
    assert "\n" not in text.split("stage 1  pid 42")[0]
    assert text.split("stage 1  pid 42")[0].endswith("\r\x1b[K        ")


def test_a_failure_is_the_cause_and_the_remedy_on_standard_error() -> None:
    out = StringIO()
    made, err = reporter(out, Clock())
    cause = NotEnoughMemoryError("the weights need 9 GiB; 2 GiB are free.", remedy="Use more stages.")
    made.report(EngineFailed(error=cause.info()))
    assert err.getvalue() == "error: the weights need 9 GiB; 2 GiB are free.\n  Use more stages.\n"
    assert out.getvalue() == ""


def test_d16_the_table_of_a_measured_partition_is_shown_line_by_line() -> None:
    out = StringIO()
    made, _ = reporter(out, Clock())
    made.report(PartitionChosen(layers=[2, 4], table=["partition 2,4: fast", "stage  layers"]))
    assert out.getvalue().splitlines()[2:] == ["partition 2,4: fast", "stage  layers"]


def test_draining_is_announced() -> None:
    out = StringIO()
    made, _ = reporter(out, Clock())
    made.report(Draining(seconds=30.0))
    assert "30 s" in out.getvalue()


@pytest.mark.parametrize(
    ("server", "told"),
    [({"api_keys": ["s3cret"]}, "key on (1)"), ({"insecure": True}, "key off (--insecure)")],
)
def test_the_state_of_the_key_is_told_but_not_the_key(server: dict[str, Any], told: str) -> None:
    out = StringIO()
    made, _ = reporter(out, Clock(), **server)
    made.report(EngineReady(address="http://127.0.0.1:1", seconds=1.0))
    assert told in out.getvalue()
    assert "s3cret" not in out.getvalue()


def test_the_curl_example_survives_a_shell() -> None:
    words = shlex.split(curl_example("http://h:1", 'it\'s "mine"', ServerConfig(api_keys=["k"]), "messages"))
    assert words[:2] == ["curl", "http://h:1/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == 'it\'s "mine"'
    assert "Authorization: Bearer $PENSTOCK_API_KEY" in words


def test_the_suggested_request_trusts_a_certificate_that_the_system_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my keys").mkdir()
    made = Certificate(tmp_path / "my keys", "localhost")
    server = ServerConfig(ssl_certfile=made.certfile, ssl_keyfile=made.keyfile)
    words = shlex.split(curl_example("https://h:1", "demo", server, "messages"))
    assert words[words.index("--cacert") + 1] == made.certfile
    monkeypatch.setenv("SSL_CERT_FILE", made.ca_file)
    assert "--cacert" not in curl_example("https://h:1", "demo", server, "messages"), "it is known there"
    assert "--cacert" not in curl_example("http://h:1", "demo", ServerConfig(), "messages")
    Path(made.certfile).unlink()
    assert "--cacert" not in curl_example("https://h:1", "demo", server, "messages")


def test_json_lines_carry_time_and_event() -> None:
    out = StringIO()
    made = JsonReporter(out, lambda: datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC))
    made.report(progress(0, 10))  # half-way: not worth a log line
    made.report(STAGE)
    made.report(EngineFailed(error=ErrorInfo(kind="StageLostError", message="stage 1 died\nat once.")))
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["stage_ready", "engine_failed"]
    assert lines[0]["time"] == "2026-01-02T03:04:05.678+00:00"
    assert lines[0]["num_blocks"] == 512
    assert lines[1]["error"]["message"] == "stage 1 died\nat once."


def test_r15_more_progress_than_there_is_fills_the_line_and_no_more() -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    made, _ = reporter(out, Clock())
    made.report(ModelFound(directory="/models/demo"))
    made.report(LoadProgress(stage=0, done_bytes=1 << 53, total_bytes=1))
    assert "stage 0 [##########] " in out.getvalue()
    assert len(out.getvalue()) < 1000
