"""The parts of an answer of `/v1/messages`: blocks, and the events that report them while they are generated.

A *block* here is a part of the answer: a text, reasoning (`thinking`), or a call of a tool. A stream has

- `message_start`
- for each block `content_block_start`, its `content_block_delta`s and `content_block_stop`
- `message_delta` with the stop reason and the usage, and `message_stop`; after a failure, wherever it
  happens, an `error` instead

A `ping` follows the first `content_block_start`, and may stand anywhere. A whole answer has the blocks that
the events add up to, so that both forms say the same.

A call is sent in one delta, when it is complete. A client may run a call as soon as it has some of it, so it
never gets one that breaks off or is not sound: that becomes text, with the call's markers. An empty answer is
one empty text. The signature of reasoning is a digest of its text, which is never checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.engine.client.outputs import TextDelta
from penstock.server.answers.encoding import encode
from penstock.server.answers.generation import EventWriter
from penstock.server.anthropic.error_form import MessagesErrors
from penstock.server.anthropic.messages_types import (
    AnswerBlock,
    AnswerText,
    AnswerThinking,
    AnswerToolUse,
    MessageObject,
    MessageUsage,
    StopReason,
    ThinkingTokens,
)
from penstock.server.http.errors import error_object, status_of
from penstock.server.openai.message_reader import MessageReader
from penstock.server.openai.openai_types import Usage
from penstock.tokenizer.pieces import Piece

Event = dict[str, Any]

MESSAGE_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class _OpenText:
    """A block of text or reasoning that is not complete.

    Args:
        kind: `text` or `thinking`: the type of the block, and the name of the field that its deltas have.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._texts: list[str] = []

    def begin(self) -> Event:
        """Return the block as it begins."""
        return {"type": "text", "text": ""} if self.kind == "text" else _begun_thinking()

    def add(self, text: str) -> Event:
        """Add text, and return the delta for it."""
        self._texts.append(text)
        return {"type": f"{self.kind}_delta", self.kind: text}

    def end(self) -> list[Event]:
        """Return the deltas before the block's end."""
        return [] if self.kind == "text" else [{"type": "signature_delta", "signature": self._signature}]

    def block(self) -> AnswerBlock:
        """Return the block as it is now."""
        text = "".join(self._texts)
        if self.kind == "text":
            return AnswerText(text=text)
        return AnswerThinking(thinking=text, signature=self._signature)

    @property
    def _signature(self) -> str:
        return hashlib.sha256("".join(self._texts).encode("utf-8", "surrogatepass")).hexdigest()


def _begun_thinking() -> Event:
    return {"type": "thinking", "thinking": "", "signature": ""}


_KINDS = {"content": "text", "reasoning": "thinking"}


