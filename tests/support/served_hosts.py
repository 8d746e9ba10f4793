"""`penstock serve` on a host of a network, alone or with a worker on another one, and how it is asked.

    with cable_network() as network, PairServer(network.hosts, "demo", directory) as server:
        ids = server.client.complete([[5, 6, 7]], 16)

Hosts are namespaces (`network`), whose network this process is not in: the client has its sockets made there.
What the head reports are lines of JSON, each kept with the time at which it came.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

from network import Host

MODEL_NAME = "model"
HEAD_NAME, WORKER_NAME = "tower", "desk"
_START_LIMIT_S = 180.0
_STOP_LIMIT_S = 60.0
_ANSWER_LIMIT_S = 900.0
_HTTP_PORT, _JOIN_PORT, _LINK_PORTS = 8000, 7700, 32  # of the first server; 100 apart for the others
_LOOK_S = 0.005

Prompts = Sequence[Sequence[int]]


class Line(NamedTuple):
    """A line that a program has printed, and when it came by `time.monotonic`."""

    at: float
    text: str


class Program:
    """A program on a host, and all that it has printed.

    Args:
        cores: that it and all its processes may use; empty: all.
    """

    def __init__(self, host: Host[Any], command: Sequence[str], cores: Sequence[int] = ()) -> None:
        bound = ["taskset", "--cpu-list", ",".join(map(str, cores))] if cores else []
        self.started_at = time.monotonic()
        self.process = host.popen(
            [*bound, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[Line] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        return "".join(line.text for line in self.lines)

    def await_line(self, part: str, limit_s: float = _START_LIMIT_S, first: int = 0) -> Line:
        """Return the first line with this part, of those from number `first` on, once it is there.

        Raises:
            AssertionError: the program has ended, or it is not there in time.
        """
        deadline = time.monotonic() + limit_s
        while True:
            has_ended = self.process.poll() is not None
            if has_ended:
                self._reader.join(_STOP_LIMIT_S)
            for line in self.lines[first:]:
                if part in line.text:
                    return line
            assert not has_ended, f"it has ended without {part!r}:\n{self.output[-4000:]}"
            assert time.monotonic() < deadline, f"no {part!r} in {limit_s:g} s:\n{self.output[-4000:]}"
            time.sleep(_LOOK_S)

    def stop(self) -> int:
        """Ask it to end, and return its exit code; what does not end in time is killed."""
        self.process.terminate()
        try:
            return self.process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.wait()
        finally:
            self._finish()

    def kill(self) -> None:
        """Kill it with SIGKILL; its children die with it."""
        self.process.kill()
        self.process.wait()

    def _finish(self) -> None:
        self._reader.join(_STOP_LIMIT_S)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.lines.append(Line(time.monotonic(), text))


class Arrival(NamedTuple):
    """Token ids that came over a stream: when, by `time.monotonic`, and of which prompt, by its number."""

    at: float
    prompt: int
    ids: list[int]


class HostClient:
    """Requests to a server on a host. One thread at a time may make one; reading answers is free."""

    def __init__(self, host: Host[Any], port: int) -> None:
        self._host, self._port = host, port
        self._connecting = threading.Lock()

    def get(self, path: str) -> Any:
        """Return what a route answers, decoded."""
        return self._whole("GET", path, None)

    def complete(self, prompts: Prompts, num_tokens: int, **fields: Any) -> list[list[int]]:
        """Return so many ids for each prompt, all of which are asked for in one request."""
        body = _completion(prompts, num_tokens, fields)
        choices = self._whole("POST", "/v1/completions", body)["choices"]
        return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: int(choice["index"]))]

    def stream(self, prompts: Prompts, num_tokens: int, **fields: Any) -> Iterator[Arrival]:
        """Yield ids as they come."""
        body = _completion(prompts, num_tokens, fields) | {"stream": True}
        connection, answer = self._ask("POST", "/v1/completions", body)
        try:
            while line := answer.readline():
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                now, event = time.monotonic(), json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    yield Arrival(now, choice["index"], choice.get("token_ids") or [])
        finally:
            connection.close()

    def _whole(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        connection, answer = self._ask(method, path, body)
        try:
            return json.loads(answer.read())
        finally:
            connection.close()

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[HTTPConnection, HTTPResponse]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_LIMIT_S)
        with self._connecting:
            connection.sock = self._host.socket()
        connection.sock.settimeout(_ANSWER_LIMIT_S)
        connection.sock.connect(("127.0.0.1", self._port))
        raw = None if body is None else json.dumps(body).encode()
        connection.request(method, path, raw, {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            text = answer.read().decode()
            connection.close()
            raise AssertionError(f"{path}: {answer.status} {text}")
        return connection, answer


def _completion(prompts: Prompts, num_tokens: int, fields: dict[str, Any]) -> dict[str, Any]:
    common = {"model": MODEL_NAME, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return common | {"prompt": [list(prompt) for prompt in prompts], "max_tokens": num_tokens} | fields


class SoleServer:
    """A server on one host.

    Args:
        flags: of `penstock serve`.
        cores: of all its processes; empty: all.
        number: of the server on its host, which decides on its ports.
        environment: variables more.
    """

    def __init__(
        self,
        host: Host[Any],
        model: str,
        flags: Sequence[str] = (),
        *,
        cores: Sequence[int] = (),
        number: int = 0,
        environment: Mapping[str, str] = {},
    ) -> None:
        port = _HTTP_PORT + 100 * number
        self.client = HostClient(host, port)
        words = ["serve", model, "--served-model-name", MODEL_NAME, "--port", str(port)]
        variables = ["env", *(f"{name}={value}" for name, value in environment.items())]
        self.head = Program(host, [*variables, *_penstock(*words, "--log-format", "json", *flags)], cores)

    def __enter__(self) -> SoleServer:
        self.await_event("engine_ready")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it in order."""
        self.head.stop()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return all reports of a kind so far."""
        return [json.loads(line.text) for line in list(self.head.lines) if _is_event(line, kind)]

    def await_event(self, kind: str, limit_s: float = _START_LIMIT_S, first: int = 0) -> float:
        """Wait for a report among the lines from number `first` on, and return when it came."""
        return self.head.await_line(f'"event":"{kind}"', limit_s, first).at

    def recoveries(self) -> int:
        """Return how often a loss was made good."""
        return len(self.events("recovered"))


class PairServer(SoleServer):
    """A server whose last stages run at a worker.

    Args:
        hosts: of the head, of the worker.
        directory: for tokens and the state of both; the name of a server in it is its number.
        models: where the worker has models; "": it knows the embedded one alone.
        flags: of `penstock serve`, such as the number of stages, and `worker_flags` of `penstock worker`.
        cores: of the processes of each of both; empty: all.
    """

    def __init__(
        self,
        hosts: Sequence[Host[Any]],
        model: str,
        directory: Path,
        flags: Sequence[str] = (),
        *,
        models: str = "",
        worker_flags: Sequence[str] = (),
        cores: Sequence[Sequence[int]] = ((), ()),
        number: int = 0,
    ) -> None:
        own = directory / str(number)
        own.mkdir(parents=True, exist_ok=True)
        ports = _JOIN_PORT + 100 * number
        token, link_ports = own / "token", f"{ports + 1}-{ports + _LINK_PORTS}"
        place = f"{hosts[0].address}:{ports}"
        common = ["--join-token-file", str(token), "--link-ports", link_ports]
        joined = ["--hosts", "2", "--listen-workers", place, "--host-name", HEAD_NAME]
        head_flags = [*joined, *common, "--state-dir", str(own / HEAD_NAME), *flags]
        super().__init__(hosts[0], model, head_flags, cores=cores[0], number=number)
        words = ["worker", "--join", place, *common, "--name", WORKER_NAME, *worker_flags]
        words += ["--state-dir", str(own / WORKER_NAME), *(["--models-dir", models] if models else [])]
        self._start: Callable[[], Program] = lambda: Program(hosts[1], _penstock(*words), cores[1])
        self.workers: list[Program] = []

    def __enter__(self) -> PairServer:
        self.await_worker_wanted()
        self.start_worker()
        super().__enter__()
        return self

    def await_worker_wanted(self) -> None:
        """Wait until the head waits for a worker."""
        self.head.await_line("penstock worker --join")

    def start_worker(self) -> Program:
        """Start the worker, or start it again."""
        self.workers.append(self._start())
        return self.workers[-1]

    @property
    def worker(self) -> Program:
        """The one that was started last."""
        return self.workers[-1]

    def close(self) -> None:
        """End both in order."""
        super().close()
        for worker in self.workers:
            worker.stop()


def _penstock(*words: str) -> list[str]:
    return [sys.executable, "-m", "penstock", *words]


def _is_event(line: Line, kind: str) -> bool:
    return line.text.startswith("{") and f'"event":"{kind}"' in line.text
