"""Splits an answer that is a row of messages, each with a channel, into thoughts, text and calls (harmony).

A message is a header, `<|message|>`, a body and a mark that ends it:
`<|channel|>analysis<|message|>...<|end|>`. What is on the channel `analysis` is reasoning, and everything
else is content. A message with a recipient (`to=functions.look`) is a call: it comes out as content in the
one spelling that `tool_formats` has a row for, whatever the order in which the model has written its header.
What comes out does not depend on how the text was cut. Called by `reasoning`.
"""

from __future__ import annotations

import re

from penstock.tokenizer.pieces import Piece, PieceKind, partial_marker

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_BEGINNINGS = ("<|channel|>", "<|start|>", "to=")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_MAX_HEADER = 512


class HarmonySplitter:
    """Splits one answer.

    Args:
        is_open: the answer begins inside of the reasoning, since the prompt has opened it.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._held = ""
        self._body: _Body = _THOUGHT if is_open else _NO_BODY
        self._num_thoughts = int(is_open)
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether there was reasoning, and it has ended."""
        return self._is_closed

    @property
    def is_thinking(self) -> bool:
        """Whether what comes now is reasoning."""
        return self._body is _THOUGHT

    def feed(self, text: str) -> list[Piece]:
        """What these characters bring."""
        text, self._held = self._held + text, ""
        pieces: list[Piece] = []
        while text:
            text = self._header(text, pieces) if self._body is _NO_BODY else self._text(text, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back, when no more text comes; a header without its message is left out."""
        held, self._held = self._held, ""
        if not held or (self._body is _NO_BODY and held.lstrip().startswith("<|")):
            return []
        return [Piece(self._body.kind, held)]

    def _header(self, text: str, pieces: list[Piece]) -> str:
        """Read a header; return the text behind it, and nothing while it is not whole."""
        shown = text.lstrip()
        if not any(shown.startswith(mark[: len(shown)]) for mark in _BEGINNINGS):
            self._body = _ANSWER  # there is none
            return text
        header, message, rest = text.partition(_MESSAGE)
        if not message and len(text) <= _MAX_HEADER:
            self._held = text
            return ""
        if not message:
            self._body = _ANSWER
            return text
        self._body = _body_behind(header.rpartition("<|start|>")[2])
        if self._body is _THOUGHT:
            self._num_thoughts += 1
            if self._num_thoughts > 1:
                pieces.append(Piece("reasoning", "\n"))
        elif self._body.before:
            pieces.append(Piece("content", self._body.before))
        return rest

    def _text(self, text: str, pieces: list[Piece]) -> str:
        """Give a message's text; return what stands behind its end."""
        match = _END.search(text)
        shown = text[: match.start()] if match else text[: min(partial_marker(text, end) for end in _ENDS)]
        if shown:
            pieces.append(Piece(self._body.kind, shown))
        if match is None:
            self._held = text[len(shown) :]
            return ""
        if self._body.behind:
            pieces.append(Piece("content", self._body.behind))
        self._is_closed |= self._body is _THOUGHT
        self._body = _NO_BODY
        return text[match.start() if match[0] == "<|start|>" else match.end() :]


class _Body:
    """What a message is, and what is written around its text where it is a call."""

    def __init__(self, kind: PieceKind, before: str = "", behind: str = "") -> None:
        self.kind = kind
        self.before = before
        self.behind = behind


_NO_BODY, _THOUGHT, _ANSWER = _Body("content"), _Body("reasoning"), _Body("content")


def _body_behind(header: str) -> _Body:
    recipient = _RECIPIENT.search(header)
    if recipient is not None:
        return _Body("content", f"<|channel|>commentary to={recipient[1]}{_MESSAGE}", "<|call|>")
    channel = _CHANNEL.search(header)
    return _THOUGHT if channel is not None and channel[1] == "analysis" else _ANSWER
