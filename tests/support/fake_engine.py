"""A deterministic engine and codec for tests of the HTTP front: it answers a prompt with the prompt itself.

Token ids are bytes; after the prompt's bytes comes the end-of-sequence id, and after that (with `ignore_eos`)
the prompt again. The text side is the real `engine.client.outputs`.
"""

from __future__ import annotations

import asyncio
import codecs
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from core_numbers import core_stats
from penstock.batch import StageSpans
from penstock.engine.client.outputs import NO_DRAFTS, OutputAssembler, TextDelta
from penstock.engine.client.siblings import with_siblings
from penstock.engine.client.vectors import VectorAssembler
from penstock.engine.stats import CoreStats
from penstock.errors import AbortedError, OverloadedError, PenstockError
from penstock.families.registry import resolve_model_directory
from penstock.grammar.proving import GrammarModel
from penstock.operations import Abort, Operation, OperationDone
from penstock.process.pipe_hosts import NO_PIPE_HOSTS, PipeHosts
from penstock.request import PoolingParams, RequestUpdate, SamplingParams, TokenLogprobs, VectorShape
from penstock.server.engine_port import ServedModel
from penstock.tokenizer.form_table import REASONING_FORMATS, TOOL_FORMATS
from penstock.tokenizer.model_syntax import ModelSyntax

BOS, EOS, VOCAB_SIZE = 256, 257, 300
SCORED_AT_ONCE = 4


class ByteCodec:
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [*([BOS] if add_special_tokens else []), *text.encode()]

    encode_trusted = encode

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        return self.encode(self.render_chat(messages, **options))

    def render_chat(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return text if add_generation_prompt else text + "."

    def decode(self, token_ids: list[int]) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def detokenizer(
        self, prompt_token_ids: list[int], *, skip_special_tokens: bool = True, shown: Sequence[str] = ()
    ) -> ByteDetokenizer:
        return ByteDetokenizer()


class SeenCodec(ByteCodec):
    """Remembers what the template was given, of which all prompts are the same."""

    def __init__(self, suffix: str = "") -> None:
        self.seen: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        self._suffix = suffix

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        self.seen.append((messages, options))
        return self.encode("prompt" + self._suffix)


class ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token_id for token_id in token_ids if token_id < 256))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def oracle(prompt: list[int], index: int) -> int:
    """The index-th output id for a prompt."""
    period = [token_id for token_id in prompt if token_id < 256] + [EOS]
    return period[index % len(period)]


@dataclass(kw_only=True)
class Status:
    ready: bool = True
    stage: int | None = None
    reason: str = ""
    since: float = 1.0
    stats: CoreStats | None = None
    is_full: bool = False
    is_recovering: bool = False
    hosts: PipeHosts = NO_PIPE_HOSTS


