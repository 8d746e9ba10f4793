"""The parts of an answer of `/v1/responses`: items, and the events that report them while they are generated.

An item is a message, reasoning, or a call of a function or custom tool. A stream has

- `response.created` and `response.in_progress`
- for each item `response.output_item.added`, its parts and deltas, and `response.output_item.done`
- `response.completed` or `response.incomplete`, and then `[DONE]`; after a failure, wherever it happens,
  `error` and `response.failed` instead, without `[DONE]`

Every event has a `sequence_number`; `: ping` may stand anywhere. A whole answer is the `response` that the
last event would have, so that both forms say the same.

Log-probabilities are given for the text of messages (`text_logprobs`). Each delta has those of its tokens.
The three events that complete a message, and the last event, have all of the message: they are encoded once,
and copied from then on. Events are encoded one by one, as they are sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from penstock.engine.client.outputs import TextDelta
from penstock.request import FinishReason
from penstock.server.answers.encoding import EncodedList, EncodedLists, encode
from penstock.server.answers.generation import EventWriter
from penstock.server.answers.sse import DONE, PING
from penstock.server.answers.text_logprobs import TextLogprobs
from penstock.server.http.errors import error_object
from penstock.server.openai.custom_tools import input_of
from penstock.server.openai.message_reader import MessageReader
from penstock.server.openai.openai_types import ChatTokenLogprob, Usage
from penstock.server.openai.responses_types import (
    IncompleteDetails,
    InputTokensDetails,
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    Status,
)
from penstock.tokenizer.pieces import Piece

Event = dict[str, Any]


class _OpenItem:
    """An item that is not complete. Its events lack index and id of the item, which `Output` adds.

    Attributes:
        kind: kind of the pieces that the item is made of (`tokenizer.pieces`).
    """

    kind: ClassVar[str]
    _prefix: ClassVar[str]  # of the item's id
    _events: ClassVar[str]  # the beginning of its events' types

    def __init__(self, unique: str) -> None:
        self.id = f"{self._prefix}_{unique}"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All that was added."""
        return "".join(self._texts)

    def add(self, text: str, logprobs: list[ChatTokenLogprob]) -> list[Event]:
        """Add text, and return the events for it."""
        self._texts.append(text)
        return [{"type": f"{self._events}.delta", "delta": text}]

    def begin(self) -> list[Event]:
        """Return the events that follow its `output_item.added`."""
        return []

    def end(self) -> list[Event]:
        """Return the events before its `output_item.done`."""
        raise NotImplementedError

    def item(self, status: Status) -> OutputItem:
        """Return the item as it is now; for the status `in_progress`, as it began."""
        raise NotImplementedError


class _OpenMessage(_OpenItem):
    kind = "content"
    _prefix = "msg"
    _events = "response.output_text"

    def __init__(self, unique: str, logprobs: EncodedList) -> None:
        super().__init__(unique)
        self._logprobs = logprobs

    def add(self, text: str, logprobs: list[ChatTokenLogprob]) -> list[Event]:
        encoded = encode(logprobs)
        self._logprobs.extend(encoded)
        beside = {"content_index": 0, "logprobs": msgspec.Raw(encoded)}
        return [event | beside for event in super().add(text, logprobs)]

    def begin(self) -> list[Event]:
        return [_part_event("added", OutputText(text=""))]

    def end(self) -> list[Event]:
        part = self._part
        whole = {"text": part.text, "logprobs": part.logprobs, "content_index": 0}
        return [{"type": f"{self._events}.done", **whole}, _part_event("done", part)]

    def item(self, status: Status) -> OutputMessage:
        content = [] if status == "in_progress" else [self._part]
        return OutputMessage(id=self.id, status=status, content=content)

    @property
    def _part(self) -> OutputText:
        """The whole text with its log-probabilities; used when nothing is added any more."""
        return OutputText(text=self.text, logprobs=self._logprobs.placeholder)


class _OpenReasoning(_OpenItem):
    kind = "reasoning"
    _prefix = "rs"
    _events = "response.reasoning_text"

    def add(self, text: str, logprobs: list[ChatTokenLogprob]) -> list[Event]:
        return [event | {"content_index": 0} for event in super().add(text, logprobs)]

    def begin(self) -> list[Event]:
        return [_part_event("added", ReasoningText(text=""))]

    def end(self) -> list[Event]:
        whole = {"text": self.text, "content_index": 0}
        return [{"type": f"{self._events}.done", **whole}, _part_event("done", ReasoningText(text=self.text))]

    def item(self, status: Status) -> OutputReasoning:
        content = [] if status == "in_progress" else [ReasoningText(text=self.text)]
        return OutputReasoning(id=self.id, status=status, content=content)


