"""Whole pipelines as replicas of Ray Serve: more of them when requests queue up, fewer when they do not.

    pip install 'penstock[serve]'
    serve run --app-dir examples --working-dir examples ray_serve:app \\
      model=/shared/models/Qwen2.5-0.5B stages=2 hosts=2 token_directory=/shared/tokens

    client ── HTTP ──▶ Front ── PrefixRouter ──▶ Pipeline   an actor with a placement group of `hosts` bundles
                                                    │
                                                    ▼
                                              penstock serve ══ links ══ penstock worker, in another bundle

Ray Serve starts and ends replicas, and carries requests and answers as they are: interface, limits and keys
are those of `penstock serve`. Which replica gets a request is decided by Penstock's router, and how many
there are by Penstock's queues. A replica that is to end gets no new requests, and ends when its last answer
has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shlex
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import StreamingResponse

from penstock.engine.client.routing import DECODE_TOKENS, Load, Router
from penstock.hosts.launchers.tied_process import environment_for_ranks, tied_command

BYTES_A_TOKEN = 4  # of text: the router weighs prompts before anybody has tokenized them
MAX_AT_ONCE = 10_000  # requests that Serve lets a replica have: Penstock's own limits are to refuse
QUEUES = ("penstock_num_requests_running", "penstock_num_requests_waiting")
HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "trailer", "transfer-encoding", "upgrade"}
MAX_LINE = 1 << 20  # of a server's log


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands behind `ray_serve:app`, as NAME=VALUE.

    Attributes:
        model: a path on all nodes.
        stages: of each pipeline.
        hosts: of each pipeline; each on a node of its own, unless `strategy` is PACK.
        cpus, gpus: that Ray reserves on each host.
        flags: further ones of `penstock serve`.
        token_directory: on a file system that all nodes share, for pipelines over several nodes.
        api_key_file: on all nodes; clients need a key that is in it.
        least, most: pipelines.
        wanted_queue: requests that a pipeline is to have on average, running and waiting.
        upscale_s, downscale_s: for so long more, or fewer, have to be wanted before pipelines start or end.
        drain_s: how long a pipeline that is to end may take for its last answers.
    """

    model: str
    stages: int = 1
    hosts: int = 1
    strategy: str = "STRICT_SPREAD"
    cpus: float = 1
    gpus: float = 0
    flags: str = ""
    token_directory: str = ""
    api_key_file: str = ""
    least: int = 1
    most: int = 3
    wanted_queue: float = 16
    upscale_s: float = 10
    downscale_s: float = 120
    drain_s: float = 600


class Ask(NamedTuple):
    """A request of a client, and what stands for the tokens of its prompt."""

    method: str
    target: str  # path and query
    headers: Sequence[tuple[str, str]]
    body: bytes
    prompt: Sequence[int]


class Head(NamedTuple):
    """What an answer begins with."""

    status: int
    headers: Sequence[tuple[str, str]]


