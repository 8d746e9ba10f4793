"""The whole product, as a user starts it: `penstock serve` with two stages, real processes, real sockets."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from certificates import Certificate
from checkpoints import make_checkpoint
from depth import sampled
from disturbed import REQUESTS, SPARE, Server, Stream, administer
from paths import shared_data
from penstock.server.routes.health import PROBE_AGE_S
from served import Served, is_alive, is_free, named_leftovers, title_of, wait_until

DEMO = ("demo", "--pp", "2", "--threads-per-rank", "1", "--dtype", "float32")


@pytest.fixture(scope="module")
def demo(demo_server: Server) -> Server:
    return demo_server


def titles(served: Served) -> dict[str, psutil.Process]:
    return {title_of(process): process for process in served.family()}


def test_g1_processes_have_names_and_only_stages_have_torch(demo: Served) -> None:
    named = titles(demo)
    named.pop(SPARE, None)  # it is about to have it
    stages = {"penstock stage 0 tp 0", "penstock stage 1 tp 0"}
    assert stages | {"penstock core", "penstock api"} <= set(named)
    for title, process in named.items():
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert ("libtorch" in maps) == (title in stages), title


def test_openai_client_streams_and_counts(demo: Served) -> None:
    with openai.OpenAI(base_url=demo.url + "/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Speak, speak."}]
        arguments: dict[str, Any] = {
            "model": "demo",
            "messages": messages,
            "temperature": 0,
            "max_tokens": 24,
        }
        whole = client.chat.completions.create(**arguments, logprobs=True, top_logprobs=2)
        chunks = list(
            client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage is not None
        assert whole.usage is not None
        # How many guesses were right depends on when they were made; what was read and written does not.
        for counted in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert getattr(chunks[-1].usage, counted) == getattr(whole.usage, counted)
        assert whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.content or []) == whole.usage.completion_tokens
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(model="demo", prompt="x", max_tokens=100_000)


def test_r13_disconnect_frees_row_and_blocks(demo: Served) -> None:
    port = int(demo.url.rsplit(":", 1)[1])
    body = json.dumps({"model": "demo", "prompt": "O", "max_tokens": 900, "ignore_eos": True, "stream": True})
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port)) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
            client.sendall((head + "content-type: application/json\r\n\r\n" + body).encode())
            assert client.recv(12) == b"HTTP/1.1 200"
    wait_until(lambda: demo.metric("penstock_num_requests_running") == 0, 20)
    wait_until(lambda: demo.metric("penstock_kv_cache_usage_perc") == 0, 20)


def replay(served: Served, num_requests: int, result: Path, *more: str) -> dict[str, Any]:
    """`bench serve` over the head of the Azure conversation trace, lengths divided by 16."""
    trace = shared_data("traces", "azure_llm_2023_conv.csv")
    command = [sys.executable, "-m", "penstock", "bench", "serve", "--url", served.url]
    command += ["--dataset-name", "azure", "--dataset-path", str(trace), "--length-scale", "16"]
    command += ["--num-prompts", str(num_requests), "--result-file", str(result), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(",") for line in trace.read_text().splitlines()[1 : num_requests + 1]]
    numbers = json.loads(result.read_text())
    assert numbers["completed"] == num_requests
    assert numbers["total_input_tokens"] == sum(max(1, int(row[1]) // 16) for row in rows)
    assert numbers["total_output_tokens"] == sum(max(1, int(row[2]) // 16) for row in rows)
    return numbers


def test_g6_a_health_check_beside_a_running_request_adds_none_of_its_own(demo: Server) -> None:
    """The tokens of the request prove that the pipe works; an idle engine is asked for one."""

    def num_prompt_tokens() -> float:
        assert json.loads(demo.get("/health/generate"))["state"] == "ready"
        return demo.metric("penstock_prompt_tokens")

    request = REQUESTS[2] | {"max_tokens": 900}
    wait_until(lambda: demo.metric("penstock_num_requests_running") == 0, 20)
    before = demo.metric("penstock_prompt_tokens") + len(request["prompt"])
    administer(demo, "/slow_down?interval_ms=5")  # the request takes seconds
    stream = iter(Stream(demo, request))
    ids = [next(stream)]
    wait_until(lambda: demo.metric("penstock_prompt_tokens") == before, 20)
    begun = time.monotonic()
    while time.monotonic() < begun + 1.5 * PROBE_AGE_S:  # the answer of a probe counts so long
        assert num_prompt_tokens() == before
    administer(demo, "/slow_down?interval_ms=0")
    ids.extend(stream)
    assert ids[: len(demo.golden[2])] == demo.golden[2]
    wait_until(lambda: num_prompt_tokens() > before, 20)


def test_r1_trace_replay_loses_and_doubles_nothing(demo: Served, tmp_path: Path) -> None:
    replay(demo, 60, tmp_path / "result.json", "--time-scale", "0.1")
    assert demo.metric("penstock_num_requests_running") == 0


def test_a_report_says_where_the_time_and_the_memory_of_the_stages_went(demo: Served, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    command = [sys.executable, "-m", "penstock", "bench", "serve", "--url", demo.url, "--concurrency", "1,4"]
    command += ["--num-prompts", "12", "--random-input-len", "16", "--random-output-len", "24"]
    command += ["--json", "--html", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert [run["concurrency"] for run in report["runs"]] == [1, 4]
    assert len(page.read_text().split("<figure>")) == 8  # throughput, four latencies, time, memory
    for run in report["runs"]:
        assert run["latencies_ms"]["ttft"]["count"] == 12
        assert [stage["stage"] for stage in run["stages"]] == [0, 1]
        for stage in run["stages"]:
            assert stage["busy"] + sum(stage["causes"].values()) + stage["overhead"] == pytest.approx(1.0)
            assert stage["num_steps"] >= 24
            assert stage["busy"] > 0.0
            assert stage["weight_bytes"] > 100_000
            assert stage["kv_bytes"] > 0
        assert run["stages"][0]["sampling"] == 0.0
        assert 0.0 < run["stages"][1]["sampling"] < 1.0
        assert run["stages"][1]["causes"]["wait_prev"] > 0.0


@pytest.mark.soak
def test_r1_trace_replay_of_500_requests(demo: Served, tmp_path: Path) -> None:
    replay(demo, 500, tmp_path / "result.json", "--time-scale", "0.5")


@pytest.mark.parametrize("number", sampled([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], 1))
def test_r7_nothing_is_left_behind(number: int) -> None:
    before = named_leftovers()
    with Served(*DEMO) as served:
        served.post("/v1/completions", model="demo", prompt="x", max_tokens=2)
        family = served.family()
        assert named_leftovers() == before  # nothing has a name while it runs, either
        code = served.stop(number)
        assert code == (-signal.SIGKILL if number == signal.SIGKILL else 0)
        wait_until(lambda: not any(map(is_alive, family)), 10)
        # A process is a zombie as soon as its first thread has ended; the last one closes the port.
        wait_until(lambda: is_free(int(served.url.rsplit(":", 1)[1])), 10)
    assert named_leftovers() == before


def start_and_fail(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_bad_model_ends_with_code_3_and_says_where(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    failed = start_and_fail(str(model), "--pp", "2", "--port", "0")
    assert failed.returncode == 3
    assert "model.safetensors" in failed.stderr
    assert "expected" in failed.stderr
    assert "found" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_more_stages_than_layers_ends_with_code_2() -> None:
    failed = start_and_fail("demo", "--pp", "99", "--port", "0")
    assert failed.returncode == 2
    assert "99" in failed.stderr
    assert "Use at most 6" in failed.stderr


def test_https_is_served_announced_and_trusted_by_name(tmp_path: Path) -> None:
    made = Certificate(tmp_path)
    files = ("--ssl-certfile", made.certfile, "--ssl-keyfile", made.keyfile)
    with Served(*DEMO, *files) as served:
        assert served.url.startswith("https://127.0.0.1:")
        wait_until(lambda: f"Try: curl {served.url}/v1/chat/completions" in served.output, 20)
        words = ["chat", "--url", served.url, "--quick", "ROMEO:", "--max-tokens", "4"]
        for trusted, code in ((["--ca-file", made.ca_file], 0), ([], 5)):
            client = subprocess.run(
                [sys.executable, "-m", "penstock", *words, *trusted],
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert client.returncode == code, client.stderr
        assert "is not trusted" in client.stderr
        assert served.stop() == 0


def test_a_certificate_of_another_key_ends_with_code_2_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    made, other = Certificate(tmp_path), Certificate(tmp_path / "other")
    files = ("--ssl-certfile", made.certfile, "--ssl-keyfile", other.keyfile)
    command = [sys.executable, "-m", "penstock", "serve", *DEMO, "--port", "0", *files]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "is not the key of --ssl-certfile" in ended.stderr
    assert "loading" not in ended.stdout


def test_a_busy_port_names_its_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failed = start_and_fail("demo", "--pp", "2", "--port", str(port))
    assert failed.returncode == 5
    assert f"port {port} is used by pid {os.getpid()}" in failed.stderr