class _OpenCall(_OpenItem):
    kind = "arguments"
    _prefix = "fc"
    _events = "response.function_call_arguments"

    def __init__(self, unique: str, call_id: str, name: str) -> None:
        super().__init__(unique)
        self._call_id = call_id
        self._name = name

    def end(self) -> list[Event]:
        return [{"type": f"{self._events}.done", "name": self._name, "arguments": self.text}]

    def item(self, status: Status) -> OutputCall | OutputCustomCall:
        return OutputCall(
            id=self.id, status=status, call_id=self._call_id, name=self._name, arguments=self.text
        )


class _OpenCustomCall(_OpenCall):
    """A call of a custom tool, whose text is sent when the arguments that it stands in are complete."""

    _prefix = "ctc"
    _events = "response.custom_tool_call_input"

    def add(self, text: str, logprobs: list[ChatTokenLogprob]) -> list[Event]:
        super().add(text, logprobs)
        return []

    def end(self) -> list[Event]:
        text = input_of(self.text)
        return [
            {"type": f"{self._events}.delta", "delta": text},
            {"type": f"{self._events}.done", "input": text},
        ]

    def item(self, status: Status) -> OutputCustomCall:
        return OutputCustomCall(
            id=self.id, status=status, call_id=self._call_id, name=self._name, input=input_of(self.text)
        )


def _part_event(what: str, part: OutputText | ReasoningText) -> Event:
    return {"type": f"response.content_part.{what}", "content_index": 0, "part": part}


class Output:
    """The items of one response.

    Args:
        unique: the end of the response's id, which the ids of its items have too.
        reader: splits the text.
        logprobs: log-probabilities of the response's tokens.
        customs: names of the custom tools.

    Attributes:
        items: the items that are complete.
        lists: log-probabilities of messages; events and items have placeholders for them.
        finish_reason: why the response has ended; None before.
    """

    def __init__(
        self,
        unique: str,
        reader: MessageReader,
        logprobs: TextLogprobs,
        customs: frozenset[str] = frozenset(),
    ) -> None:
        self.items: list[OutputItem] = []
        self.lists = EncodedLists()
        self.finish_reason: FinishReason | None = None
        self._unique = unique
        self._reader = reader
        self._logprobs = logprobs
        self._customs = customs
        self._open: _OpenItem | None = None

    @property
    def reasoning_tokens(self) -> int | None:
        return self._reader.reasoning_tokens

    def take(self, delta: TextDelta) -> list[Event]:
        """Return the events for a delta. The last delta completes all items."""
        reason = delta.finish_reason
        self._reader.note_tokens(delta.token_ids)
        self._logprobs.add(delta.token_ids, delta.logprobs or [])
        events: list[Event] = []
        for piece in self._reader.read(delta.text, is_last=reason is not None):
            events += self._piece(piece)
        if reason is not None:
            events += self._finish(reason)
        return events

    def _piece(self, piece: Piece) -> list[Event]:
        if piece.kind == "broken":
            return self._close("incomplete")
        if piece.kind == "call":
            return self._call(piece)
        events: list[Event] = []
        if self._open is None or self._open.kind != piece.kind:
            events += self._close() + self._begin(
                self._new_message() if piece.kind == "content" else _OpenReasoning(self._name())
            )
        return events + self._add(piece.text, self._logprobs_of(piece))

    def _logprobs_of(self, piece: Piece) -> list[ChatTokenLogprob]:
        if piece.kind != "content":
            return []
        begin = self._reader.num_before_content + piece.begin
        return self._logprobs.take(begin, begin + len(piece.text))

    def _call(self, piece: Piece) -> list[Event]:
        closed = self._close()
        kind = _OpenCustomCall if piece.text in self._customs else _OpenCall
        return closed + self._begin(kind(self._name(), self._reader.new_call_id(piece.id), piece.text))

    def _finish(self, reason: FinishReason) -> list[Event]:
        self.finish_reason = reason
        events: list[Event] = []
        if self._open is None and not self.items:
            events += self._begin(self._new_message())
        if self._open is not None and self._open.kind == "content":
            rest = self._logprobs.take_rest(self._reader.num_characters)
            events += self._add("", rest) if rest else []
        return events + self._close("incomplete" if reason == "length" and self._is_cut else "completed")

    @property
    def _is_cut(self) -> bool:
        """Whether more tokens could have continued the open item.

        That is never so for a call. A call that is still open at the end has all of its arguments, since one
        that breaks off is closed before, as incomplete.
        """
        kind = None if self._open is None else self._open.kind
        return kind == "content" or (kind == "reasoning" and self._reader.is_thinking)

    def _new_message(self) -> _OpenMessage:
        return _OpenMessage(self._name(), self.lists.new_list())

    def _name(self) -> str:
        return f"{self._unique}_{len(self.items)}"

    def _begin(self, opened: _OpenItem) -> list[Event]:
        self._open = opened
        added = {"type": "response.output_item.added", "item": opened.item("in_progress")}
        return [self._placed(added)] + [self._placed(event) for event in opened.begin()]

    def _add(self, text: str, logprobs: list[ChatTokenLogprob]) -> list[Event]:
        assert self._open is not None
        return [self._placed(event) for event in self._open.add(text, logprobs)]

    def _close(self, status: Status = "completed") -> list[Event]:
        opened = self._open
        if opened is None:
            return []
        events = [self._placed(event) for event in opened.end()]
        item = opened.item(status)
        events.append(self._placed({"type": "response.output_item.done", "item": item}))
        self.items.append(item)
        self._open = None
        return events

    def _placed(self, event: Event) -> Event:
        assert self._open is not None
        event["output_index"] = len(self.items)
        if "item" not in event:
            event["item_id"] = self._open.id
        return event


