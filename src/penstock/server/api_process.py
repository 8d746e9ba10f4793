"""The API process: `python -m penstock.server.api_process --config-fd N --status-fd M`.

The supervisor starts it and hands it the HTTP socket, which is bound, and which listens already unless the
port is to be taken over (`process.listening`). The process serves until SIGTERM or SIGINT. It then refuses
new requests, lets running answers end, and exits with code 0; a second signal ends running answers at once.
A thread writes its log, so that a stopped terminal does not stop the answers. The process never imports
torch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

import uvicorn
import uvloop
from msgspec import structs

from penstock.config.limits import ConnectionLimits
from penstock.engine.client.async_engine import AsyncEngine
from penstock.engine.client.core_health import EngineInfo
from penstock.engine.client.replicas import Replicas
from penstock.families.registry import load_generation_defaults, load_vector_shape
from penstock.grammar.proving import GrammarModel
from penstock.process import entry_points, listening, tls
from penstock.process.child import (
    PromptForm,
    Pulse,
    Ready,
    StatusWriter,
    TextSideLoaded,
    enter_child,
    keep_saying_alive,
    run_child,
)
from penstock.process.config import ApiProcessConfig
from penstock.process.output_thread import DROPPED, OutputThread
from penstock.server.app import App, create_app
from penstock.server.engine_port import ModelCodec, ServedModel
from penstock.server.http.http_protocol import with_limits
from penstock.server.http.request_log import FORMATS, LogForm, RequestLog
from penstock.server.http.tls_ending import num_queued
from penstock.server.http.tls_listener import TlsListener
from penstock.tokenizer.chat_template import AbsentChatTemplate, ChatTemplate
from penstock.tokenizer.model_syntax import model_syntax, tool_form_caution
from penstock.tokenizer.template_files import load_chat_template
from penstock.tokenizer.tokenizer import AbsentTokenizer, Tokenizer, load_tokenizer

BEAT_S = 0.5
DATE_S = 1.0  # how old the date of an answer may be
CLOSE_S = 2  # seconds for answers that were ended to reach their clients; less than the supervisor waits
LOOK_S = 0.05  # seconds between two looks whether clients have taken what is written
_OTHER_DESCRIPTORS = 64  # file descriptors that are not connections of clients


class HttpServer(uvicorn.Server):
    """A server of uvicorn without uvicorn's signal handling; at its end it waits for running answers.

    Args:
        app: the application from `create_app`.
        limits: bounds of connections.
        drain_s: seconds for which running answers may continue after the first call of `stop`.
        on_listening: called once connections are accepted.
        context: TLS context for HTTPS; None: the server speaks plain HTTP.
    """

    def __init__(
        self,
        app: App,
        limits: ConnectionLimits,
        drain_s: float,
        on_listening: Callable[[], None] = lambda: None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(uvicorn_config(app, limits))
        self._limits = limits
        self._context = context
        self._tls_listeners: list[TlsListener] = []
        self._lifecycle = app.context.lifecycle
        self._log = app.context.log
        self._drain_s = drain_s
        self._on_listening = on_listening
        self._drain: asyncio.Task[None] | None = None
        self._is_drained = asyncio.Event()
        self._is_hurried = False

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to this process, which calls `stop`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._context is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            self._tls_listeners = [self._secured(listener, self._context) for listener in sockets or []]
        for listener in self._tls_listeners:
            listener.open()
        self._on_listening()

    async def main_loop(self) -> None:
        """Wait for the end, and once a second renew the date that answers carry.

        uvicorn's own loop wakes ten times a second.
        """
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_drained.wait(), DATE_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self._tls_listeners:
            listener.close()
        await super().shutdown(sockets)

    def stop(self) -> None:
        """Refuse new requests, let running answers end, then end the server.

        A second call ends the running answers at once.
        """
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._drain_and_end())
        else:
            self._is_hurried = True
            self._log.event("ended at once", running=self._lifecycle.end_all())

    def _secured(self, listener: socket.socket, context: ssl.SSLContext) -> TlsListener:
        config, state, protocol_class = self.config, self.server_state, with_limits(self._limits)

        def make_protocol() -> asyncio.Protocol:
            return protocol_class(config, state, self.lifespan.state)

        def on_plain_http(client: str) -> None:
            self._log.warning(
                "a client spoke plain HTTP to this HTTPS server; its URL must begin with https://",
                client=client,
            )

        return TlsListener(
            listener, context, self._limits, lambda: len(state.connections), make_protocol, on_plain_http
        )

    async def _drain_and_end(self) -> None:
        self._log.event("draining", running=self._lifecycle.num_running, seconds=self._drain_s)
        until = asyncio.get_running_loop().time() + self._drain_s
        ended = await self._lifecycle.drain(self._drain_s)
        await self._let_clients_take(until)
        self._log.event("drained", ended_early=ended)
        self.should_exit = True
        self._is_drained.set()

    async def _let_clients_take(self, until: float) -> None:
        """Wait while slow clients take answers that are complete, up to this loop time.

        It looks twice: the system may be about to get more of the bytes that the event loop has encrypted.
        """
        loop = asyncio.get_running_loop()
        before = left = self._num_unsent()
        until_next = loop.time() + CLOSE_S
        while (before or left) and loop.time() < min(until, until_next) and not self._is_hurried:
            await asyncio.sleep(LOOK_S)
            before, left = left, self._num_unsent()
            if left < before:
                until_next = loop.time() + CLOSE_S

    def _num_unsent(self) -> int:
        """Return the bytes written that the system, or over HTTPS the client's host, has not taken."""
        transports = [each.transport for each in self.server_state.connections]
        queued = map(num_queued, transports) if self._context is not None else ()
        return sum(each.get_write_buffer_size() for each in transports) + sum(queued)


