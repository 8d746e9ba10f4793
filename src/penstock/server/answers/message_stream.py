"""Writes the chunks of streamed answers; may first search their text for reasoning and tool calls.

A *chunk* here is the JSON object of one event, as in the OpenAI API. A choice that is read so has, besides
content, deltas of `reasoning_content` and of `tool_calls`. The first delta of a call has its index, id, type
and name, and no arguments; later ones have the index and more of the arguments. Each chunk has a delta of one
kind and of at most one call.

The tokens that come at once may make several chunks, or none. If their log-probabilities and ids are wanted,
these are in the first of the chunks, or in a chunk without text.
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
    """Writes the chunks of one choice whose text is split into content, reasoning and calls.

    Args:
        writer: puts each delta into a chunk.
        reader: splits the text.
    """

    def __init__(self, writer: ChunkWriter, reader: MessageReader) -> None:
        self._writer = writer
        self._reader = reader

    @property
    def reasoning_tokens(self) -> int | None:
        return self._reader.reasoning_tokens

    def opening(self) -> bytes:
        return self._writer.opening()

    def chunk(self, delta: TextDelta) -> tuple[bytes]:
        """Return the events for a delta, in one piece, which may be empty."""
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
    """The bytes of a whole stream of chunks.

    Args:
        form: what all choices of the response have in common.
        prompts: the prompt of each choice.
    """

    ping = PING

    def __init__(self, form: StreamForm, prompts: Iterable[ShownPrompt]) -> None:
        self._form = form
        self.writers = [_writer(form, index, prompt) for index, prompt in enumerate(prompts)]

    def end(self, usage: Usage) -> bytes:
        """Return a chunk with the usage, if it was asked for, and the end of the stream."""
        return (usage_chunk(self._form, usage) if self._form.include_usage else b"") + DONE

    def failure(self, error: Exception, request_id: str) -> bytes:
        """Return an event with the error; `[DONE]` is left out."""
        return error_event(error_bytes(error, request_id))


def _writer(form: StreamForm, index: int, prompt: ShownPrompt) -> EventWriter:
    writer = ChunkWriter(form, index, prompt)
    if form.reading is None:
        return writer
    return MessageWriter(writer, form.reading.reader(form.response_id, index))
