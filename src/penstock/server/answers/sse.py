"""The bytes of event streams: chunks of chat and text completions, usage, errors, pings, the end.

A *chunk* here is the JSON object of one event, as in the OpenAI API. A stream of a chat or of text has

- for each choice of a chat one chunk with the role
- for each choice of text the echoed prompt, if the client asks for it
- chunks of content. If a chat's text is read for reasoning and calls of tools, there are chunks of these
  too (`message_stream`).
- for each choice exactly one chunk with a `finish_reason`
- one chunk with the usage and without choices, if the client asks for it. Other chunks may have the usage of
  their choice so far (`stream_usage`).
- `[DONE]`; after a failure, wherever it happens, one `data: {"error": ...}` instead

`: ping` may stand anywhere. A chunk differs from the one before only in its text. So everything else is
encoded once for each choice, and a token costs one small encoding and a concatenation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from penstock.engine.client.outputs import TextDelta
from penstock.server.answers.echo import Echo, EchoWriter
from penstock.server.answers.stream_usage import ChunkEnd, CountedEnd, PlainEnd
from penstock.server.engine_port import TextCodec
from penstock.server.openai.logprobs import CompletionLogprobsWriter, TokenBytes, chat_logprobs
from penstock.server.openai.message_reader import Reading
from penstock.server.openai.openai_types import Usage

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_NO_LOGPROBS = b',"logprobs":null'
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The bytes with which one route writes a choice: before and after its text, or in place of a text."""

    object: str
    id_prefix: str
    before_text: bytes
    after_text: bytes
    no_text: bytes
    opening: bytes  # content of the choice's first chunk; empty where there is none


