"""Streams of chunks, and the chunks of a choice whose text is read for reasoning and calls of tools.

In those there are, beside content, deltas of `reasoning_content` and of `tool_calls`. The first delta of a
call has its index, id, type and name, and no arguments; further ones have the index and more of the
arguments. Each chunk has one kind of delta, and of one call. What a token brought may be several chunks, or
none: its log-probability and id are in the first, or in one without text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from penstock.engine.client.outputs import TextDelta
from penstock.server.answers.generation import EventWriter
from penstock.server.answers.sse import (
    DONE,
    PING,
    ChunkWriter,
    ShownPrompt,
    StreamForm,
    error_event,
    usage_chunk,
)
from penstock.server.http.errors import error_bytes
from penstock.server.openai.message_reader import MessageReader
from penstock.server.openai.openai_types import Usage
from penstock.tokenizer.pieces import Piece

_encode = msgspec.json.Encoder().encode


class MessageWriter:
    """A writer that is used in place of a `ChunkWriter`, with the same methods."""

    def __init__(self, writer: ChunkWriter, reader: MessageReader) -> None:
        self._writer = writer
        self._reader = reader

    @property
    def reasoning_tokens(self) -> int | None:
        return self._reader.reasoning_tokens

    def opening(self) -> bytes:
        return self._writer.opening()

    def chunk(self, delta: TextDelta) -> tuple[bytes]:
        """Return the events for a delta: none, one, or more; may be empty."""
        reason = delta.finish_reason
        self._writer.count(delta)
        self._reader.note_tokens(delta.token_ids)
        pieces = self._reader.read(delta.text, is_last=reason is not None)
        bodies = [self._body(piece) for piece in pieces if piece.kind != "broken"]
        if not bodies and delta.token_ids and self._writer.shows_tokens:
            bodies = [{"content": ""}]
        events = [self._writer.opening()]
        for index, body in enumerate(bodies):
            shown = b'"delta":' + _encode(body)
            events.append(self._writer.event(shown, delta if index == 0 else None))
        if reason is not None:
            events.append(self._writer.finish(delta, self._reader.finish_reason(reason)))
        return (b"".join(events),)

    def _body(self, piece: Piece) -> dict[str, Any]:
        if piece.kind == "content":
            return {"content": piece.text}
        if piece.kind == "reasoning":
            return {"reasoning_content": piece.text}
        if piece.kind == "arguments":
            index = self._reader.num_calls - 1
            return {"tool_calls": [{"index": index, "function": {"arguments": piece.text}}]}
        index, id_ = self._reader.num_calls, self._reader.new_call_id(piece.id)
        function = {"name": piece.text, "arguments": ""}
        call = {"index": index, "id": id_, "type": "function", "function": function}
        return {"tool_calls": [call]}


class ChunkText:
    """A whole stream of chunks.

    Args:
        form: what all of its choices share.
        prompts: what each choice goes on from.
    """

    ping = PING

    def __init__(self, form: StreamForm, prompts: Iterable[ShownPrompt]) -> None:
        self._form = form
        self.writers = [_writer(form, index, prompt) for index, prompt in enumerate(prompts)]

    def end(self, usage: Usage) -> bytes:
        """Return the usage where it was asked for, and the end."""
        return (usage_chunk(self._form, usage) if self._form.include_usage else b"") + DONE

    def failure(self, error: Exception, request_id: str) -> bytes:
        """Return the error; the end is left out."""
        return error_event(error_bytes(error, request_id))


def _writer(form: StreamForm, index: int, prompt: ShownPrompt) -> EventWriter:
    writer = ChunkWriter(form, index, prompt)
    if form.reading is None:
        return writer
    return MessageWriter(writer, form.reading.reader(form.response_id, index))
