"""The engine as real processes: who there is, how they end, and that nothing of them is left.

Every test ends with its processes gone, by a check of the process table; waits are bounded and only ever as
long as what they wait for.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from checkpoints import make_checkpoint, random_tensors, tensor_shapes, write_weights
from depth import sampled
from disturbed import Server, started_processes
from paths import shared_data
from penstock import LLM, SamplingParams
from penstock.errors import CheckpointError, UnsupportedModelError
from served import is_alive, is_free, title_of

PATIENCE_S = 60.0  # a bound for hangs, never waited for
SUPERVISE = """
import sys
from penstock.config.engine import EngineConfig, ModelConfig, ParallelConfig
from penstock.config.server import ServerConfig
from penstock.engine.supervisor.supervisor import Supervisor
model, stages, host, port = sys.argv[1:]
engine = EngineConfig(
    model=ModelConfig(model=model),
    parallel=ParallelConfig(pipeline_parallel_size=int(stages), threads_per_rank=1),
)
sys.exit(Supervisor.for_server(engine, ServerConfig(host=host, port=int(port), drain_s=20.0)).run())
"""
USER = """
import os, sys
from penstock import LLM, SamplingParams
llm = LLM(sys.argv[1], pipeline_parallel_size=2, threads_per_rank=1)
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        sys.stdin.read()
        os._exit(0)
    print(child, flush=True)
print("up", flush=True)
while True:
    llm.generate([{"prompt_token_ids": [5]}] * 8, SamplingParams(max_tokens=200, ignore_eos=True))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), layers=4, max_positions=512)


def named_things() -> set[str]:
    """Everything with a name that an engine could leave behind."""
    directories = (Path(tempfile.gettempdir()), Path("/dev/shm"))
    return {
        str(path) for directory in directories if directory.exists() for path in directory.glob("*penstock*")
    } | set(os.listdir("/dev/shm"))


@pytest.fixture(autouse=True)
def nothing_named_is_left() -> Iterator[None]:
    before = named_things()
    yield
    wait_until(lambda: named_things() <= before, f"{named_things() - before} to be removed")


class Process:
    """A program under test, with its descendants."""

    def __init__(self, program: str, *arguments: str, stdin: int | IO[bytes] = subprocess.DEVNULL) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.lines: list[str] = []  # of standard error

    def wait_for_line(self, words: str) -> str:
        """The next line of standard error with these words; fails when the program ends before."""
        assert self.popen.stderr is not None
        for raw in self.popen.stderr:
            self.lines.append(raw.decode().rstrip())
            if words in self.lines[-1]:
                return self.lines[-1]
        raise AssertionError(f"no line with {words!r}: {self.lines}")

    def family(self) -> list[psutil.Process]:
        me = psutil.Process(self.popen.pid)
        return [me, *me.children(recursive=True)]

    def end(self) -> int:
        """Exit code, with the rest of standard error read."""
        _, errors = self.popen.communicate(timeout=PATIENCE_S)
        self.lines += errors.decode().splitlines()
        return self.popen.returncode

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        for stream in (self.popen.stdout, self.popen.stderr, self.popen.stdin):
            if stream is not None:
                stream.close()


@pytest.fixture
def new_children() -> Callable[[], list[psutil.Process]]:
    """Descendants of this process that were not there when the test began."""
    before = set(started_processes())
    return lambda: [process for process in started_processes() if process not in before]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited too long: {what}"
        time.sleep(0.01)


def wait_until_gone(family: list[psutil.Process]) -> None:
    wait_until(lambda: not any(map(is_alive, family)), f"{[p for p in family if is_alive(p)]} to end")


def by_title(family: list[psutil.Process], words: str) -> psutil.Process:
    (found,) = [process for process in family if words in title_of(process)]
    return found


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def run(program: str, *arguments: str, **more: object) -> Process:
        started.append(Process(program, *arguments, **more))
        return started[-1]

    yield run
    for process in started:
        process.close()


@pytest.fixture
def server(start: Callable[..., Process], model: Path) -> Process:
    """A ready server of two stages."""
    process = start(SUPERVISE, str(model), "2", "127.0.0.1", "0")
    process.wait_for_line("ready in")
    return process


def port_of(server: Process) -> int:
    (ready,) = [line for line in server.lines if "ready in" in line]
    return int(ready.rpartition(":")[2])