@dataclass(kw_only=True)
class FakeEngine:
    """Attributes:
    hold_after: tokens after which every stream waits for `release`; None never waits.
    fail_after: tokens after which every stream fails with `failure`.
    script: what it answers, in place of the prompt.
    """

    max_model_len: int = 4096
    max_alive: int = 256
    hold_after: int | None = None
    fail_after: int | None = None
    failure: PenstockError | None = None
    script: str | None = None
    state: Status = field(default_factory=Status)
    added: list[tuple[str, list[int], SamplingParams]] = field(default_factory=list)
    embedded: list[tuple[str, list[int], PoolingParams]] = field(default_factory=list)
    operations: list[tuple[Operation, float]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    alive: set[str] = field(default_factory=set)
    spans: list[StageSpans] = field(default_factory=list)
    num_looks: int = 0  # for news of the ranks
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        pass

    def add(self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams) -> FakeStream:
        if len(self.alive) >= self.max_alive:
            raise OverloadedError(f"{len(self.alive)} requests are running or waiting, which is the limit.")
        assert request_id not in self.alive
        self.alive.add(request_id)
        self.added.append((request_id, prompt_token_ids, sampling))
        return FakeStream(self, request_id, prompt_token_ids, sampling)

    def add_all(
        self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams
    ) -> list[FakeStream]:
        request = with_siblings(request_id, prompt_token_ids, sampling)
        if len(self.alive) + sampling.n > self.max_alive:
            raise OverloadedError(f"{len(self.alive)} requests are running or waiting, which is the limit.")
        streams = [self.add(one.request_id, prompt_token_ids, one.sampling) for one in request.alone()]
        for follower in streams[1:]:
            follower.prompt_tokens = follower.cached_tokens = 0
        return streams

    def embed(self, request_id: str, prompt_token_ids: list[int], params: PoolingParams) -> FakeVectorStream:
        stream = self.add(request_id, prompt_token_ids, SamplingParams(max_tokens=1))
        self.embedded.append((request_id, prompt_token_ids, params))
        self.added.pop()
        return FakeVectorStream(stream, prompt_token_ids, params)

    async def operate(self, operation: Operation, timeout_s: float) -> list[OperationDone]:
        self.operations.append((operation, timeout_s))
        if self.failure is not None:
            raise self.failure
        aborted = [] if isinstance(operation, Abort) else msgspec.UNSET
        return [OperationDone(accepted_step=5, completed_step=7, aborted=aborted)]

    async def trace(self) -> list[StageSpans]:
        return self.spans

    async def news(self, seen: Collection[StageSpans]) -> list[StageSpans]:
        self.num_looks += 1
        if self.failure is not None:
            raise self.failure
        newest = {(report.replica, report.stage, report.tp_rank): report.began_ns for report in seen}
        return [
            report
            for report in self.spans
            if report.began_ns > newest.get((report.replica, report.stage, report.tp_rank), -1)
        ]

    def status(self) -> Status:
        return self.state

    def statuses(self) -> list[Status]:
        return [self.state]


class FakeStream:
    def __init__(
        self, engine: FakeEngine, request_id: str, prompt: list[int], sampling: SamplingParams
    ) -> None:
        self.prompt_tokens = len(prompt)
        self.cached_tokens = 3
        self.drafts = NO_DRAFTS
        self.queue_seconds = 0.25
        self._engine = engine
        self._request_id = request_id
        self._prompt = prompt
        self._sampling = sampling
        self._assembler = OutputAssembler(sampling, ByteDetokenizer())
        self._produced = 0
        self._num_scored = 0

    @property
    def completion_tokens(self) -> int:
        return self._assembler.num_tokens

    async def next(self) -> TextDelta:
        engine = self._engine
        await asyncio.sleep(0)
        if engine.hold_after is not None and self._produced >= engine.hold_after:
            await engine.released.wait()
        if self._request_id in engine.cancelled:
            raise AbortedError("cancelled")
        if engine.failure is not None and self._produced >= (engine.fail_after or 0):
            engine.alive.discard(self._request_id)
            raise engine.failure
        delta = self._assembler.append(self._update())
        if delta.finish_reason is not None:
            engine.alive.discard(self._request_id)
        return delta

    def cancel(self) -> None:
        if self._request_id in self._engine.alive:
            self._engine.cancelled.append(self._request_id)  # first: tests wait until nothing is alive
            self._engine.alive.discard(self._request_id)

    def _update(self) -> RequestUpdate:
        count = self._sampling.prompt_logprobs
        if count is not None and self._num_scored < len(self._prompt) - 1:
            return self._scores(count)
        if self._sampling.max_tokens == 0:
            logprobs = None if self._sampling.logprobs is None else []
            return RequestUpdate(request_id=self._request_id, logprobs=logprobs, finish_reason="length")
        return self._token()

    def _scores(self, count: int) -> RequestUpdate:
        """Of the next `SCORED_AT_ONCE` tokens of the prompt."""
        begin = self._num_scored + 1
        ids = self._prompt[begin : begin + SCORED_AT_ONCE]
        self._num_scored += len(ids)
        scores = [fake_score(token_id, place, count) for place, token_id in enumerate(ids, begin)]
        return RequestUpdate(request_id=self._request_id, prompt_logprobs=scores)

    def _token(self) -> RequestUpdate:
        script = self._engine.script
        token_id = oracle(self._prompt if script is None else list(script.encode()), self._produced)
        self._produced += 1
        sampling = self._sampling
        stopped = (token_id == EOS and not sampling.ignore_eos) or token_id in sampling.stop_token_ids
        full = self._produced == sampling.max_tokens
        return RequestUpdate(
            request_id=self._request_id,
            token_ids=[token_id],
            logprobs=[fake_logprobs(token_id, sampling.logprobs)] if sampling.logprobs is not None else None,
            finish_reason="stop" if stopped else "length" if full else None,
            stop_token_id=token_id if stopped else None,
        )


def fake_score(token_id: int, place: int, count: int) -> TokenLogprobs:
    """Of a token of a prompt: it tells the place; the likeliest are bytes that it is not."""
    return TokenLogprobs(-float(place), 4, [(token_id + 7 + i) % 256 for i in range(count)], [-0.125] * count)


class FakeVectorStream:
    """Held, failed and cancelled as the stream of one token is."""

    def __init__(self, stream: FakeStream, prompt: list[int], params: PoolingParams) -> None:
        self.prompt_tokens, self.completion_tokens, self.cached_tokens = len(prompt), 0, 0
        self.drafts = NO_DRAFTS
        self.queue_seconds = 0.25
        self.cancel = stream.cancel
        self._stream, self._prompt, self._params = stream, prompt, params

    async def next(self) -> TextDelta:
        await self._stream.next()
        update = RequestUpdate(
            request_id="",
            finish_reason="stop",
            vector=fake_vector(self._prompt, self._params.pooling or "last"),
        )
        return VectorAssembler(self._params).append(update)


VECTOR_SIZE = 4


def fake_vector(prompt: Sequence[int], pooling: str) -> bytes:
    """What the stages would give: it depends on all ids, their order, and the pooling."""
    numbers = [
        sum(prompt),
        len(prompt),
        prompt[0] - 2 * prompt[-1],
        {"last": 1, "mean": 2, "cls": 3}[pooling],
    ]
    return struct.pack("<4f", *numbers)


def fake_logprobs(token_id: int, count: int) -> TokenLogprobs:
    """The chosen token is the second likeliest."""
    top = [(token_id + 1) % 256, token_id, *range(count)][:count]
    return TokenLogprobs(-0.5, 2, top, [-0.25 * (i + 1) for i in range(count)])


def stats(**changes: Any) -> CoreStats:
    return core_stats(**{"num_blocks": 100, "free_blocks": 75} | changes)


def syntax_of(tools: str, reasoning: str = "none") -> ModelSyntax:
    """Of a model that calls tools and thinks aloud in these forms; its template knows tools."""
    return ModelSyntax(
        tools=next((form for form in TOOL_FORMATS if form.name == tools), None),
        reasoning=next((form for form in REASONING_FORMATS if form.name == reasoning), None),
        template_knows_tools=True,
        template_knows_calls=True,
        reads=frozenset({"tools", "enable_thinking", "reasoning_effort"}),
    )


# Whose tokenizer proves grammars; that its ids are others than the fake's matters to nobody.
DEMO = GrammarModel(directory=resolve_model_directory("demo"), eos_token_ids=(1,))


def fake_model(**changes: Any) -> ServedModel:
    values: dict[str, Any] = {
        "name": "fake",
        "codec": ByteCodec(),
        "max_model_len": 4096,
        "vocab_size": VOCAB_SIZE,
        "created": 1_700_000_000,
        "syntax": syntax_of("json"),
        "vector": VectorShape(size=VECTOR_SIZE, cuts=(2,)),
    }
    return ServedModel(**(values | changes))
