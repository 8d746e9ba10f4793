"""The interfaces of the engine and of the model for the HTTP front, as Python protocols and structs.

`create_app` takes an `EngineLike` and a `ServedModel`. In the server the engine is an `AsyncEngine`, or
`Replicas` with several pipelines (`engine.client`); in tests it is a fake. Tokenizer and chat template of the
model are behind `TextCodec`, so that no route knows a tokenizer library.
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
    """The output of one sequence in the engine, for one reader."""

    async def next(self) -> TextDelta:
        """Wait for new output. Raises a `PenstockError` if the sequence failed. Not called after the end."""

    def cancel(self) -> None:
        """Abort the sequence in the core at once; harmless after its end and when called twice."""

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
    """The state of the pipeline: whether its stages return tokens now, and if not, why.

    Attributes:
        stage: number of the stage at fault; None if no single stage is known to be at fault.
        reason: why the pipeline is not ready; "" if it is.
        since: Unix time of the last change of `ready`.
        stats: the core's statistics; None if there are none to show.
        is_full: no more requests may wait.
        is_recovering: the pipeline is not ready, but takes new requests, which wait.
        hosts: hosts that the stages run on, as far as the core has reported them.
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
    """The client of the core, or of the cores of several replicas, as the server uses it."""

    async def start(self) -> None:
        """Connect, and wait until the pipeline is ready. Raises a `PenstockError` if it never will be."""

    def add(self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams) -> RequestStream:
        """Start one sequence. Raises `OverloadedError` when the queue is full."""

    def add_all(
        self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams
    ) -> Sequence[RequestStream]:
        """Start `sampling.n` sequences of a prompt, all or none, and return the stream of each.

        Only the first stream counts the prompt's tokens in `prompt_tokens` and `cached_tokens`.
        """

    def embed(self, request_id: str, prompt_token_ids: list[int], params: PoolingParams) -> RequestStream:
        """Start to pool a prompt into a vector, and return its stream, whose only delta has the vector."""

    def status(self) -> StatusLike: ...

    def statuses(self) -> Sequence[StatusLike]:
        """Return the status of each replica."""

    async def trace(self) -> list[StageSpans]:
        """Return the spans (timed pieces of work) of each stage in the last seconds."""

    async def news(self, seen: Collection[StageSpans]) -> list[StageSpans]:
        """Return each rank's spans since its report in `seen`; if it has none there, those of `trace`."""

    async def operate(self, operation: Operation, timeout_s: float) -> list[OperationDone]:
        """Let all replicas carry out an operation, and return the result of each.

        Raises `WaitTimeoutError` if it is not complete after `timeout_s`.
        """

    @property
    def max_model_len(self) -> int:
        """The most tokens of prompt and output together that the model, or a smaller KV cache, allows."""


class TextCodec(Protocol):
    """The way from text to ids and from ids to text. Its methods are called from worker threads too."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a plain prompt; the text of a special token in it is ordinary text.

        Args:
            add_special_tokens: whether the ids begin with BOS if the model wants it.
        """

    def encode_trusted(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text as `encode` does, but with an id for the text of each special token."""

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Return the ids of a conversation as the chat template writes it.

        Args:
            options: arguments of `ChatTemplate.encode`, and variables for the template.
        """

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Return the text of a conversation as the chat template writes it; options as in `encode_chat`."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of a whole sequence, with the names of special tokens in it."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one id stands for; empty for ids without text."""

    def detokenizer(
        self, prompt_token_ids: list[int], *, skip_special_tokens: bool = True, shown: Sequence[str] = ()
    ) -> Detokenizer:
        """Return a detokenizer, which makes text piece by piece of the tokens that follow this prompt.

        Args:
            skip_special_tokens: whether special tokens have no text.
            shown: special tokens that have their text all the same.
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

    Attributes:
        name: its name in answers.
        codec: makes ids of text and text of ids.
        aliases: further names under which clients may ask for the model.
        sampling_defaults: values of temperature, top_k, top_p, min_p and repetition_penalty from the model's
            generation_config. They hold where a request gives none.
        syntax: how the model writes reasoning and calls of tools.
        grammar_model: the model's files, as the processes that try out grammars need them; None: there is no
            structured output.
        vector: lengths of the vectors that the model gives for embeddings.
    """

    name: str
    codec: TextCodec
    max_model_len: int
    vocab_size: int
    created: int  # Unix time
    aliases: Sequence[str] = ()
    num_stages: int = 1
    stages: Sequence[StageShape] = ()  # the same in each replica; empty: not known
    host_links: Sequence[HostLink] = ()  # the measured network paths between hosts
    token_bytes: int = 0  # bytes that cross from stage to stage for each token; 0: not known
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
        """Return how many tokens a prompt and its output may have together, as far as is known now.

        The value may sink later: the engine knows the size of its KV cache only when it has loaded.
        """
        return min(self.max_model_len, engine.max_model_len)