def complete(server: Process, max_tokens: int) -> list[int]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=PATIENCE_S)
    body = {"prompt": [5, 6, 7], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    models = connection.request("GET", "/v1/models") or json.loads(connection.getresponse().read())
    body |= {"model": models["data"][0]["id"], "return_token_ids": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    token_ids: list[int] = answer["choices"][0]["token_ids"]
    return token_ids


def test_g1_r11_the_process_table_and_an_orderly_end(server: Process) -> None:
    family = server.family()
    titles = sorted(title_of(process) for process in family[1:])
    assert titles[-3:] == ["penstock core", "penstock stage 0 tp 0", "penstock stage 1 tp 0"]
    assert len(family) == 5, "supervisor, API process, core, two stages"
    stage_lines = [line for line in server.lines if line.startswith("stage ") and " pid " in line]
    assert len(stage_lines) == 2
    pid = by_title(family, "stage 1").pid
    assert stage_lines[1].startswith(f"stage 1  pid {pid}  layers 2-3, norm, head  ")
    answers: list[list[int]] = []
    client = threading.Thread(target=lambda: answers.append(complete(server, 400)))
    client.start()
    wait_until(lambda: running(server) > 0, "the request to run")
    server.popen.send_signal(signal.SIGTERM)
    assert server.end() == 0
    client.join(PATIENCE_S)
    assert [len(answer) for answer in answers] == [400], "what ran was finished first"
    wait_until_gone(family)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port_of(server)))


def test_nothing_named_exists_while_serving(demo_server: Server) -> None:
    """Sockets and memory have no path: what shows one was removed before it was used."""
    open_files = [
        target
        for process in demo_server.family()
        for target in map(os.readlink, fds_of(process))
        if "penstock" in target and not target.startswith(("/memfd:", "/proc/"))
    ]
    assert all(target.endswith("(deleted)") for target in open_files), open_files


def fds_of(process: psutil.Process) -> list[Path]:
    return [path for path in Path(f"/proc/{process.pid}/fd").iterdir() if path.is_symlink()]


@pytest.mark.soak
def test_r11_a_second_signal_ends_at_once_even_with_a_frozen_stage(server: Process) -> None:
    family = server.family()
    by_title(family, "stage 1").suspend()
    client = threading.Thread(target=expect_no_answer, args=(server,))
    client.start()
    wait_until(lambda: running(server) > 0, "the request to be in the pipe")
    server.popen.send_signal(signal.SIGTERM)
    server.wait_for_line("draining")
    server.popen.send_signal(signal.SIGTERM)
    assert server.end() == 0
    client.join(PATIENCE_S)
    wait_until_gone(family)


def expect_no_answer(server: Process) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException, KeyError):
        complete(server, 8)
        raise AssertionError("a frozen stage has answered")


def running(server: Process) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=PATIENCE_S)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    values = [line for line in text.splitlines() if line.startswith("penstock_num_requests_running")]
    return float(values[0].rpartition(" ")[2]) if values else 0.0


def test_r7_kill_9_of_the_supervisor_leaves_nothing(server: Process) -> None:
    family = server.family()
    port = port_of(server)
    server.popen.kill()
    wait_until_gone(family)
    wait_until(lambda: is_free(port), "the port to be free: a process that ends closes its files at the last")


def test_r7_kill_9_of_the_supervisor_while_loading_leaves_nothing(
    start: Callable[..., Process], model: Path
) -> None:
    process = start(SUPERVISE, str(model), "2", "127.0.0.1", "0")
    wait_until(lambda: len(process.family()) >= 5, "all children to be started")
    family = process.family()
    process.popen.kill()
    wait_until_gone(family)


def test_an_interrupt_while_loading_ends_at_once(start: Callable[..., Process], model: Path) -> None:
    process = start(SUPERVISE, str(model), "2", "127.0.0.1", "0")
    wait_until(lambda: len(process.family()) >= 5, "all children to be started")
    family = process.family()
    process.popen.send_signal(signal.SIGINT)
    assert process.end() == 0
    wait_until_gone(family)


def broken(model: Path, directory: Path, **replace: object) -> str:
    """A copy of the model whose last layer's norm weight is gone, or is what `replace` says."""
    config = json.loads((model / "config.json").read_text())
    tensors = dict(random_tensors(tensor_shapes(config), seed=0))
    name = "model.layers.3.input_layernorm.weight"
    del tensors[name]
    (directory / "config.json").write_text(json.dumps(config | replace))
    write_weights(directory, tensors)
    return str(directory)


