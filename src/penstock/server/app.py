"""Builds the ASGI app: routes, collaborators, and the gate around them.

`create_app` is called by `api_process` (with an `AsyncEngine`) and by tests (with a fake engine). The app's
lifespan connects the engine in the background, so that health and errors are answered while it loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock import __version__
from penstock.config.server import ServerConfig
from penstock.errors import PenstockError
from penstock.grammar.proving import GrammarProver
from penstock.server import openapi
from penstock.server.answers.generation import GenerationContext
from penstock.server.engine_port import EngineLike, ServedModel
from penstock.server.http.access import OPEN_PATHS, ApiKeys, HostPolicy
from penstock.server.http.cross_origin import CrossOrigin
from penstock.server.http.errors import answer_http_exception, answer_validation_error, error_response
from penstock.server.http.gate import Gate
from penstock.server.http.keep_alive import Clock, KeepAlive
from penstock.server.http.lifecycle import Lifecycle
from penstock.server.http.memory_guard import MemoryGuard
from penstock.server.http.metrics import Metrics
from penstock.server.http.request_log import RequestLog
from penstock.server.http.request_record import record_of
from penstock.server.http.text_workers import TextWorkers
from penstock.server.openai.openai_types import (
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    RenderedPrompt,
)
from penstock.server.openai.responses_types import ResponseObject, ResponsesRequest
from penstock.server.routes.admin import AdminRoute, refuse_what_is_not_read
from penstock.server.routes.chat import ChatRoute
from penstock.server.routes.chat_reader import ChatReader
from penstock.server.routes.completions import CompletionsRoute
from penstock.server.routes.debug import DebugRoute
from penstock.server.routes.embeddings import EmbeddingsRoute
from penstock.server.routes.generation_route import GenerationRoute
from penstock.server.routes.health import HealthRoute
from penstock.server.routes.models import ModelsRoute
from penstock.server.routes.pipeline_view import PipelineRoute
from penstock.server.routes.profile_folder import ProfileFolder
from penstock.server.routes.profiler import Profiler
from penstock.server.routes.responses import ResponsesRoute
from penstock.server.routes.server_info import ServerInfoRoute
from penstock.server.routes.store_watch import StoreWatch
from penstock.server.routes.text_routes import (
    DetokenizeRequest,
    DetokenizeResponse,
    TextRoute,
    TokenizeChatRequest,
    TokenizeResponse,
    TokenizeTextRequest,
)

# The framework's own telemetry stays off: this server reports by /metrics and opens no connection.
_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}


class App:
    """The ASGI app, and the handles that the process around it needs.

    Attributes:
        routes: the FastAPI app behind the gate.
        context: collaborators of generating responses; its `lifecycle` drains the server.
    """

    def __init__(self, routes: FastAPI, gate: Gate, context: GenerationContext) -> None:
        self.routes = routes
        self.context = context
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gate(scope, receive, send)


def _nothing() -> None:
    pass


def create_app(
    engine: EngineLike,
    config: ServerConfig,
    model: ServedModel,
    *,
    log: RequestLog | None = None,
    on_ready: Callable[[], None] = _nothing,
    hold_s: float = 0.0,
    clock: Clock = time.monotonic,
) -> App:
    """The whole front over an engine.

    Args:
        log: defaults to what the config implies.
        on_ready: called once, when the engine has answered.
        hold_s: nothing is answered before, for this long at most.
        clock: monotonic seconds.
    """
    log = log or RequestLog(config.log_format)
    workers = TextWorkers()
    metrics = Metrics(model, engine)
    context = GenerationContext(
        engine=engine,
        lifecycle=Lifecycle(),
        memory=MemoryGuard(config.min_free_bytes, clock),
        keep_alive=KeepAlive(clock),
        metrics=metrics,
        log=log,
        clock=clock,
    )
    grammars = GrammarProver(model.grammar_model, config.grammars)
    routes = _fastapi(_lifespan(context, workers, grammars, on_ready, hold_s))
    route = GenerationRoute(model, context, config.limits, workers, grammars)
    _add_generation_routes(routes, route)
    _add_embeddings_route(routes, EmbeddingsRoute(route, context, workers))
    _add_plain_routes(routes, model, context)
    _add_views(routes, model, context, config)
    if config.admin_keys:
        folder = ProfileFolder(config.profile_dir, config.limits.max_profiles)
        profiler = Profiler(engine, folder, config.limits, num_stages=model.num_stages, clock=clock)
        _add_admin_routes(routes, AdminRoute(engine, context.lifecycle, profiler, config.limits))
    openapi.complete(routes, model, config)
    gate = Gate(
        routes,
        keys=ApiKeys(config.api_keys, config.admin_keys),
        hosts=HostPolicy(config.host, config.allowed_origins),
        pages=CrossOrigin(config.allowed_origins),
        log=log,
        metrics=metrics,
        lifecycle=context.lifecycle,
        clock=clock,
    )
    return App(routes, gate, context)


def _fastapi(lifespan: Callable[[Any], Any]) -> FastAPI:
    return FastAPI(
        title="Penstock",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # the stock pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
        telemetry=_NO_TELEMETRY,
        exception_handlers={
            PenstockError: _answer_penstock_error,
            HTTPException: answer_http_exception,
            RequestValidationError: answer_validation_error,
            Exception: _answer_bug,
        },
    )


async def _answer_penstock_error(request: Request, error: Exception) -> Response:
    record = record_of(request.scope)
    assert isinstance(error, PenstockError)
    record.error_code = error.code or type(error).__name__
    return error_response(error, record.request_id)


async def _answer_bug(request: Request, error: Exception) -> Response:
    """The gate writes the trace into the log; the client gets the id to ask for."""
    record = record_of(request.scope)
    record.error_code = "bug"
    return error_response(error, record.request_id)


def _add_generation_routes(routes: FastAPI, route: GenerationRoute) -> None:
    chats = ChatReader(route)
    chat, completions, text = ChatRoute(route, chats), CompletionsRoute(route), TextRoute(route)
    responses = ResponsesRoute(route, chats)
    generates, converts = openapi.generation_route, openapi.text_route
    for path, endpoint, name, described in (
        ("/v1/chat/completions", chat.create, "create_chat_completion", generates(ChatRequest, ChatResponse)),
        (
            "/v1/completions",
            completions.create,
            "create_completion",
            generates(CompletionRequest, CompletionResponse),
        ),
        ("/v1/responses", responses.create, "create_response", generates(ResponsesRequest, ResponseObject)),
        (
            "/v1/chat/completions/render",
            chat.render,
            "render_chat_completion",
            converts(RenderedPrompt, ChatRequest),
        ),
        (
            "/v1/completions/render",
            completions.render,
            "render_completion",
            converts(RenderedPrompt, CompletionRequest, is_list=True),
        ),
        (
            "/tokenize",
            text.tokenize,
            "tokenize",
            converts(TokenizeResponse, TokenizeTextRequest, TokenizeChatRequest),
        ),
        ("/detokenize", text.detokenize, "detokenize", converts(DetokenizeResponse, DetokenizeRequest)),
    ):
        routes.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            name=name,
            response_class=Response,
            **described,
        )


def _add_views(routes: FastAPI, model: ServedModel, context: GenerationContext, config: ServerConfig) -> None:
    info = ServerInfoRoute(model, context.engine, config.settings)
    pipeline = PipelineRoute(
        model,
        context.engine,
        context.lifecycle,
        max_streams=config.limits.max_event_streams,
        clock=context.clock,
    )
    for path, endpoint, name in (
        ("/server_info", info.get, "server_info"),
        ("/debug/pipeline", pipeline.snapshot, "pipeline"),
        ("/debug/pipeline/events", pipeline.events, "pipeline_events"),
    ):
        routes.add_api_route(
            path,
            endpoint,
            methods=["GET"],
            response_class=Response,
            name=name,
            **openapi.plain_route(path),
        )


def _add_embeddings_route(routes: FastAPI, embeddings: EmbeddingsRoute) -> None:
    routes.add_api_route(
        "/v1/embeddings",
        embeddings.create,
        methods=["POST"],
        name="create_embedding",
        response_class=Response,
        **openapi.whole_route(EmbeddingRequest, EmbeddingResponse),
    )


def _add_plain_routes(routes: FastAPI, model: ServedModel, context: GenerationContext) -> None:
    models = ModelsRoute(model, context.engine)
    health = HealthRoute(context)
    for path, endpoint, name in (
        ("/v1/models", models.list, "list_models"),
        ("/v1/models/{model_id:path}", models.get, "get_model"),
        ("/health", health.ready, "health"),
        ("/health/ready", health.ready, "health_ready"),
        ("/health/live", health.live, "health_live"),
        ("/health/generate", health.generate, "health_generate"),
        ("/metrics", health.metrics, "metrics"),
        ("/version", health.version, "version"),
        ("/debug/trace", DebugRoute(context.engine).trace, "trace"),
    ):
        routes.add_api_route(
            path,
            endpoint,
            methods=["GET"],
            response_class=Response,
            name=name,
            **openapi.plain_route(path),
        )
        if path in OPEN_PATHS:  # probes may ask for the head alone
            routes.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)


def _add_admin_routes(routes: FastAPI, admin: AdminRoute) -> None:
    for path, method, endpoint, name in (
        ("/pause", "POST", admin.pause, "pause"),
        ("/resume", "POST", admin.resume, "resume"),
        ("/flush_cache", "POST", admin.flush_cache, "flush_cache"),
        ("/abort", "POST", admin.abort, "abort"),
        ("/slow_down", "POST", admin.slow_down, "slow_down"),
        ("/open_session", "POST", admin.open_session, "open_session"),
        ("/close_session", "POST", admin.close_session, "close_session"),
        ("/start_profile", "POST", admin.start_profile, "start_profile"),
        ("/stop_profile", "POST", admin.stop_profile, "stop_profile"),
        ("/is_paused", "GET", admin.is_paused, "is_paused"),
    ):
        routes.add_api_route(
            path,
            endpoint,
            methods=[method],
            response_class=Response,
            name=name,
            dependencies=[Depends(refuse_what_is_not_read)],
            **openapi.plain_route(path),
        )


def _lifespan(
    context: GenerationContext,
    workers: TextWorkers,
    grammars: GrammarProver,
    on_ready: Callable[[], None],
    hold_s: float,
) -> Callable[[Any], Any]:
    @contextlib.asynccontextmanager
    async def lifespan(_app: Any) -> AsyncIterator[None]:
        connecting = asyncio.create_task(_connect(context, on_ready))
        watching = StoreWatch(context.log, context.clock).run(context.engine)
        tasks = [connecting, *map(asyncio.create_task, (context.keep_alive.run(), watching))]
        try:
            await asyncio.wait({connecting}, timeout=None if math.isinf(hold_s) else hold_s)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            workers.close()
            grammars.close()

    return lifespan


async def _connect(context: GenerationContext, on_ready: Callable[[], None]) -> None:
    """Wait for the engine; its failure shows in its status, which health and requests read."""
    try:
        await context.engine.start()
    except PenstockError as error:
        context.log.warning("engine", error=str(error))
    else:
        on_ready()
