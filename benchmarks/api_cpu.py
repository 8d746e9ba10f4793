"""CPU time of the API process per step while it streams: the bar is 2.5 ms a step with 32 streams.

    python benchmarks/api_cpu.py [--model DIR] [--streams 32] [--steps 500] [--step-ms 20]

The real API process (uvicorn, tokenizer, detokenizing, event streams) is fed by a stub core in this process,
which gives every stream one token per step at a fixed pace; raw sockets read the streams. CPU time is the
process's own, user and system, between the first and the last step. Exit code 1 above the bar.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
from cpu_time import cpu_seconds

from penstock.config.server import ServerConfig
from penstock.engine.ipc import AddRequest, CoreSocket, Hello, StepUpdates, Welcome
from penstock.engine.stats import CoreStats
from penstock.families.registry import load_spec
from penstock.families.spec import ModelSpec
from penstock.kvcache.stats import CacheStats
from penstock.process.config import ApiProcessConfig
from penstock.request import FinishReason, RequestUpdate
from penstock.scheduler.stats import SchedulerStats

BAR_MS = 2.5
REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT_MODEL = REPOSITORY.parent / "shared" / "data" / "models" / "stories260K"
FIRST_ID = 300  # ids with plain text in the default model


class StubCore:
    """Answers every request with one token per step, all requests in the same step."""

    def __init__(self, address: str, max_model_len: int, vocab_size: int) -> None:
        self._socket = CoreSocket(address)
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._ids: list[str] = []
        self._client = b""

    def wait_for_client(self) -> None:
        while not self._client:
            self._receive(0.05)
        welcome = Welcome(num_blocks=1000, block_size=16, max_model_len=self._max_model_len, stages=[])
        self._socket.send(self._client, welcome)

    def wait_for_requests(self, count: int) -> None:
        while len(self._ids) < count:
            self._receive(0.05)

    def step(self, index: int, *, last: bool = False) -> None:
        token_id = FIRST_ID + index % (self._vocab_size - FIRST_ID)
        reason: FinishReason | None = "length" if last else None
        updates = [
            RequestUpdate(request_id=name, token_ids=[token_id], finish_reason=reason, queue_seconds=0.0)
            for name in self._ids
        ]
        self._socket.send(self._client, StepUpdates(updates, _stats(index, len(self._ids))))

    def close(self) -> None:
        self._socket.close()

    def _receive(self, timeout_s: float) -> None:
        self._socket.wait([], timeout_s)
        for client, message in self._socket.drain():
            if isinstance(message, Hello):
                self._client = client
            elif isinstance(message, AddRequest):
                self._ids.append(message.request.request_id)


def _stats(step: int, running: int) -> CoreStats:
    return CoreStats(
        scheduler=SchedulerStats(num_running=running, generated_tokens=step * running),
        cache=CacheStats(num_blocks=1000, free_blocks=500),
        step_id=step,
        inflight=1,
        last_result_age_s=0.0,
        stalled_s=0.0,
        stall_limit_s=5.0,
        epoch=0,
    )


def start_api(config: ApiProcessConfig) -> subprocess.Popen[bytes]:
    config_read, config_write = os.pipe()
    status_read, status_write = os.pipe()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "penstock.server.api_process",
            "--config-fd",
            str(config_read),
            "--status-fd",
            str(status_write),
        ],
        pass_fds=[config_read, status_write, config.listen_fd],
        stderr=subprocess.DEVNULL,
    )
    for fd in (config_read, status_read, status_write):
        os.close(fd)
    with os.fdopen(config_write, "wb") as pipe:
        pipe.write(msgspec.msgpack.encode(config))
    return process


def open_streams(port: int, count: int, max_tokens: int) -> list[socket.socket]:
    body = {"prompt": [1, 2, 3], "max_tokens": max_tokens, "stream": True}
    raw = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(raw)
    streams = []
    for _ in range(count):
        stream = socket.create_connection(("127.0.0.1", port))
        stream.sendall(head + raw)
        streams.append(stream)
    return streams


def drain(streams: list[socket.socket]) -> dict[socket.socket, int]:
    """Read all streams to their end; how many chunks with text each brought."""
    selector = selectors.DefaultSelector()
    counts = dict.fromkeys(streams, 0)
    for stream in streams:
        selector.register(stream, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(1 << 16)
            counts[key.fileobj] += data.count(b'"finish_reason":null')
            if not data or b"[DONE]" in data:
                selector.unregister(key.fileobj)
    return counts


def measure(core: StubCore, pid: int, steps: int, step_s: float) -> float:
    """CPU seconds of the process over the steps, after ten of warm-up."""
    begin = 0.0
    due = time.monotonic()
    for index in range(steps + 10):
        if index == 10:
            begin = cpu_seconds([pid])
        core.step(index)
        due += step_s
        time.sleep(max(0.0, due - time.monotonic()))
    return cpu_seconds([pid]) - begin


def run(model: Path, num_streams: int, steps: int, step_ms: float) -> int:
    """Measure once, print the numbers, and say whether the bar holds as an exit code."""
    spec = load_spec(model)
    with tempfile.TemporaryDirectory() as directory, socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"ipc://{directory}/core"
        core = StubCore(address, spec.max_position_embeddings, spec.vocab_size)
        process = start_api(api_config(spec, model, address, listener.fileno(), num_streams))
        try:
            core.wait_for_client()
            time.sleep(0.2)
            port = listener.getsockname()[1]
            streams = open_streams(port, num_streams, spec.max_position_embeddings - 3)
            core.wait_for_requests(num_streams)
            counts: dict[socket.socket, int] = {}
            reader = threading.Thread(target=lambda: counts.update(drain(streams)))
            reader.start()
            used = measure(core, process.pid, steps, step_ms / 1000)
            core.step(0, last=True)
            reader.join(30)
        finally:
            process.terminate()
            process.wait()
            core.close()
    for stream in streams:
        stream.close()
    per_step = 1000 * used / steps
    print(
        f"{num_streams} streams, {steps} steps of {step_ms} ms: API process {per_step:.3f} ms CPU a step, "
        f"{1000 * per_step / num_streams:.1f} us a token; bar {BAR_MS} ms; "
        f"chunks per stream {min(counts.values())} to {max(counts.values())}"
    )
    return 0 if per_step < BAR_MS else 1


def api_config(
    spec: ModelSpec, model: Path, address: str, listen_fd: int, num_streams: int
) -> ApiProcessConfig:
    return ApiProcessConfig(
        server=ServerConfig(),
        parent_pid=os.getpid(),
        client_addresses=[address],
        listen_fd=listen_fd,
        model_path=str(model),
        model_names=["bench"],
        max_model_len=spec.max_position_embeddings,
        vocab_size=spec.vocab_size,
        eos_token_ids=list(spec.eos_token_ids),
        max_num_seqs=num_streams,
        max_waiting_requests=num_streams,
        num_stages=1,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=20.0)
    arguments = parser.parse_args()
    return run(arguments.model, arguments.streams, arguments.steps, arguments.step_ms)


if __name__ == "__main__":
    sys.exit(main())