@pytest.mark.soak
def test_g2_a_rank_that_cannot_load_is_the_cause_and_gives_the_code(
    start: Callable[..., Process], model: Path, tmp_path: Path
) -> None:
    process = start(SUPERVISE, broken(model, tmp_path), "2", "127.0.0.1", "0")
    assert process.end() == 3
    assert "model.layers.3.input_layernorm.weight" in process.lines[-1]


def test_g2_a_rank_that_cannot_load_is_the_cause_that_llm_raises(
    new_children: Callable[[], list[psutil.Process]], model: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.input_layernorm\.weight"):
        LLM(broken(model, tmp_path), pipeline_parallel_size=2, threads_per_rank=1)
    assert new_children() == []


def test_g2_a_model_that_is_not_supported_is_refused_before_anything_starts(
    new_children: Callable[[], list[psutil.Process]], model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        LLM(broken(model, tmp_path, architectures=["MambaForCausalLM"]), pipeline_parallel_size=2)
    assert new_children() == []


@pytest.mark.parametrize(
    ("host", "code", "words"), [("127.0.0.1", 5, "is used by pid"), ("0.0.0.0", 2, "no API key is set")]
)
def test_an_address_that_cannot_be_had_is_known_at_once(
    start: Callable[..., Process], model: Path, host: str, code: int, words: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start(SUPERVISE, str(model), "2", host, str(taken.getsockname()[1]))
        assert process.end() == code
    assert words in process.lines[-1]


@pytest.mark.soak
def test_an_llm_of_processes_says_what_one_of_threads_says(
    new_children: Callable[[], list[psutil.Process]], model: Path
) -> None:
    sampling = [SamplingParams(temperature=t, max_tokens=20, seed=7, ignore_eos=True) for t in (0.0, 1.0)]
    prompts = [{"prompt_token_ids": [5, 6, 7]}] * 2
    found = {}
    for backend in ("mp", "inprocess"):
        with LLM(
            str(model),
            pipeline_parallel_size=2,
            async_depth=1,
            threads_per_rank=1,
            num_blocks=64,
            distributed_executor_backend=backend,
        ) as llm:
            found[backend] = [output.outputs[0].token_ids for output in llm.generate(prompts, sampling)]
    assert found["mp"] == found["inprocess"]
    assert new_children() == []


def test_golden_ids_through_real_processes() -> None:
    directory = shared_data("models", "stories260K")
    golden = json.loads((directory / "golden.json").read_text())
    with LLM(str(directory), pipeline_parallel_size=2, dtype="float32", threads_per_rank=1) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [1]}, sampling)
    assert output.outputs[0].token_ids == golden["greedy_ids"][:128]


@pytest.mark.parametrize("victim_title", sampled(["core", "stage 1"], 1))
def test_r4_a_generation_outlives_a_killed_child(
    new_children: Callable[[], list[psutil.Process]], model: Path, victim_title: str
) -> None:
    prompts = [{"prompt_token_ids": [5 + index % 80]} for index in range(100)]
    sampling = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    with LLM(str(model), pipeline_parallel_size=2, threads_per_rank=1) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, sampling)]
        victim = by_title(new_children(), victim_title)
        killer = threading.Thread(target=kill_when_busy, args=(victim,))
        killer.start()
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, sampling)]
        killer.join()
        family = new_children()
        assert victim.pid not in {process.pid for process in family}
    assert found == expected
    wait_until_gone(family)


def kill_when_busy(process: psutil.Process) -> None:
    before = sum(process.cpu_times()[:2])
    wait_until(lambda: sum(process.cpu_times()[:2]) > before + 0.1, "the stage to work")
    process.kill()


@pytest.mark.parametrize("mode", sampled(["alone", "fork"], 1))
def test_r7_kill_9_of_the_users_process_leaves_nothing(
    start: Callable[..., Process], model: Path, mode: str
) -> None:
    """Also when a forked child of the user lives on and holds copies of all descriptors."""
    process = start(USER, str(model), mode, stdin=subprocess.PIPE)
    assert process.popen.stdout is not None
    first = process.popen.stdout.readline().decode().strip()
    forked = int(first) if mode == "fork" else 0
    if forked:
        process.popen.stdout.readline()
    engine = [entry for entry in process.family()[1:] if entry.pid != forked]
    assert len(engine) == 4, "supervisor, core, two stages"
    process.popen.kill()
    wait_until_gone(engine)
    if forked:
        assert psutil.pid_exists(forked)
        assert process.popen.stdin is not None
        process.popen.stdin.close()
        wait_until(lambda: not psutil.pid_exists(forked) or not is_alive(psutil.Process(forked)), "the child")
