"""The lines that `penstock serve` shows while it starts, runs and ends: plan, stages, address, errors.

`cli.serve` gives the supervisor a `ServeReporter` or a `JsonReporter`. On a terminal one line, which is
rewritten, shows the loading of all stages; elsewhere each line is written once. Requests are not shown.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from penstock import __version__
from penstock.cli.client_tls import is_trusted
from penstock.cli.terminal import Invocation, one_line, report_error
from penstock.config.engine import EngineConfig
from penstock.config.server import ServerConfig
from penstock.engine.supervisor.reports import (
    Caution,
    EngineFailed,
    EngineReady,
    Event,
    LoadProgress,
    StageReady,
    event_line,
    megabytes,
)
from penstock.errors import UsageError, error_from_info
from penstock.families.registry import served_names
from penstock.process import tls
from penstock.process.child import PromptForm

INDENT = "        "
_CLEAR_LINE = "\r\x1b[K"
PROGRESS_EVERY_S = 5.0


class LoadingLine:
    """The progress of all stages: on a terminal one line that is rewritten, elsewhere a line now and then."""

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
        """Remove the line from the terminal, before another line is printed."""
        if self._shown:
            self._stream.write(_CLEAR_LINE)
            self._shown = False


def _share(event: LoadProgress) -> str:
    done = min(1.0, event.done_bytes / max(1, event.total_bytes))
    filled = int(10 * done)
    name = event.name if event.what == "loading" else f"{event.name} {event.what}"
    return f"{name} [{'#' * filled}{'.' * (10 - filled)}] {megabytes(event.total_bytes)}"


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
        self._has_begun = False

    def report(self, event: Event) -> None:
        if isinstance(event, EngineFailed):
            self._loading.clear()
            report_error(error_from_info(event.error), self._invocation)
            return
        self._begin()
        if isinstance(event, LoadProgress):
            self._loading.update(event)
            return
        self._loading.clear()
        if isinstance(event, EngineReady):
            self._announce(event)
        elif isinstance(event, Caution):
            self._invocation.warn(event.text)
        elif isinstance(event, StageReady):
            self._invocation.say(INDENT + event_line(event))
        elif line := event_line(event):
            self._invocation.say(line)

    def _begin(self) -> None:
        """Show the settings before the first event, which comes only after the model was found."""
        if not self._has_begun:
            self._has_begun = True
            self._invocation.say(*plan_lines(self._engine, self._server))

    def _announce(self, event: EngineReady) -> None:
        ready = self._invocation.style.paint(f"ready in {event.seconds:.1f} s", "green")
        name = served_names(self._engine.model.model, self._server.served_model_names)[0]
        self._invocation.say(
            f"{ready}   {event.address}   page /   metrics /metrics",
            "Try: " + curl_example(event.address, name, self._server, event.prompt_form),
        )


class JsonReporter:
    """Shows a supervisor's events as JSON lines with their times, but of loading only the end."""

    def __init__(self, stream: TextIO, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._stream = stream
        self._now = now

    def report(self, event: Event) -> None:
        if isinstance(event, LoadProgress) and event.done_bytes < event.total_bytes:
            return
        fields = {"time": self._now().isoformat(timespec="milliseconds")} | msgspec.to_builtins(event)
        self._stream.write(msgspec.json.encode(fields).decode() + "\n")
        self._stream.flush()


def plan_lines(engine: EngineConfig, server: ServerConfig) -> list[str]:
    """Return the first lines of a start: version, model, stages and limits, but not the keys."""
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


_EXAMPLES: Mapping[PromptForm, tuple[str, Mapping[str, Any]]] = {
    "messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "text": ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 32}),
    "token_ids": ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 32}),
}


def curl_example(address: str, name: str, server: ServerConfig, prompt_form: PromptForm) -> str:
    """Return a command that can be pasted into a shell, for the richest prompt that the model takes."""
    path, fields = _EXAMPLES[prompt_form]
    words = ["curl", address + path, "-H 'Content-Type: application/json'"]
    if not _is_certificate_trusted(server):
        words.append(f"--cacert {shlex.quote(str(server.ssl_certfile))}")
    if server.api_keys:
        words.append('-H "Authorization: Bearer $PENSTOCK_API_KEY"')
    body = msgspec.json.encode({"model": name, **fields}).decode()
    return " ".join([*words, f"-d {shlex.quote(body)}"])


def _is_certificate_trusted(server: ServerConfig) -> bool:
    """Return whether curl needs no `--cacert` for the server: it has a trusted certificate, or plain HTTP."""
    try:
        context = tls.server_context(server)
    except UsageError:  # the certificate's file has changed since the start
        return True
    return context is None or is_trusted(context)
