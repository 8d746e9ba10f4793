"""What `penstock serve` shows while it starts, runs and ends: plan, a line per stage, address, errors.

`cli.serve` hands one of these to the supervisor as its `Reporter`. On a terminal the loading of all stages
shares one line that is written again; elsewhere every line stands for itself. Says nothing about single
requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO

import msgspec

from penstock import __version__
from penstock.cli.terminal import Invocation, one_line, report_error
from penstock.config.engine import EngineConfig
from penstock.config.server import ServerConfig
from penstock.engine.supervisor.reports import (
    EngineFailed,
    EngineReady,
    Event,
    LoadProgress,
    StageReady,
    event_line,
    megabytes,
)
from penstock.errors import error_from_info

INDENT = "        "
_CLEAR_LINE = "\r\x1b[K"
PROGRESS_EVERY_S = 5.0


class LoadingLine:
    """The progress of all stages: on a terminal one line written again, elsewhere a line now and then."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._last_s = clock()
        self._progress: dict[str, LoadProgress] = {}
        self._shown = False

    def update(self, event: LoadProgress) -> None:
        self._progress[event.name] = event
        if self._stream.isatty():
            parts = [_share(progress) for _, progress in sorted(self._progress.items())]
            self._stream.write(f"{_CLEAR_LINE}{INDENT}loading  {'  '.join(parts)}")
            self._stream.flush()
            self._shown = True
        elif self._clock() - self._last_s >= PROGRESS_EVERY_S:
            self._last_s = self._clock()
            self._stream.write(f"{INDENT}{event_line(event)}\n")
            self._stream.flush()

    def clear(self) -> None:
        """Take the line away before another one is printed."""
        if self._shown:
            self._stream.write(_CLEAR_LINE)
            self._shown = False


def _share(event: LoadProgress) -> str:
    done = event.done_bytes / max(1, event.total_bytes)
    filled = int(10 * done)
    return f"{event.name} [{'#' * filled}{'.' * (10 - filled)}] {megabytes(event.total_bytes)}"


class ServeReporter:
    """Shows a supervisor's events to a person."""

    def __init__(
        self,
        invocation: Invocation,
        engine: EngineConfig,
        server: ServerConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._invocation = invocation
        self._engine = engine
        self._server = server
        self._loading = LoadingLine(invocation.stdout, clock)
        self._ready = False

    def begin(self) -> None:
        """The plan, before anything is started."""
        for line in plan_lines(self._engine, self._server):
            self._invocation.say(line)

    def report(self, event: Event) -> None:
        if isinstance(event, LoadProgress):
            self._loading.update(event)
            return
        self._loading.clear()
        if isinstance(event, EngineFailed):
            report_error(error_from_info(event.error), self._invocation)
        elif isinstance(event, EngineReady):
            self._announce(event)
        elif isinstance(event, StageReady):
            self._invocation.say(INDENT + event_line(event))
        elif line := event_line(event):
            self._invocation.say(line)

    def _announce(self, event: EngineReady) -> None:
        ready = self._invocation.style.paint(f"ready in {event.seconds:.1f} s", "green")
        self._invocation.say(
            f"{ready}   {event.address}   metrics /metrics",
            "Try: " + curl_example(event.address, served_name(self._engine, self._server), self._server),
        )


class JsonReporter:
    """Shows a supervisor's events as JSON lines, with the time of each."""

    def __init__(self, stream: TextIO, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._stream = stream
        self._now = now

    def report(self, event: Event) -> None:
        if isinstance(event, LoadProgress) and event.done_bytes < event.total_bytes:
            return
        fields = {"time": self._now().isoformat(timespec="milliseconds")} | msgspec.to_builtins(event)
        self._stream.write(msgspec.json.encode(fields).decode() + "\n")
        self._stream.flush()


def served_name(engine: EngineConfig, server: ServerConfig) -> str:
    return server.served_model_name or engine.model.model


def plan_lines(engine: EngineConfig, server: ServerConfig) -> list[str]:
    """Version, model, stages and limits; never a key."""
    sizes = engine.parallel.tp_sizes
    tp = str(sizes[0]) if len(set(sizes)) == 1 else ",".join(map(str, sizes))
    replicas = engine.parallel.data_parallel_size
    dp = f" x dp {replicas}" if replicas > 1 else ""
    if server.api_keys:
        key = f"key on ({len(server.api_keys)})"
    else:
        key = "key off (--insecure)" if server.insecure else "key off (loopback only)"
    if server.admin_keys:
        key += f"   admin key on ({len(server.admin_keys)})"
    return [
        f"penstock {__version__}   model {one_line(engine.model.model)}   dtype {engine.model.dtype}   "
        f"stages {len(sizes)} x tp {tp}{dp}",
        f"{INDENT}{key}   queue {engine.scheduler.max_waiting_requests}   "
        f"connections {server.connections.max_connections}   drain {server.drain_s:g} s",
    ]


def curl_example(address: str, name: str, server: ServerConfig) -> str:
    """A command that can be pasted into a shell."""
    body = msgspec.json.encode({"model": name, "messages": [{"role": "user", "content": "hi"}]}).decode()
    key = ' -H "Authorization: Bearer $PENSTOCK_API_KEY"' if server.api_keys else ""
    quoted = body.replace("'", "'\\''")
    return f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{quoted}'"
