"""Splits an answer that is a sequence of messages, each with a header, into thoughts, text and calls.

A header says what its message is: a thought, a text for the user, or a call. A `Dialect` says how a family of
models writes headers, and what ends a message. In the dialect `harmony` a message is a header that ends with
`<|message|>`, a text, and a mark that ends the message: `<|channel|>analysis<|message|>...<|end|>`.

A call is given as content, in which `tool_calls` finds it later. It has the one spelling that a row of
`form_table` describes, however the model has written the header. What is given does not depend on how the
text was cut. Called by `reasoning` and `form_detection`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from penstock.tokenizer.pieces import Piece, PieceKind, partial_marker

_MAX_HEADER = 512  # characters


@dataclass(frozen=True, slots=True)
class Body:
    """The kind of a message, and the marks that are given around its text if it is a call."""

    kind: PieceKind
    before: str = ""
    behind: str = ""


_NO_BODY, _THOUGHT, _ANSWER = Body("content"), Body("reasoning"), Body("content")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The form in which the messages of a family begin and end.

    Attributes:
        header: matches the header of a message, at the beginning of a text.
        begun: matches a text, as a whole, that more text may turn into a header.
        body: returns the `Body` of the message that a header begins.
        ends: marks that end the text of a message.
        start: the one of `ends` that is also the beginning of the next header.
    """

    header: re.Pattern[str]
    begun: re.Pattern[str]
    body: Callable[[re.Match[str]], Body]
    ends: tuple[str, ...]
    start: str


class MessageSplitter:
    """Splits one answer.

    Args:
        dialect: the dialect of the model's family.
        is_open: the answer begins inside of the reasoning, since the prompt has opened it.
    """

    def __init__(self, dialect: Dialect, *, is_open: bool) -> None:
        self._dialect = dialect
        self._end = re.compile("|".join(map(re.escape, dialect.ends)))
        self._held = ""
        self._body = _THOUGHT if is_open else _NO_BODY
        self._num_thoughts = int(is_open)
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether a thought has ended; another one may follow."""
        return self._is_closed

    @property
    def is_thinking(self) -> bool:
        """Whether what comes now is reasoning."""
        return self._body is _THOUGHT

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that these characters bring."""
        text, self._held = self._held + text, ""
        pieces: list[Piece] = []
        while text:
            text = self._header(text, pieces) if self._body is _NO_BODY else self._text(text, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back, when no more text comes.

        A header that begins with `<|` and has no message behind it is left out.
        """
        held, self._held = self._held, ""
        if not held or (self._body is _NO_BODY and held.lstrip().startswith("<|")):
            return []
        return [Piece(self._body.kind, held)]

    def _header(self, text: str, pieces: list[Piece]) -> str:
        """Read a header; return the text behind it, or "" while the header may not be whole yet."""
        # Only the first `_MAX_HEADER` characters count. Otherwise it would depend on how the text was cut
        # whether a longer text is a header.
        match = self._dialect.header.match(text[:_MAX_HEADER])
        if match is None and len(text) < _MAX_HEADER and self._dialect.begun.fullmatch(text):
            self._held = text
            return ""
        if match is None:
            self._body = _ANSWER
            # A start that begins no header is text. It must be taken here, or it would end this text at once.
            start = self._dialect.start if text.startswith(self._dialect.start) else ""
            if start:
                pieces.append(Piece("content", start))
            return text[len(start) :]
        self._body = self._dialect.body(match)
        if self._body is _THOUGHT:
            self._num_thoughts += 1
            if self._num_thoughts > 1:
                pieces.append(Piece("reasoning", "\n"))
        elif self._body.before:
            pieces.append(Piece("content", self._body.before))
        return text[match.end() :]

    def _text(self, text: str, pieces: list[Piece]) -> str:
        """Give a message's text; return what stands behind its end."""
        match = self._end.search(text)
        cut = match.start() if match else min(partial_marker(text, end) for end in self._dialect.ends)
        if cut:
            pieces.append(Piece(self._body.kind, text[:cut]))
        if match is None:
            self._held = text[cut:]
            return ""
        if self._body.behind:
            pieces.append(Piece("content", self._body.behind))
        self._is_closed |= self._body is _THOUGHT
        self._body = _NO_BODY
        return text[match.start() if match[0] == self._dialect.start else match.end() :]


def _begun(*beginnings: str) -> re.Pattern[str]:
    """Return a pattern of texts that begin with one of these, or that one of these begins with."""
    parts = {re.escape(mark[:size]) for mark in beginnings for size in range(1, len(mark))}
    wholes = map(re.escape, beginnings)
    return re.compile(rf"\s*(?:(?:{'|'.join(wholes)}).*|{'|'.join(sorted(parts))})?", re.DOTALL)


_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def _of_harmony(header: re.Match[str]) -> Body:
    """Return the body of a harmony message.

    With a recipient the message is a call of that recipient; else it is a thought on the channel `analysis`,
    and text on any other channel.
    """
    text = header[0].rpartition("<|start|>")[2]
    recipient = _RECIPIENT.search(text)
    if recipient is not None:
        return Body("content", f"<|channel|>commentary to={recipient[1]}<|message|>", "<|call|>")
    channel = _CHANNEL.search(text)
    return _THOUGHT if channel is not None and channel[1] == "analysis" else _ANSWER


def _of_muse(header: re.Match[str]) -> Body:
    """Return the body of a message of Muse: to `self` it is a thought, else text with or without a call."""
    return _THOUGHT if header[1] == "self" else _ANSWER


def _of_solar(header: re.Match[str]) -> Body:
    """Return the body of a message of Solar; the mark in the header says what the message is."""
    if header[1] == "tool_calls":
        return Body("content", "<|tool_calls|>", "<|calls|>")
    return _THOUGHT if header[1] == "think" else _ANSWER


def _of_functionary(header: re.Match[str]) -> Body:
    """Return the body of a message of Functionary; the header names a recipient: `all`, or a function."""
    return _ANSWER if header[1] is None else Body("content", f">>>{header[1]}\n")


DIALECTS = {
    "harmony": Dialect(
        header=re.compile(r"\s*(?:<\|channel\|>|<\|start\|>|to=).*?<\|message\|>", re.DOTALL),
        begun=_begun("<|channel|>", "<|start|>", "to="),
        body=_of_harmony,
        ends=("<|end|>", "<|return|>", "<|call|>", "<|start|>"),
        start="<|start|>",
    ),
    "muse": Dialect(
        header=re.compile(r"\s*(?:<\|start\|>assistant)?\s*(?:to=([^\s<]+))?<\|message\|>"),
        begun=_begun("<|start|>", "to=", "<|message|>"),
        body=_of_muse,
        ends=("<|eom|>", "<|eot|>", "<|start|>"),
        start="<|start|>",
    ),
    "solar": Dialect(
        header=re.compile(r"\s*(?:<\|begin\|>assistant)?<\|(think|content|tool_calls)\|>"),
        begun=_begun("<|begin|>", "<|think|>", "<|content|>", "<|tool_calls|>"),
        body=_of_solar,
        ends=("<|end|>", "<|calls|>", "<|begin|>"),
        start="<|begin|>",
    ),
    "functionary": Dialect(
        header=re.compile(r"\s*(?:>>>)?(?:all\n|([\w.-]{1,64})\s*(?=\{))"),
        begun=re.compile(r"\s*(?:>{0,2}|(?:>>>)?(?:[\w.-]{1,64}\s*)?)"),
        body=_of_functionary,
        ends=(">>>",),
        start=">>>",
    ),
}
