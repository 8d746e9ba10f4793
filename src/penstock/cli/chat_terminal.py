"""The conversation in the terminal: reads a line, streams the answer, and keeps the messages so far.

`cli.chat` makes a `ChatTerminal` and runs it. It works with messages and text alone; `ask` does the HTTP, so
that tests need no server. While an answer comes, Ctrl-C stops it and keeps its text so far. At the prompt,
Ctrl-C ends the chat.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from penstock.cli.terminal import Invocation, printable, remedy_of
from penstock.errors import PenstockError

Message = dict[str, str]
HELP = "/exit ends the chat, /clear starts a new one, /help shows this line. Ctrl-C stops an answer."


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnd:
    """The end of an answer. `tokens` is None if the server did not report a number."""

    finish_reason: str
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the model's reasoning before its answer. It is shown, but not kept in the conversation."""

    text: str


AnswerStream = Generator[str | Thought, None, AnswerEnd]
Ask = Callable[[Sequence[Message]], AnswerStream]


class ChatTerminal:
    """One conversation.

    Args:
        ask: sends the messages so far and yields the answer's text as it comes.
        read_line: shows a prompt and returns the next line; raises EOFError at the end of input.
        system_prompt: first message of every conversation; "": there is none.
    """

    def __init__(
        self,
        ask: Ask,
        invocation: Invocation,
        read_line: Callable[[str], str],
        system_prompt: str = "",
    ) -> None:
        self._ask = ask
        self._invocation = invocation
        self._read_line = read_line
        self._opening: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._messages = list(self._opening)

    @property
    def messages(self) -> list[Message]:
        return list(self._messages)

    def run(self) -> int:
        """Run until /exit, the end of input, or Ctrl-C at the prompt. Returns the exit code."""
        self._invocation.say(HELP)
        while True:
            try:
                line = self._read_line("> ").strip()
            except (EOFError, KeyboardInterrupt):
                self._invocation.say("")
                return 0
            if line in ("/exit", "/quit"):
                return 0
            self._take(line)

    def _take(self, line: str) -> None:
        if line == "/clear":
            self._messages = list(self._opening)
        elif line.startswith("/"):
            self._invocation.say(HELP)
        elif line:
            self.turn(line)

    def turn(self, text: str) -> None:
        """Ask one question and show its answer. If that fails, the question is taken back, with a warning."""
        self._messages.append({"role": "user", "content": text})
        try:
            answer = show_answer(self._ask(self._messages), self._invocation)
        except PenstockError as error:
            self._messages.pop()
            self._invocation.say("")
            self._invocation.warn(f"{printable(error.message)} {printable(remedy_of(error))}")
            return
        self._messages.append({"role": "assistant", "content": answer})


def show_answer(stream: AnswerStream, invocation: Invocation) -> str:
    """Print an answer as it comes, and return its text. Ctrl-C ends the stream and keeps the text so far."""
    pieces: list[str] = []
    was_thought = False
    with contextlib.closing(stream):
        try:
            while True:
                piece = next(stream)
                if isinstance(piece, Thought):
                    shown = invocation.style.paint(printable(piece.text), "dim")
                else:
                    pieces.append(piece)
                    shown = "\n\n" * was_thought + printable(piece)
                was_thought = isinstance(piece, Thought)
                invocation.stdout.write(shown)
                invocation.stdout.flush()
        except StopIteration as stopped:
            end: AnswerEnd = stopped.value
            note = "" if end.finish_reason != "length" else " [stopped at the token limit]"
        except KeyboardInterrupt:
            note = " [stopped]"
    invocation.say(invocation.style.paint(note, "dim"))
    return "".join(pieces)
