"""The needs of the HTTP front from the engine and the model, as protocols and values.

`create_app` takes an `EngineLike` (in the server `engine.client.async_engine.AsyncEngine`, in tests a fake)
and a `ServedModel`. The text side of a model is behind `TextCodec`, so that no route knows a tokenizer
library.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.batch import StageSpans
from penstock.engine.client.outputs import DraftCounts, TextDelta
from penstock.engine.stats import CoreStats
from penstock.errors import InvalidRequestError, NotFoundError
from penstock.grammar.proving import GrammarModel
from penstock.operations import Operation, OperationDone
from penstock.process.config import HostLink, StageShape
from penstock.process.pipe_hosts import PipeHosts
from penstock.request import PoolingParams, SamplingParams, VectorShape
from penstock.tokenizer.chat_template import ChatTemplate
from penstock.tokenizer.detokenizer import Detokenizer
from penstock.tokenizer.model_syntax import ModelSyntax
from penstock.tokenizer.tokenizer import AbsentTokenizer, Tokenizer


class RequestStream(Protocol):
    """One sequence in the engine."""

    async def next(self) -> TextDelta:
        """Wait for news. Raises a `PenstockError` if the sequence failed; not called after the finish."""

    def cancel(self) -> None:
        """Abort in the core at once; harmless after the end and when called twice."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def drafts(self) -> DraftCounts: ...
    @property
    def queue_seconds(self) -> float | None: ...


class StatusLike(Protocol):
    """The state of the pipe: whether it answers.

    `since`: Unix time of the last change of `ready`; `is_full`: no more requests may wait; `is_recovering`:
    it is not ready, but new requests may wait; `hosts`: that the pipe runs over, as far as that was told.
    """

    @property
    def ready(self) -> bool: ...
    @property
    def stage(self) -> int | None: ...
    @property
    def reason(self) -> str: ...
    @property
    def since(self) -> float: ...
    @property
    def stats(self) -> CoreStats | None: ...
    @property
    def is_full(self) -> bool: ...
    @property
    def is_recovering(self) -> bool: ...
    @property
    def hosts(self) -> PipeHosts: ...


class EngineLike(Protocol):
    async def start(self) -> None:
        """Connect and wait until the pipe is ready; raises a `PenstockError` if it will never be."""

    def add(self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams) -> RequestStream:
        """Start one sequence. Raises `OverloadedError` when the queue is full."""

    def add_all(
        self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams
    ) -> Sequence[RequestStream]:
        """Start `sampling.n` sequences of a prompt, all or none; the first counts the prompt's tokens."""

    def embed(self, request_id: str, prompt_token_ids: list[int], params: PoolingParams) -> RequestStream:
        """Pool a prompt; the stream has one delta, with the vector."""

    def status(self) -> StatusLike: ...

    def statuses(self) -> Sequence[StatusLike]:
        """Return the status of each replica."""

    async def trace(self) -> list[StageSpans]:
        """Return the spans of each stage in the last seconds."""

    async def news(self, seen: Collection[StageSpans]) -> list[StageSpans]:
        """Return each rank's latest spans; if a report of the rank was seen, those since then."""

    async def operate(self, operation: Operation, timeout_s: float) -> list[OperationDone]:
        """Let all replicas do it. Raises `WaitTimeoutError` when that is not complete in this time."""

    @property
    def max_model_len(self) -> int:
        """The longest prompt + output: the model's, or less where the KV pool holds less."""


class TextCodec(Protocol):
    """The way from text to ids and from ids to text. Called from worker threads too."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return ids of a plain prompt, with BOS where the model wants it; special tokens are text."""

    def encode_trusted(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of text in which special tokens mean themselves."""

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Return the ids of a conversation through the chat template, ready for the answer.

        Args:
            options: those of `ChatTemplate.encode`, and variables for the template.
        """

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Return the text of a conversation through the chat template."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of a whole sequence, special tokens by their names."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one id stands for; empty for ids without text."""

    def detokenizer(
        self, prompt_token_ids: list[int], *, skip_special_tokens: bool = True, shown: Sequence[str] = ()
    ) -> Detokenizer:
        """Return the detokenizer, piece by piece, of what follows this prompt.

        Args:
            shown: special tokens that are not skipped.
        """


class ModelCodec:
    """`TextCodec` of a model directory's tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.encode = tokenizer.encode
        self.encode_trusted = tokenizer.encode_trusted
        self.token_bytes = tokenizer.token_bytes
        self.detokenizer = tokenizer.detokenizer

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        return self._template.encode(messages, **options)

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return self._template.render(messages, **options)

    def decode(self, token_ids: list[int]) -> str:
        if isinstance(self._tokenizer, AbsentTokenizer):
            raise InvalidRequestError(
                "this model has no tokenizer, so ids cannot be turned into text.", param="tokens"
            )
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The one model behind this server.

    `name`: the one in answers. `aliases`: further names under which clients may ask for it.
    `sampling_defaults`: values of temperature, top_k, top_p, min_p, repetition_penalty from the model's
    generation_config, used where a request is silent. `syntax`: how the model writes reasoning and calls of
    tools. `grammar_model`: None: of a model without structured output. `vector`: what vectors it gives.
    """

    name: str
    codec: TextCodec
    max_model_len: int
    vocab_size: int
    created: int  # Unix time
    aliases: Sequence[str] = ()
    num_stages: int = 1
    stages: Sequence[StageShape] = ()  # of each replica; empty where it is not known
    host_links: Sequence[HostLink] = ()  # between hosts, as measured
    token_bytes: int = 0  # that cross from stage to stage for each token; 0: not known
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)
    syntax: ModelSyntax = field(default_factory=ModelSyntax)
    grammar_model: GrammarModel | None = None
    vector: VectorShape = field(default_factory=lambda: VectorShape(size=0))

    @property
    def names(self) -> list[str]:
        """The names under which clients may ask for the model."""
        return [self.name, *self.aliases]

    def require_name(self, name: str) -> None:
        """Raise `NotFoundError` for a name under which this model is not served."""
        if name not in self.names:
            known = " or ".join(repr(each) for each in self.names)
            raise NotFoundError(
                f"The model {name[:128]!r} does not exist; this server has {known}.",
                param="model",
                code="model_not_found",
            )

    def context_length(self, engine: EngineLike) -> int:
        """Return how many tokens a prompt and its output may have, as of now.

        The engine knows what its KV pool holds only when it has loaded.
        """
        return min(self.max_model_len, engine.max_model_len)
