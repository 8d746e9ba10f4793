"""Splits the text of an answer into the parts of its message: reasoning, content and calls of tools.

A `Reading` says how the answers of one request are read; it makes a `MessageReader` for each choice. The
reader takes text as it comes, and returns *pieces* (`tokenizer.pieces`). It is used by `message_stream`,
`responses_output` and `message_output`; `whole_message` is for a chat's answers that are not streamed.
`tokenizer.model_syntax` knows how a model writes the parts.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from penstock.request import FinishReason
from penstock.server.openai.openai_types import (
    AssistantMessage,
    ChatFinishReason,
    MadeFunctionCall,
    MadeToolCall,
)
from penstock.tokenizer.pieces import Piece
from penstock.tokenizer.reasoning import reasoning_splitter
from penstock.tokenizer.tool_calls import ToolCallParser
from penstock.tokenizer.tool_formats import ReasoningFormat, ToolFormat

_LETTERS = string.ascii_letters + string.digits
_SHORT_ID, _LONG_ID = 9, 24


class _Splitter(Protocol):
    @property
    def is_closed(self) -> bool: ...
    @property
    def is_thinking(self) -> bool: ...
    def feed(self, text: str) -> list[Piece]: ...
    def finish(self) -> list[Piece]: ...


class _AllContent:
    """The parser where nothing is looked for: all text is content."""

    num_sound = 0
    is_closed = False
    is_thinking = False

    def __init__(self) -> None:
        self._num_fed = 0  # characters

    def feed(self, text: str) -> list[Piece]:
        begin = self._num_fed
        self._num_fed += len(text)
        return [Piece("content", text, begin)] if text else []

    def finish(self) -> list[Piece]:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The way in which the answers of one request are read.

    Attributes:
        tools: how the model writes calls of tools; None: calls are not looked for.
        names: names of the request's tools.
        schemas: schema of the arguments of each tool, by name.
        is_parallel: an answer may have several calls; if not, calls after the first are left out.
        reasoning: how the model marks reasoning; None: reasoning is not looked for.
        is_open: the answer begins inside the reasoning.
        shows_reasoning: if not, reasoning is left out.
        reasoning_end: the token that ends the reasoning. None if that is not a single token; the tokens of
            the reasoning cannot be counted then.
    """

    tools: ToolFormat | None = None
    names: frozenset[str] = frozenset()
    schemas: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    is_parallel: bool = True
    reasoning: ReasoningFormat | None = None
    is_open: bool = False
    shows_reasoning: bool = True
    reasoning_end: int | None = None

    def reader(self, response_id: str, choice: int) -> MessageReader:
        """Return a reader for one choice of a response."""
        return MessageReader(self, f"{response_id}:{choice}")


class MessageReader:
    """The reader of one choice.

    Args:
        reading: how the text is read.
        name: a name that no other choice of any response has; ids of calls are made from it.

    Attributes:
        num_calls: number of calls to which `new_call_id` has given an id.
        num_characters: characters of the text so far.
    """

    def __init__(self, reading: Reading, name: str) -> None:
        self.num_calls = 0
        self.num_characters = 0
        self._num_behind_reasoning = 0  # how many of these characters are not reasoning or its markers
        self._reading = reading
        self._name = name
        self._splitter: _Splitter = _AllContent()
        self._calls: ToolCallParser | _AllContent = _AllContent()
        if reading.reasoning is not None:
            self._splitter = reasoning_splitter(reading.reasoning, is_open=reading.is_open)
        if reading.tools is not None:
            self._calls = ToolCallParser(reading.tools, reading.names, reading.schemas)
        self._num_read = 0  # calls so far, sound or not
        self._is_first_broken = False
        self._num_tokens = 0
        self._tokens_to_end: int | None = None  # tokens up to the end of the reasoning

    @property
    def reasoning_tokens(self) -> int | None:
        """The number of tokens up to the end of the reasoning, markers included; None if it is not known."""
        if self._reading.reasoning_end is None:
            return None
        if self._splitter.is_closed:
            return self._tokens_to_end
        return self._num_tokens if self._splitter.is_thinking else 0

    @property
    def num_before_content(self) -> int:
        """The number of characters of the reasoning and its markers, which come before the content."""
        return self.num_characters - self._num_behind_reasoning

    @property
    def is_thinking(self) -> bool:
        """Whether the reasoning has begun, and has not ended."""
        return self._splitter.is_thinking

    def note_tokens(self, token_ids: Sequence[int]) -> None:
        """Count tokens of the answer, in order to know how many belong to the reasoning."""
        end = self._reading.reasoning_end
        if end is None:
            return
        if self._tokens_to_end is None and end in token_ids:
            self._tokens_to_end = self._num_tokens + token_ids.index(end) + 1
        self._num_tokens += len(token_ids)

    def read(self, text: str, *, is_last: bool) -> list[Piece]:
        """Return the pieces of the next text. Text that may belong to a marker is held back.

        With the last text, all that was held back is returned too.
        """
        self.num_characters += len(text)
        pieces = self._splitter.feed(text)
        if is_last:
            pieces += self._splitter.finish()
        answer_pieces: list[Piece] = []
        for piece in pieces:
            if piece.kind == "content":
                self._num_behind_reasoning += len(piece.text)
                answer_pieces += self._calls.feed(piece.text)
            elif self._reading.shows_reasoning:
                answer_pieces.append(piece)
        if is_last:
            answer_pieces += self._calls.finish()
        return answer_pieces if self._reading.is_parallel else list(self._up_to_one_call(answer_pieces))

    def _up_to_one_call(self, pieces: Iterable[Piece]) -> Iterable[Piece]:
        for piece in pieces:
            self._num_read += piece.kind == "call"
            self._is_first_broken |= piece.kind == "broken" and self._num_read == 1
            if self._num_read <= 1 or piece.kind in ("content", "reasoning"):
                yield piece

    def finish_reason(self, reason: FinishReason) -> ChatFinishReason:
        """Return `tool_calls` if the model has ended by itself and the answer has a call that is sound.

        Otherwise return the reason as it is.
        """
        is_given = self._reading.is_parallel or not self._is_first_broken
        return "tool_calls" if reason == "stop" and self._calls.num_sound and is_given else reason

    def new_call_id(self, given: str = "") -> str:
        """Return the id of the next call: the model's own, or one of a form that its template accepts."""
        digest = hashlib.sha256(f"{self._name}:{self.num_calls}".encode()).digest()
        self.num_calls += 1
        if given:
            return given
        letters = "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest)
        form = self._reading.tools
        if form is not None and form.has_short_ids:
            return letters[:_SHORT_ID]
        return "call_" + letters[:_LONG_ID]


def whole_message(reader: MessageReader, text: str) -> AssistantMessage:
    """Return the message of an answer's whole text. A call that is not sound becomes content."""
    content, reasoning = "", ""
    calls: list[tuple[Piece, list[str]]] = []
    for piece in reader.read(text, is_last=True):
        if piece.kind == "content":
            content += piece.text
        elif piece.kind == "reasoning":
            reasoning += piece.text
        elif piece.kind == "call":
            calls.append((piece, []))
        elif piece.kind == "arguments":
            calls[-1][1].append(piece.text)
        else:
            calls.pop()
            content += piece.text
    made = [
        MadeToolCall(
            id=reader.new_call_id(call.id),
            function=MadeFunctionCall(name=call.text, arguments="".join(arguments)),
        )
        for call, arguments in calls
    ]
    return AssistantMessage(
        content=content or (None if made else ""),
        reasoning_content=reasoning or msgspec.UNSET,
        tool_calls=made or msgspec.UNSET,
    )
