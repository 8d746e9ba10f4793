"""Splits an answer that comes in pieces into what the model thinks aloud and what it says.

Reasoning begins with an opening marker at the start of an answer, or at once if the prompt has opened it. It
reaches up to a closing marker; without that marker all of the rest is reasoning. Line ends beside the markers
are left out, since templates write them again. In some families an answer is a sequence of messages instead
(`answer_messages`). What is given does not depend on how the text was cut.

Called by `server.openai.message_reader`, before calls of tools are looked for.
"""

from __future__ import annotations

from typing import Protocol

from penstock.tokenizer.answer_messages import DIALECTS, MessageSplitter
from penstock.tokenizer.pieces import Piece, partial_marker
from penstock.tokenizer.tool_formats import ReasoningFormat

_LINE_ENDS = "\r\n"


class Splitter(Protocol):
    """Splits one answer into what the model thinks and what it says."""

    @property
    def is_closed(self) -> bool:
        """Whether there was reasoning, and it has ended."""
        ...

    @property
    def is_thinking(self) -> bool:
        """Whether what comes now is reasoning."""
        ...

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that these characters bring: reasoning, then content."""
        ...

    def finish(self) -> list[Piece]:
        """Return what was held back, when no more text comes."""
        ...


def reasoning_splitter(form: ReasoningFormat, *, is_open: bool) -> Splitter:
    """Return the splitter for answers of this form.

    Args:
        is_open: the answer begins inside of the reasoning, since the prompt has opened it.
    """
    if form.messages:
        return MessageSplitter(DIALECTS[form.messages], is_open=is_open)
    splitter = ReasoningSplitter(form, is_open=is_open)
    return AroundAnswer(splitter, form.around, form.ending) if form.around[0] else splitter


class AroundAnswer:
    """A splitter that leaves out what a model writes around the text of its answer.

    Args:
        inner: splits the answer.
        marks: those before and behind the text. An answer that does not begin with the first stays as it is.
        ending: the mark behind the whole answer; "" if there is no such mark. Only the first one is left out.
    """

    def __init__(self, inner: Splitter, marks: tuple[str, str], ending: str = "") -> None:
        self._inner = inner
        self._opening, self._closing = marks
        self._ending = ending
        self._state = "start"  # then "inside", or "plain" for what is given as it is
        self._held = ""

    @property
    def is_closed(self) -> bool:
        return self._inner.is_closed

    @property
    def is_thinking(self) -> bool:
        return self._inner.is_thinking

    def feed(self, text: str) -> list[Piece]:
        return [shown for piece in self._inner.feed(text) for shown in self._without_marks(piece)]

    def finish(self) -> list[Piece]:
        pieces = [shown for piece in self._inner.finish() for shown in self._without_marks(piece)]
        held, self._held = self._held, ""
        return [*pieces, Piece("content", held)] if held else pieces

    def _without_marks(self, piece: Piece) -> list[Piece]:
        if piece.kind != "content" or (self._state == "plain" and not self._ending):
            return [piece]
        text, self._held = self._held + piece.text, ""
        if self._state == "start":
            text = self._behind_opening(text)
        shown = ""
        if self._state == "inside":
            shown, text = self._before(self._closing, text)
        if self._state == "plain":
            shown += self._without_ending(text)
        return [Piece("content", shown)] if shown else []

    def _behind_opening(self, text: str) -> str:
        shown = text.lstrip()
        if shown.startswith(self._opening):
            self._state = "inside"
            return shown[len(self._opening) :]
        if self._opening.startswith(shown):
            self._held = text
            return ""
        self._state = "plain"
        return text

    def _without_ending(self, text: str) -> str:
        ending = self._ending
        if not ending:
            return text
        if ending in text:
            self._ending = ""
        return "".join(self._before(ending, text))

    def _before(self, mark: str, text: str) -> tuple[str, str]:
        """Return the text before the mark and behind it; hold back what may be the beginning of the mark."""
        before, found, behind = text.partition(mark)
        if found:
            self._state = "plain"
            return before, behind
        shown = text[: partial_marker(text, mark)]
        self._held = text[len(shown) :]
        return shown, ""


class ReasoningSplitter:
    """A `Splitter` for reasoning that stands between two markers.

    Args:
        form: the model's form of reasoning.
        is_open: the answer begins inside of the reasoning, since the prompt has opened it.
    """

    def __init__(self, form: ReasoningFormat, *, is_open: bool) -> None:
        self._form = form
        self._state = "opened" if is_open else "start"  # then "reasoning", "closed", "content"
        self._held = ""
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether there was reasoning, and it has ended."""
        return self._is_closed

    @property
    def is_thinking(self) -> bool:
        """Whether what comes now is reasoning."""
        return self._state in ("opened", "reasoning")

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that these characters bring: reasoning, then content."""
        if self._state == "content":
            return [Piece("content", text)] if text else []
        text, self._held = self._held + text, ""
        pieces: list[Piece] = []
        if self._state == "start":
            text = self._opening(text)
        if self._state == "opened":
            text = self._stripped(text, "reasoning")
        if self._state == "reasoning":
            text = self._reasoning(text, pieces)
        if self._state == "closed":
            text = self._stripped(text, "content")
        if self._state == "content" and text:
            pieces.append(Piece("content", text))
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back, when no more text comes."""
        held, self._held = self._held, ""
        if not held:
            return []
        return [Piece("reasoning" if self._state == "reasoning" else "content", held)]

    def _opening(self, text: str) -> str:
        """Return the text behind the opening marker, or all of it if it does not begin with the marker."""
        shown, opening = text.lstrip(), self._form.opening
        if shown.startswith(opening):
            self._state = "opened"
            return shown[len(opening) :]
        if opening.startswith(shown):  # so far white space and a part of the marker
            self._held = text
            return ""
        self._state = "content"
        return text

    def _stripped(self, text: str, state: str) -> str:
        text = text.lstrip(_LINE_ENDS)
        if text:
            self._state = state
        return text

    def _reasoning(self, text: str, pieces: list[Piece]) -> str:
        before, closing, after = text.partition(self._form.closing)
        if closing:
            self._state, self._is_closed = "closed", True
            shown = before.rstrip(_LINE_ENDS)
        else:
            shown = text[: partial_marker(text, self._form.closing)].rstrip(_LINE_ENDS)
            self._held = text[len(shown) :]
        if shown:
            pieces.append(Piece("reasoning", shown))
        return after