def finished(response: ResponseObject, output: Output, usage: Usage) -> ResponseObject:
    """Return the response as it stands at its end."""
    is_cut = output.finish_reason == "length"
    details = usage.completion_tokens_details
    told = 0 if details is msgspec.UNSET else details.reasoning_tokens
    num_reasoning = 0 if told is msgspec.UNSET else told
    return msgspec.structs.replace(
        response,
        completed_at=int(time.time()),
        status="incomplete" if is_cut else "completed",
        incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
        output=output.items,
        usage=ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=num_reasoning),
            total_tokens=usage.total_tokens,
        ),
    )


class ResponseText:
    """The event stream of one response, and the writer of its only choice.

    Args:
        response: the response as it stands at the beginning.
    """

    ping = PING

    def __init__(self, response: ResponseObject, output: Output) -> None:
        self._asked = response
        self._output = output
        self._number = 0
        self._is_opened = False
        self.writers: list[EventWriter] = [self]

    @property
    def reasoning_tokens(self) -> int | None:
        return self._output.reasoning_tokens

    def opening(self) -> bytes:
        """Return the events that begin the response, at the first call; later calls return nothing."""
        if self._is_opened:
            return b""
        self._is_opened = True
        begun = ("response.created", "response.in_progress")
        return b"".join(self._written({"type": kind, "response": self._asked}) for kind in begun)

    def chunk(self, delta: TextDelta) -> Iterator[bytes]:
        """Yield the events for a delta, one by one."""
        yield self.opening()
        for event in self._output.take(delta):
            yield self._written(event)

    def end(self, usage: Usage) -> bytes:
        """Return the event with the whole response, and the end of the stream."""
        response = finished(self._asked, self._output, usage)
        return self._written({"type": f"response.{response.status}", "response": response}) + DONE

    def failure(self, error: Exception, request_id: str) -> bytes:
        """Return `error`, for clients that raise it, and `response.failed`, for those that read responses."""
        shown = error_object(error, request_id)
        failed = msgspec.structs.replace(
            self._asked,
            status="failed",
            error=ResponseError(code=shown.code or shown.type, message=shown.message),
            output=self._output.items,
        )
        flat = {"message": shown.message, "code": shown.code, "param": shown.param}
        first = self._written({"type": "error", "error": shown, **flat})
        return first + self._written({"type": "response.failed", "response": failed})

    def _written(self, event: Event) -> bytes:
        event["sequence_number"] = self._number
        self._number += 1
        data = self._output.lists.encode(event)
        return b"".join((b"event: ", event["type"].encode(), b"\ndata: ", data, b"\n\n"))