class PrefixRouter(RequestRouter):
    """Sends a request where it has least to wait for, and where the beginning of its prompt is cached.

    Each process that sends requests has a router of its own, which knows what it has sent itself.
    """

    def initialize_state(self) -> None:
        """Make what the router remembers; Serve calls this once."""
        self._router = Router[ReplicaID](has_cache=True)
        self._ahead: Counter[ReplicaID] = Counter()  # tokens
        self._open: dict[str, int] = {}  # id of a request -> its tokens

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas to try, the best first."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        loads = {name: Load(self._ahead[name]) for name in replicas}
        prompt = pending_request.args[0].prompt if pending_request is not None else ()
        return [[replicas[name]] for name in self._router.order(prompt, loads)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget replicas that have ended."""
        super().update_replicas(replicas)
        names = {replica.replica_id for replica in replicas}
        self._router.forget_others(names)
        for gone in self._ahead.keys() - names:
            del self._ahead[gone]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count a request that a replica has taken."""
        prompt = pending_request.args[0].prompt
        self._router.routed(prompt, replica_id)
        tokens = self._open[pending_request.metadata.internal_request_id] = len(prompt) + DECODE_TOKENS
        self._ahead[replica_id] += tokens

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request no more, whose answer has ended in one way or another."""
        self._ahead[replica_id] -= self._open.pop(internal_request_id, 0)


def pipelines_wanted(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return how many pipelines Penstock's queues call for, and no state; bounds and delays are Serve's.

    A pipeline that has not said how many requests it has may have many: then none ends.
    """
    queues = (context.aggregated_metrics or {}).get("queue", {})
    wanted = math.ceil(sum(queues.values()) / context.config.target_ongoing_requests)
    is_known = len(queues) >= len(context.running_replicas)
    return (wanted if is_known else max(wanted, context.target_num_replicas)), {}


class Pipeline:
    """A replica: it runs `penstock serve`, whose workers are in the other bundles of its placement group."""

    async def __init__(self, options: Options) -> None:  # type: ignore[misc]  # Serve awaits it
        self._key = first_key(options.api_key_file)
        self._token_file: Path | None = None
        self._server: Server | None = None
        words = ["serve", options.model, "--pp", str(options.stages), *shlex.split(options.flags)]
        words += ["--api-key-file", options.api_key_file] if options.api_key_file else []
        words += self._words_for_hosts(options) if options.hosts > 1 else []
        self._server = await Server.start(words)
        await self._server.await_ready()
        self._client = aiohttp.ClientSession(
            self._server.address, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
        )

    async def answer(self, ask: Ask) -> AsyncIterator[Head | bytes]:
        """Yield what `penstock serve` answers: first its head, then the body as it comes.

        Whoever leaves early aborts the request in the engine.
        """
        async with self._client.request(
            ask.method, ask.target, headers=ask.headers, data=ask.body or None, allow_redirects=False
        ) as response:
            yield Head(response.status, end_to_end(response.headers.items()))
            async for piece in response.content.iter_any():
                yield piece

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return how many requests the engine has; Serve asks again and again."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        async with self._client.get("/metrics", headers=headers) as response:
            families = text_string_to_metric_families(await response.text())
            return {"queue": sum(each.samples[0].value for each in families if each.name in QUEUES)}

    async def check_health(self) -> None:
        """Raise if the server has ended, so that Serve replaces the replica; a lost stage it mends itself."""
        assert self._server is not None
        self._server.require_alive()

    async def __del__(self) -> None:
        """End the pipeline; Serve calls this when the last answer has ended."""
        if self._server is not None:
            await self._server.end()
        if hasattr(self, "_client"):
            await self._client.close()
        if self._token_file is not None:
            self._token_file.unlink(missing_ok=True)

    def _words_for_hosts(self, options: Options) -> list[str]:
        group = ray.util.get_current_placement_group().id.hex()
        words = ["--hosts", str(options.hosts), "--distributed-executor-backend", "ray"]
        where = {"placement_group": group, "node_address": ray.util.get_node_ip_address()}
        words += ["--ray", json.dumps(where)]
        if options.token_directory:
            self._token_file = Path(options.token_directory) / group
            words += ["--join-token-file", str(self._token_file)]
        return words


class Server:
    """`penstock serve` on an address of this host alone; it ends with this process.

    Attributes:
        address: of its interface, once it is ready.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.address = ""
        self._process = process
        self._is_ready = asyncio.Event()
        self._log = asyncio.create_task(self._copy_log())

    @classmethod
    async def start(cls, words: Sequence[str]) -> Server:
        """Start one with these words on its command line."""
        command = tied_command(
            "penstock", *words, "--host", "127.0.0.1", "--port", "0", "--log-format", "json"
        )
        environment = environment_for_ranks() | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=asyncio.subprocess.PIPE, limit=MAX_LINE
        )
        return cls(process)

    async def await_ready(self) -> None:
        """Wait until all stages serve. Raises if the server ends before."""
        ready = asyncio.create_task(self._is_ready.wait())
        await asyncio.wait({ready, self._log}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        self.require_alive()

    def require_alive(self) -> None:
        """Raise if the server has ended."""
        if self._log.done():
            raise RuntimeError(
                "penstock serve has ended: its last lines in Ray's log of this replica say why."
            )

    async def end(self) -> None:
        """Have it end its stages and workers, and wait for that."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self._process.wait()
        await self._log

    async def _copy_log(self) -> None:
        """Copy the server's log to Ray's log of this replica, and take the address from it."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            print(line.decode(errors="replace"), end="", flush=True)
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event.get("event") == "engine_ready":
                    self.address = str(event["address"])
                    self._is_ready.set()


class Front:
    """Takes requests of clients, and gives each to a pipeline."""

    def __init__(self, pipelines: DeploymentHandle) -> None:
        self._pipelines = pipelines.options(stream=True)

    async def __call__(self, request: Request) -> StreamingResponse:
        """Return the answer of a pipeline, which the client gets as the pipeline makes it."""
        body = await request.body()
        target = f"{request.url.path}?{request.url.query}".rstrip("?")
        ask = Ask(request.method, target, end_to_end(request.headers.items()), body, prompt_of(body))
        answer = self._pipelines.answer.remote(ask)
        head = await anext(answer)
        response = StreamingResponse(pieces(answer), head.status)
        response.raw_headers = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in head.headers
        ]
        return response


async def pieces(answer: DeploymentResponseGenerator) -> AsyncIterator[bytes]:
    """Yield the body of an answer; when the client leaves, the pipeline is told."""
    try:
        async for piece in answer:
            yield piece
    finally:
        answer.cancel()


def first_key(path: str) -> str:
    """Return the first key of a file of keys; empty: there is no file."""
    return Path(path).read_text(encoding="utf-8").split()[0] if path else ""


def prompt_of(body: bytes) -> Sequence[int]:
    """Return what stands for the tokens of a prompt: equal beginnings have equal beginnings."""
    try:
        fields = json.loads(body)
        prompt = fields.get("prompt") or fields.get("messages") or fields.get("input") or ""
    except (ValueError, AttributeError):
        return ()  # the pipeline refuses it
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return prompt
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    data = text.encode(errors="replace")
    places = range(0, len(data), BYTES_A_TOKEN)
    return [int.from_bytes(data[place : place + BYTES_A_TOKEN], "big") for place in places]


def end_to_end(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the headers that are not of one connection alone."""
    return [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP]


def app(words: dict[str, str]) -> serve.Application:
    """Return the application; `serve run` calls this with what its command line says."""
    options = msgspec.convert(words, Options, strict=False)  # "2" does for 2
    bundle = {"CPU": options.cpus} | ({"GPU": options.gpus} if options.gpus else {})
    pipelines = serve.deployment(
        Pipeline,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        placement_group_bundles=[bundle] * options.hosts,
        placement_group_strategy=options.strategy,
        max_ongoing_requests=MAX_AT_ONCE,
        graceful_shutdown_timeout_s=options.drain_s,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.least,
            max_replicas=options.most,
            target_ongoing_requests=options.wanted_queue,
            upscale_delay_s=options.upscale_s,
            downscale_delay_s=options.downscale_s,
            look_back_period_s=max(1.0, options.upscale_s),
            policy=AutoscalingPolicy(policy_function=pipelines_wanted),
        ),
    )
    front = serve.deployment(Front, max_ongoing_requests=MAX_AT_ONCE, ray_actor_options={"num_cpus": 0})
    return front.bind(pipelines.bind(options))
