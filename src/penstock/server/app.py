"""Builds the ASGI app: the routes, the objects that they use, and the gate around them.

`create_app` is called by `api_process`, with the client of the engine, and by tests, with a fake engine. The
app's lifespan connects to the engine in the background, so that health and errors are answered while the
engine loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from penstock.config.server import ServerConfig
from penstock.errors import PenstockError
from penstock.grammar.proving import GrammarProver
from penstock.server import openapi
from penstock.server.answers.generation import GenerationContext
from penstock.server.answers.resumable import ResumableStreams
from penstock.server.anthropic.error_form import MessagesErrorBody, MessagesErrors
from penstock.server.anthropic.messages_types import (
    CountTokensRequest,
    MessageObject,
    MessagesRequest,
    TokenCount,
)
from penstock.server.engine_port import EngineLike, ServedModel
from penstock.server.http.access import OPEN_PATHS, ApiKeys, HostPolicy
from penstock.server.http.cross_origin import CrossOrigin
from penstock.server.http.errors import ErrorAnswers, json_response
from penstock.server.http.gate import Gate
from penstock.server.http.keep_alive import Clock, KeepAlive
from penstock.server.http.lifecycle import Lifecycle
from penstock.server.http.memory_guard import MemoryGuard
from penstock.server.http.metric_names import under_own_names, under_vllm_names
from penstock.server.http.metrics import Metrics
from penstock.server.http.request_log import RequestLog
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
from penstock.server.openapi import DescribedRoute
from penstock.server.routes.admin import (
    AbortQuery,
    AdminRoute,
    CloseSessionQuery,
    FlushQuery,
    NoQuery,
    OpenSessionQuery,
    PauseQuery,
    SlowDownQuery,
    TimeoutQuery,
)
from penstock.server.routes.chat import ChatRoute
from penstock.server.routes.chat_reader import ChatReader
from penstock.server.routes.completions import CompletionsRoute
from penstock.server.routes.debug import DebugRoute
from penstock.server.routes.embeddings import EmbeddingsRoute
from penstock.server.routes.grammar_checks import GrammarChecks
from penstock.server.routes.health import HealthRoute
from penstock.server.routes.intake import Intake
from penstock.server.routes.messages import MESSAGES, MessagesRoute
from penstock.server.routes.models import ModelsRoute
from penstock.server.routes.page import page_routes
from penstock.server.routes.pipeline_table import PipelineTableRoute
from penstock.server.routes.pipeline_view import FeedQuery, PipelineRoute
from penstock.server.routes.profile_folder import ProfileFolder
from penstock.server.routes.profiler import Profiler
from penstock.server.routes.query import Endpoint, Q, with_query, without_query
from penstock.server.routes.responder import Responder
from penstock.server.routes.responses import ResponsesRoute
from penstock.server.routes.server_info import ServerInfoRoute
from penstock.server.routes.store_watch import StoreWatch
from penstock.server.routes.streams import StreamsRoute
from penstock.server.routes.text_routes import (
    DetokenizeRequest,
    DetokenizeResponse,
    TextRoute,
    TokenizeChatRequest,
    TokenizeResponse,
    TokenizeTextRequest,
)


class App:
    """The ASGI app, and the handles that the process around it needs.

    Attributes:
        routes: the Starlette app behind the gate.
        context: objects that all generating responses use; its `lifecycle` drains the server.
    """

    def __init__(self, routes: Starlette, gate: Gate, context: GenerationContext) -> None:
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
    """Return the whole HTTP front over an engine.

    Args:
        log: None: a log in the config's format, on standard error.
        on_ready: called once, when the engine has answered.
        hold_s: for so many seconds at most, nothing is answered before the engine has answered or failed.
        clock: monotonic seconds.
    """
    log = log or RequestLog(config.log_format)
    workers = TextWorkers()
    metrics = Metrics(model, engine, under_vllm_names if config.vllm_metric_names else under_own_names)
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
    intake = Intake(model, context, config, workers)
    streams = ResumableStreams(config.limits.max_resumable_streams, clock)
    responder = Responder(model, context, config.limits, workers, streams)
    described = [
        *_generation_routes(intake, GrammarChecks(grammars), responder),
        _embeddings_route(EmbeddingsRoute(intake, context, workers)),
        *_stream_routes(StreamsRoute(streams)),
        *_plain_routes(model, context),
        *_views(model, context, config),
    ]
    if config.admin_keys:
        folder = ProfileFolder(config.profile_dir, config.limits.max_profiles)
        profiler = Profiler(engine, folder, config.limits, num_stages=model.num_stages, clock=clock)
        described += _admin_routes(AdminRoute(engine, context.lifecycle, profiler, config.limits))
    document = openapi.document_of(described, model, config)
    errors = ErrorAnswers({MESSAGES: MessagesErrors()})
    routes = _starlette(
        [*described, *_unlisted_routes(described, document)],
        _lifespan(context, workers, grammars, on_ready, hold_s),
        errors,
    )
    gate = Gate(
        routes,
        keys=ApiKeys(config.api_keys, config.admin_keys),
        hosts=HostPolicy(config.host, config.allowed_origins, config.allowed_hosts),
        pages=CrossOrigin(config.allowed_origins),
        errors=errors,
        log=log,
        metrics=metrics,
        lifecycle=context.lifecycle,
        clock=clock,
    )
    return App(routes, gate, context)


def _starlette(routes: list[BaseRoute], lifespan: Callable[[Any], Any], errors: ErrorAnswers) -> Starlette:
    made = Starlette(routes=routes, lifespan=lifespan, exception_handlers=errors.handlers)
    made.router.redirect_slashes = False
    return made


def _generation_routes(intake: Intake, grammars: GrammarChecks, responder: Responder) -> list[DescribedRoute]:
    chats = ChatReader(intake, grammars)
    chat, text = ChatRoute(intake, chats, responder), TextRoute(intake)
    completions = CompletionsRoute(intake, grammars, responder)
    responses = ResponsesRoute(intake, chats, responder)
    messages = MessagesRoute(intake, chats, responder)
    generates, converts = openapi.generation_route, openapi.text_route
    served = (
        ("/v1/chat/completions", chat.create, "create_chat_completion", generates(ChatRequest, ChatResponse)),
        (
            "/v1/completions",
            completions.create,
            "create_completion",
            generates(CompletionRequest, CompletionResponse),
        ),
        ("/v1/responses", responses.create, "create_response", generates(ResponsesRequest, ResponseObject)),
        (
            MESSAGES,
            messages.create,
            "create_message",
            generates(MessagesRequest, MessageObject, MessagesErrorBody),
        ),
        (
            f"{MESSAGES}/count_tokens",
            messages.count_tokens,
            "count_message_tokens",
            converts(TokenCount, CountTokensRequest, error=MessagesErrorBody),
        ),
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
    )
    return [
        DescribedRoute("POST", path, endpoint, name=name, description=description)
        for path, endpoint, name, description in served
    ]


def _views(model: ServedModel, context: GenerationContext, config: ServerConfig) -> list[DescribedRoute]:
    info = ServerInfoRoute(model, context.engine, config.settings)
    pipeline = PipelineRoute(
        model,
        context.engine,
        context.lifecycle,
        context.metrics,
        max_streams=config.limits.max_event_streams,
        clock=context.clock,
    )
    table = PipelineTableRoute(pipeline.view)
    return [
        _plain_route("/server_info", without_query(info.get), "server_info"),
        _plain_route("/debug/pipeline", without_query(pipeline.snapshot), "pipeline"),
        _plain_route("/debug/pipeline/table", without_query(table.table), "pipeline_table"),
        DescribedRoute(
            "GET",
            "/debug/pipeline/events",
            with_query(pipeline.events, FeedQuery),
            name="pipeline_events",
            description=openapi.plain_route("/debug/pipeline/events", FeedQuery),
        ),
    ]


def _plain_route(path: str, endpoint: Endpoint, name: str) -> DescribedRoute:
    return DescribedRoute("GET", path, endpoint, name=name, description=openapi.plain_route(path))


def _embeddings_route(embeddings: EmbeddingsRoute) -> DescribedRoute:
    description = openapi.whole_route(EmbeddingRequest, EmbeddingResponse)
    return DescribedRoute(
        "POST", "/v1/embeddings", embeddings.create, name="create_embedding", description=description
    )


def _stream_routes(streams: StreamsRoute) -> list[DescribedRoute]:
    path, described = "/v1/streams/{request_id}", openapi.stream_route
    return [
        DescribedRoute("GET", path, streams.resume, name="resume_stream", description=described()),
        DescribedRoute("DELETE", path, streams.stop, name="stop_stream", description=described(stops=True)),
    ]


def _plain_routes(model: ServedModel, context: GenerationContext) -> list[DescribedRoute]:
    models = ModelsRoute(model, context.engine)
    health = HealthRoute(context)
    return [
        _plain_route("/v1/models", without_query(models.list), "list_models"),
        _plain_route("/v1/models/{model_id:path}", models.get, "get_model"),
        _plain_route("/health", without_query(health.ready), "health"),
        _plain_route("/health/ready", without_query(health.ready), "health_ready"),
        _plain_route("/health/live", without_query(health.live), "health_live"),
        _plain_route("/health/generate", without_query(health.generate), "health_generate"),
        _plain_route("/metrics", without_query(health.metrics), "metrics"),
        _plain_route("/version", without_query(health.version), "version"),
        _plain_route("/debug/trace", without_query(DebugRoute(context.engine).trace), "trace"),
    ]


def _unlisted_routes(described: Iterable[Route], document: openapi.Schema) -> list[Route]:
    """Return the routes that the document does not list.

    These are the document itself, the web page, and HEAD for the paths of health, which some probes use.
    """
    encoded = msgspec.json.encode(document)

    async def openapi_json(_request: Request) -> Response:
        return json_response(encoded)

    heads = [
        Route(route.path, route.endpoint, methods=["HEAD"]) for route in described if route.path in OPEN_PATHS
    ]
    return [Route("/openapi.json", openapi_json), *heads, *page_routes()]


def _admin_routes(admin: AdminRoute) -> list[DescribedRoute]:
    return [
        _admin_route("/pause", admin.pause, PauseQuery),
        _admin_route("/resume", admin.resume, TimeoutQuery),
        _admin_route("/flush_cache", admin.flush_cache, FlushQuery),
        _admin_route("/abort", admin.abort, AbortQuery),
        _admin_route("/slow_down", admin.slow_down, SlowDownQuery),
        _admin_route("/open_session", admin.open_session, OpenSessionQuery),
        _admin_route("/close_session", admin.close_session, CloseSessionQuery),
        _admin_route("/start_profile", admin.start_profile, TimeoutQuery),
        _admin_route("/stop_profile", admin.stop_profile, TimeoutQuery),
        _admin_route("/is_paused", admin.is_paused, NoQuery, method="GET"),
    ]


def _admin_route(
    path: str, answer: Callable[[Q], Awaitable[Response]], query: type[Q], method: str = "POST"
) -> DescribedRoute:
    name, description = path.removeprefix("/"), openapi.plain_route(path, query)
    return DescribedRoute(method, path, with_query(answer, query), name=name, description=description)


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