class MessageOutput:
    """The blocks of one answer.

    Args:
        reader: splits the answer's text.
        fills_context: the answer may fill the context, since the client has asked for more tokens than fit.

    Attributes:
        blocks: the blocks that are complete.
        stop_reason: why the answer has ended; None before.
        stop_sequence: the stop sequence that ended the answer; None if another reason did.
    """

    def __init__(self, reader: MessageReader, *, fills_context: bool) -> None:
        self.blocks: list[AnswerBlock] = []
        self.stop_reason: StopReason | None = None
        self.stop_sequence: str | None = None
        self._reader = reader
        self._fills_context = fills_context
        self._open: _OpenText | None = None
        self._call: list[str] = []  # name and arguments of a call that is not complete
        self._given_id = ""  # the id that the model gave this call

    @property
    def reasoning_tokens(self) -> int | None:
        return self._reader.reasoning_tokens

    def take(self, delta: TextDelta) -> list[Event]:
        """Return the events for a delta. The last delta completes all blocks."""
        reason = delta.finish_reason
        self._reader.note_tokens(delta.token_ids)
        events: list[Event] = []
        for piece in self._reader.read(delta.text, is_last=reason is not None):
            events += self._piece(piece)
        if reason is not None:
            events += self._finish(delta)
        return events

    def _piece(self, piece: Piece) -> list[Event]:
        if piece.kind == "arguments":
            self._call.append(piece.text)
            return []
        if piece.kind == "broken":
            self._call.clear()
            return self._text("text", piece.text)
        if piece.kind == "call":
            events = self._whole_call()
            self._call.append(piece.text)
            self._given_id = piece.id
            return events
        return self._whole_call() + self._text(_KINDS[piece.kind], piece.text)

    def _text(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open.kind != kind:
            events = self._close()
            self._open = _OpenText(kind)
            events.append(self._started(self._open.begin()))
        return [*events, self._delta(self._open.add(text))]

    def _whole_call(self) -> list[Event]:
        """Return the events of the call that is complete, if there is one."""
        if not self._call:
            return []
        (name, *parts), self._call = self._call, []
        arguments = "".join(parts) or "{}"
        events = self._close()
        call_id = self._reader.new_call_id(self._given_id)
        call = AnswerToolUse(id=call_id, name=name, input=msgspec.Raw(arguments.encode()))
        begun = {"type": "tool_use", "id": call.id, "name": name, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": arguments}
        events += [self._started(begun), self._delta(delta), self._stopped()]
        self.blocks.append(call)
        return events

    def _finish(self, delta: TextDelta) -> list[Event]:
        events = self._whole_call()
        if self._open is None and not self.blocks:
            self._open = _OpenText("text")
            events.append(self._started(self._open.begin()))
        events += self._close()
        self.stop_reason, self.stop_sequence = self._end_of(delta)
        return events

    def _end_of(self, delta: TextDelta) -> tuple[StopReason, str | None]:
        reason = self._reader.finish_reason(delta.finish_reason or "stop")
        if reason == "length":
            return "model_context_window_exceeded" if self._fills_context else "max_tokens", None
        if reason == "tool_calls":
            return "tool_use", None
        if isinstance(delta.stop_reason, str):
            return "stop_sequence", delta.stop_reason
        return "end_turn", None

    def _close(self) -> list[Event]:
        opened, self._open = self._open, None
        if opened is None:
            return []
        events = [*map(self._delta, opened.end()), self._stopped()]
        self.blocks.append(opened.block())
        return events

    def _started(self, block: Event) -> Event:
        return {"type": "content_block_start", "index": len(self.blocks), "content_block": block}

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks), "delta": delta}

    def _stopped(self) -> Event:
        return {"type": "content_block_stop", "index": len(self.blocks)}


def message_usage(usage: Usage) -> MessageUsage:
    """Return the usage in this API's form, whose input tokens do not include the cached ones."""
    cached = usage.prompt_tokens_details.cached_tokens
    details = usage.completion_tokens_details
    thought = msgspec.UNSET if details is msgspec.UNSET else details.reasoning_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=msgspec.UNSET
        if thought is msgspec.UNSET
        else ThinkingTokens(thinking_tokens=thought),
    )


def whole_answer(begun: MessageObject, output: MessageOutput, usage: Usage) -> MessageObject:
    """Return the message as it stands at its end."""
    return msgspec.structs.replace(
        begun,
        content=output.blocks,
        stop_reason=output.stop_reason,
        stop_sequence=output.stop_sequence,
        usage=message_usage(usage),
    )


class MessageText:
    """The event stream of one message, and the writer of its only choice.

    Args:
        begun: the message as it stands at the beginning.
    """

    ping = MESSAGE_PING

    def __init__(self, begun: MessageObject, output: MessageOutput) -> None:
        self._begun = begun
        self._output = output
        self._is_opened = False
        self._has_pinged = False
        self.writers: list[EventWriter] = [self]

    @property
    def reasoning_tokens(self) -> int | None:
        return self._output.reasoning_tokens

    def opening(self) -> bytes:
        """Return the event that begins the message, at the first call; later calls return nothing."""
        if self._is_opened:
            return b""
        self._is_opened = True
        return _written({"type": "message_start", "message": self._begun})

    def chunk(self, delta: TextDelta) -> Iterator[bytes]:
        """Return the events for a delta, one by one."""
        yield self.opening()
        for event in self._output.take(delta):
            yield _written(event)
            if not self._has_pinged:
                self._has_pinged = True
                yield MESSAGE_PING

    def end(self, usage: Usage) -> bytes:
        """Return the events that follow all blocks."""
        output = self._output
        ended = {"stop_reason": output.stop_reason, "stop_sequence": output.stop_sequence}
        last = {"type": "message_delta", "delta": ended, "usage": message_usage(usage)}
        return _written(last) + _written({"type": "message_stop"})

    def failure(self, error: Exception, request_id: str) -> bytes:
        """Return an event with the error; its data are what the body of an error's answer would be."""
        shown = error_object(error, request_id)
        body = MessagesErrors().encode(shown, status_of(error), request_id)
        return b"".join((b"event: error\ndata: ", body, b"\n\n"))


def _written(event: Event) -> bytes:
    return b"".join((b"event: ", event["type"].encode(), b"\ndata: ", encode(event), b"\n\n"))