CHAT = Dialect(
    object="chat.completion.chunk",
    id_prefix="chatcmpl-",
    before_text=b'"delta":{"content":',
    after_text=b"}",
    no_text=b'"delta":{}',
    opening=b'"delta":{"role":"assistant","content":""}',
)
TEXT = Dialect(
    object="text_completion",
    id_prefix="cmpl-",
    before_text=b'"text":',
    after_text=b"",
    no_text=b'"text":""',
    opening=b"",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamForm:
    """The form that all chunks of one response share.

    Attributes:
        codec, skips_special_tokens: make text of tokens as the response's texts are made.
        counts_tokens: every chunk has the usage of its choice so far; only with `include_usage`.
        reading: how the text of a chat's answers is read; None: all of it is content.
    """

    response_id: str
    created: int
    model: str
    dialect: Dialect
    include_usage: bool
    return_token_ids: bool
    with_logprobs: bool
    codec: TextCodec
    skips_special_tokens: bool = True
    counts_tokens: bool = False
    reading: Reading | None = None

    @property
    def token_bytes(self) -> TokenBytes:
        return self.codec.token_bytes

    def chunk_end(self, prompt_tokens: int) -> ChunkEnd:
        """Return the object that writes the end of each chunk of a choice.

        Args:
            prompt_tokens: number of tokens of the choice's prompt.
        """
        if self.counts_tokens:
            return CountedEnd(prompt_tokens)
        return PlainEnd(shows_null=self.include_usage)

    def completion_logprobs(self, prompt_token_ids: list[int], echo: Echo | None) -> CompletionLogprobsWriter:
        """Return the writer for the tokens that follow this prompt; their text begins after the echo."""
        detokenizer = self.codec.detokenizer(prompt_token_ids, skip_special_tokens=self.skips_special_tokens)
        begin = 0 if echo is None else len(echo.text)
        return CompletionLogprobsWriter(self.codec.token_bytes, detokenizer, begin=begin)


class ShownPrompt:
    """A prompt, and what chunks show of it, encoded once for all choices of the prompt.

    Args:
        form: what all choices of the response have in common.
        token_ids: ids of the prompt, shown in the first chunk if the client asks for ids.
        echo: the prompt at the beginning of the text; with log-probabilities it is sent as they come.
    """

    def __init__(self, form: StreamForm, token_ids: list[int], echo: Echo | None = None) -> None:
        self.token_ids = token_ids
        self.echo = echo
        self.encoded_ids = _encode(token_ids) if form.return_token_ids else b""
        text = "" if echo is None or form.with_logprobs else echo.text
        self.encoded_echo = _encode(text) if text else b""


class ChunkWriter:
    """Writes the chunks of one choice.

    Args:
        form: what all choices of the response have in common.
        index: number of the choice.
        prompt: the prompt that the choice continues.
    """

    def __init__(self, form: StreamForm, index: int, prompt: ShownPrompt) -> None:
        dialect = form.dialect
        self._before_choice = _head(form) + b"%d," % index
        self._end = form.chunk_end(len(prompt.token_ids))
        self._before_text = self._before_choice + dialect.before_text
        self._after_text = dialect.after_text + b',"logprobs":null,"finish_reason":null}'
        self._dialect = dialect
        self._is_plain = not (form.with_logprobs or form.return_token_ids)
        self._return_ids = form.return_token_ids
        self._logprobs = _logprobs_writer(form, prompt)
        self._opening = self._first_chunk(prompt) + self._echo_chunk(
            prompt
        )  # the pieces are joined when they are sent
        self._echo = EchoWriter(prompt.echo) if prompt.echo is not None and form.with_logprobs else None

    def chunk(self, delta: TextDelta) -> tuple[bytes]:
        """Return the events for a delta, in one piece, which may be empty."""
        self.count(delta)
        if self._is_plain and delta.finish_reason is None and not self._opening:
            return (self._plain(delta.text),)
        reason = delta.finish_reason
        end = b"" if reason is None else self.finish(delta, reason)
        return (self.opening() + self._echoed(delta) + self._content(delta) + end,)

    def count(self, delta: TextDelta) -> None:
        """Count the delta's tokens in the usage of the chunks from now on, if these have a usage.

        The opening is made before, so its usage has no generated tokens.
        """
        self._end.count(len(delta.token_ids))

    @property
    def reasoning_tokens(self) -> int | None:
        return None  # the text is not read for reasoning

    @property
    def shows_tokens(self) -> bool:
        """Whether chunks carry ids or log-probabilities, so that each token must be in one."""
        return not self._is_plain

    def opening(self) -> bytes:
        """Return the chunks before all content, at the first call; later calls return nothing.

        `chunk` does so itself; only a stream that pings before its first token calls this.
        """
        opening, self._opening = self._opening, []
        return b"".join(opening)

    def _first_chunk(self, prompt: ShownPrompt) -> list[bytes]:
        if not (self._dialect.opening or self._return_ids):
            return []
        shown = [b',"prompt_token_ids":', prompt.encoded_ids] if self._return_ids else []
        body = self._dialect.opening or self._dialect.no_text
        head = [self._before_choice, body, b',"logprobs":null,"finish_reason":null']
        none_yet = [b',"token_ids":[]'] if self._return_ids else []
        if self._dialect is CHAT:  # clients of chats look for the prompt's ids beside the choices as well
            return [*head, *shown, *none_yet, b"}]", *shown, self._end.encoded[1:]]
        return [*head, *shown, *none_yet, b"}", self._end.encoded]

    def _echo_chunk(self, prompt: ShownPrompt) -> list[bytes]:
        if not prompt.encoded_echo:
            return []
        dialect, ids = self._dialect, b',"token_ids":[]' if self._return_ids else b""
        body = [dialect.before_text, prompt.encoded_echo, dialect.after_text]
        return [
            self._before_choice,
            *body,
            _NO_LOGPROBS,
            b',"finish_reason":null',
            ids,
            b"}",
            self._end.encoded,
        ]

    def _echoed(self, delta: TextDelta) -> bytes:
        """Return a chunk with the part of the echo whose scores the delta brings.

        A prompt of one token has no scores: the first delta brings its whole echo.
        """
        if self._echo is None or self._echo.is_done:
            return b""
        text, logprobs = self._echo.piece(delta.prompt_logprobs)
        return self._event(self._body(text), b',"logprobs":' + _encode(logprobs), [])

    def _content(self, delta: TextDelta) -> bytes:
        if self._is_plain:
            return self._plain(delta.text)
        if not (delta.text or delta.token_ids):
            return b""
        return self.event(self._body(delta.text), delta)

    def _plain(self, text: str) -> bytes:
        return self._before_text + _encode(text) + self._after_text + self._end.encoded if text else b""

    def _body(self, text: str) -> bytes:
        return self._dialect.before_text + _encode(text) + self._dialect.after_text

    def event(self, body: bytes, delta: TextDelta | None) -> bytes:
        """Return a chunk with this content, and with ids and log-probabilities if the client asks for them.

        Args:
            delta: has the ids and log-probabilities; None: an earlier chunk has shown them.
        """
        if delta is None:
            return self._event(body, _NO_LOGPROBS, [])
        return self._event(body, self._logprobs(delta), delta.token_ids)

    def _event(self, body: bytes, logprobs: bytes, token_ids: list[int]) -> bytes:
        ids = b',"token_ids":' + _encode(token_ids) if self._return_ids else b""
        return b"".join(
            (self._before_choice, body, logprobs, b',"finish_reason":null', ids, b"}", self._end.encoded)
        )

    def finish(self, delta: TextDelta, finish_reason: str) -> bytes:
        """Return the chunk that ends the choice."""
        ids = b',"token_ids":[]' if self._return_ids else b""
        reason = b',"logprobs":null,"finish_reason":"%s"' % finish_reason.encode()
        stop = b',"stop_reason":' + _encode(delta.stop_reason)
        return b"".join(
            (self._before_choice, self._dialect.no_text, reason, stop, ids, b"}", self._end.encoded)
        )


def _head(form: StreamForm) -> bytes:
    start = {
        "id": form.response_id,
        "object": form.dialect.object,
        "created": form.created,
        "model": form.model,
    }
    return b"data: " + _encode(start)[:-1] + b',"choices":[{"index":'


def _logprobs_writer(form: StreamForm, prompt: ShownPrompt) -> Callable[[TextDelta], bytes]:
    if not form.with_logprobs:
        return _no_logprobs
    if form.dialect is CHAT:
        return lambda delta: (
            b',"logprobs":' + _encode(chat_logprobs(delta.token_ids, delta.logprobs or [], form.token_bytes))
        )
    writer = form.completion_logprobs(prompt.token_ids, prompt.echo)
    return lambda delta: b',"logprobs":' + _encode(writer.write(delta.token_ids, delta.logprobs or []))


def _no_logprobs(_delta: TextDelta) -> bytes:
    return _NO_LOGPROBS


def usage_chunk(form: StreamForm, usage: Usage) -> bytes:
    """Return the chunk without choices that has the usage."""
    start = _head(form).removesuffix(b'[{"index":')
    return start + b'[],"usage":' + _encode(usage) + b"}\n\n"


def error_event(body: bytes) -> bytes:
    """Return the event of an error.

    Args:
        body: the encoded error object.
    """
    return b"data: " + body + b"\n\n"