def uvicorn_config(app: App, limits: ConnectionLimits) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return uvicorn.Config(
        app,
        http=with_limits(limits),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=limits.keep_alive_timeout_s,  # type: ignore[arg-type]  # it goes to `call_later` alone
        timeout_graceful_shutdown=CLOSE_S,
    )


def allow_connections(wanted: int) -> int:
    """Raise this process's limit on open files as far as needed and allowed.

    Args:
        wanted: number of connections that are to be open at once.

    Returns:
        How many of them fit below the limit; at least 1.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return max(1, min(wanted, needed - _OTHER_DESCRIPTORS))


def notice_lost_clients(listener: socket.socket, silence_s: float) -> None:
    """Let the system end connections whose other side has vanished without a word, as a host without power.

    Otherwise nothing would show it: reads never fail, and nothing is written while an answer is computed. The
    sockets that the listener accepts inherit these options from it.

    Args:
        silence_s: seconds for which the other side's host may answer nothing.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", silence_s / 2),
        ("TCP_KEEPINTVL", silence_s / 8),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", silence_s * 1000),  # milliseconds that sent data may stay without an answer
    ):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), max(1, round(value)))


def prompt_form(tokenizer: Tokenizer, template: ChatTemplate) -> PromptForm:
    """Return the richest form of prompt that a model with this tokenizer and this template takes."""
    if isinstance(tokenizer, AbsentTokenizer):
        return "token_ids"
    return "text" if isinstance(template, AbsentChatTemplate) else "messages"


def served_model(config: ApiProcessConfig, tokenizer: Tokenizer, template: ChatTemplate) -> ServedModel:
    """Return the model as the server needs it, with what its directory says of sampling and of vectors."""
    directory = Path(config.model_path)
    return ServedModel(
        name=config.model_names[0],
        aliases=config.model_names[1:],
        codec=ModelCodec(tokenizer, template),
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        created=int(time.time()),
        num_stages=config.num_stages,
        stages=config.stages,
        host_links=config.host_links,
        token_bytes=config.token_bytes,
        sampling_defaults=load_generation_defaults(directory, config.vocab_size),
        syntax=model_syntax(
            template,
            tokenizer.added_token_ids,
            tool_parser=config.server.tool_parser,
            reasoning_parser=config.server.reasoning_parser,
        ),
        grammar_model=GrammarModel(directory=directory, eos_token_ids=tuple(config.eos_token_ids)),
        vector=load_vector_shape(directory, config.hidden_size),
    )


class _WhenBoth:
    """Calls `act` once both have been noted: the engine has answered, and connections are accepted."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._num = 0

    def note(self) -> None:
        self._num += 1
        if self._num == 2:
            self._act()


async def _keep_beating(pulse: Pulse) -> None:
    """Beat as long as the event loop turns."""
    while True:
        pulse.beat()
        await asyncio.sleep(BEAT_S)


async def serve(config: ApiProcessConfig, status: StatusWriter, pulse: Pulse, log: RequestLog) -> None:
    """Serve on the inherited socket until told to stop."""
    beating = asyncio.create_task(_keep_beating(pulse))
    tokenizer = load_tokenizer(Path(config.model_path))
    template = load_chat_template(Path(config.model_path), tokenizer, config.chat_template)
    model = served_model(config, tokenizer, template)
    caution = tool_form_caution(model.syntax)
    status.write(
        TextSideLoaded(prompt_form=prompt_form(tokenizer, template), cautions=[caution] if caution else [])
    )
    info = EngineInfo.from_config(config, model.vector)
    engines = [AsyncEngine(address, tokenizer, info) for address in config.client_addresses]
    engine = engines[0] if len(engines) == 1 else Replicas(engines, has_prefix_cache=config.has_prefix_cache)
    listener = socket.socket(fileno=config.listen_fd)
    ready = _WhenBoth(lambda: status.write(Ready()))
    app = create_app(engine, config.server, model, log=log, on_ready=ready.note, hold_s=config.hold_s)
    wanted = config.server.connections
    limits = structs.replace(wanted, max_connections=allow_connections(wanted.max_connections))

    def on_listening() -> None:
        if config.server.reuse_port:
            listening.take_over(listener)
        ready.note()

    server = HttpServer(app, limits, config.server.drain_s, on_listening, tls.server_context(config.server))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    notice_lost_clients(listener, limits.write_timeout_s)
    try:
        await server.serve(sockets=[listener])
    finally:
        engine.close()
        beating.cancel()


def main(arguments: list[str]) -> int:
    return run_child(entry_points.API_PROCESS, arguments, ApiProcessConfig, _run)


def _run(config: ApiProcessConfig, status: StatusWriter, options: argparse.Namespace) -> int:
    enter_child("penstock api", config)
    pulse, form = keep_saying_alive(status), config.server.log_format
    output = OutputThread(sys.stderr, sys.stderr, partial(_dropped_line, form))
    with contextlib.closing(output), contextlib.redirect_stderr(output.stderr):  # others write there, too
        uvloop.run(serve(config, status, pulse, RequestLog(form, output.stderr)))
    return 0


def _dropped_line(form: LogForm, count: int) -> str:
    return FORMATS[form]("WARNING", DROPPED, {"lines": count})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
