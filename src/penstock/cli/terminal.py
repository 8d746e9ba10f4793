"""The surroundings of one run of the command line: streams, environment, colours and error output.

`cli.program` makes the one `Invocation` of a run and gives it to the command; tests make their own with
string streams. `cli.program` and `cli.sources` parse flags, and `cli.help` makes help screens.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TextIO

from penstock.config.setting import flag_named_for
from penstock.errors import (
    ModelError,
    NotEnoughMemoryError,
    PeerError,
    PenstockError,
    RequestError,
    UsageError,
)
from penstock.process.output_thread import OutputThread

_CODES = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}


@dataclass(frozen=True, slots=True)
class Style:
    """The colours for one stream. There are none if it is not a terminal, or `NO_COLOR` is set."""

    enabled: bool

    @classmethod
    def for_stream(cls, stream: TextIO, environ: Mapping[str, str]) -> Style:
        plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
        return cls(enabled=stream.isatty() and not plain)

    def paint(self, text: str, colour: str) -> str:
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self.enabled and text else text


@dataclass(slots=True, kw_only=True)
class Invocation:
    """One run of `penstock`: its streams, its environment, and the source of each setting.

    Attributes:
        environ: a copy of the environment at the start, with its secrets.
        origins: setting name -> "flag", "environment NAME", "file PATH" or "default"; filled while parsing.
        verbose: whether to show stack traces, as `-v` asks.
    """

    stdout: TextIO
    stderr: TextIO
    stdin: TextIO
    environ: dict[str, str]
    verbose: bool = False
    origins: dict[str, str] = field(default_factory=dict)

    def beside(self, output: OutputThread) -> Invocation:
        """Return the same run, with output and errors that are written by this thread."""
        return replace(self, stdout=output.stdout, stderr=output.stderr)

    @classmethod
    def of_process(cls) -> Invocation:
        """Return the streams and the environment of this process.

        A stream that is closed leads nowhere, here and in child processes, and its descriptor is taken again,
        so that no other file gets it. Characters that the locale of the output lacks are written as escapes.
        """
        stdin, stdout = _opened("stdin"), _opened("stdout")
        if isinstance(stdout, io.TextIOWrapper):
            stdout.reconfigure(errors="backslashreplace")
        return cls(stdin=stdin, stdout=stdout, stderr=_opened("stderr"), environ=dict(os.environ))

    @property
    def style(self) -> Style:
        return Style.for_stream(self.stdout, self.environ)

    def say(self, *lines: str) -> None:
        for line in lines:
            self.stdout.write(line + "\n")
        self.stdout.flush()

    def warn(self, text: str) -> None:
        style = Style.for_stream(self.stderr, self.environ)
        self.stderr.write(f"{style.paint('warning:', 'yellow')} {text}\n")
        self.stderr.flush()


def _opened(name: Literal["stdin", "stdout", "stderr"]) -> TextIO:
    """Return a stream of the process; Python has None where its descriptor is closed."""
    stream: TextIO | None = getattr(sys, name)
    if stream is None:
        stream = open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8")  # noqa: SIM115
        os.set_inheritable(stream.fileno(), True)
        setattr(sys, name, stream)
    return stream


def printable(text: str) -> str:
    """Return text with visible control characters, so that text from outside cannot control a terminal."""
    return "".join(char if char in "\n\t" or char.isprintable() else _visible(char) for char in text)


def _visible(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def one_line(text: str) -> str:
    """Return `printable` text on a single line."""
    return printable(text).replace("\n", "\\n").replace("\t", " ")


_REMEDIES: Sequence[tuple[type[PenstockError], str]] = (
    (UsageError, "`penstock COMMAND --help all` lists the flags and their defaults."),
    (ModelError, "`penstock doctor DIRECTORY` checks a model directory."),
    (NotEnoughMemoryError, "Use more stages, fewer --num-blocks or a shorter --max-model-len."),
    (PeerError, "`penstock doctor` checks ports, shared memory and limits."),
)


def remedy_of(error: PenstockError) -> str:
    """Return the remedy of the error: its own, or the usual one for its kind."""
    if error.remedy:
        return error.remedy
    for kind, remedy in _REMEDIES:
        if isinstance(error, kind):
            return remedy
    return "Run the same command with -v for the stack trace."


def exit_code_of(error: PenstockError) -> int:
    """Return the error's exit code; a server's refusal for its own reasons counts as a peer's error."""
    is_refusal = isinstance(error, RequestError) and error.exit_code == PenstockError.exit_code
    return PeerError.exit_code if is_refusal else error.exit_code


def _in_flag_words(error: PenstockError) -> str:
    """Return the error's message; a field of a config at its beginning becomes the flag that sets it."""
    field_name = error.param or ""
    is_field = field_name and not field_name.startswith("-")
    if not isinstance(error, UsageError) or not is_field or not error.message.startswith(field_name + " "):
        return error.message
    # Here and not above: `--help` reads no configs.
    from penstock.config.declared import flags_of_fields

    flag = flags_of_fields().get(field_name) or flag_named_for(field_name)
    return flag + error.message[len(field_name) :]


def report_error(error: BaseException, invocation: Invocation) -> int:
    """Print what happened, why and what to do, and return the exit code of the program.

    The message of a `PenstockError` says what happened and why. Any other exception is a bug of ours, with
    exit code 70. The stack trace is printed only with `-v`.
    """
    style = Style.for_stream(invocation.stderr, invocation.environ)
    if invocation.verbose:
        traceback.print_exception(error, file=invocation.stderr)
    if isinstance(error, PenstockError):
        code, message, remedy = exit_code_of(error), _in_flag_words(error), remedy_of(error)
    else:
        code = PenstockError.exit_code
        message = f"This is a bug in Penstock: {type(error).__name__}: {error}"
        remedy = "Run the same command with -v for the stack trace, and report it."
    invocation.stderr.write(f"{style.paint('error:', 'red')} {printable(message)}\n  {printable(remedy)}\n")
    invocation.stderr.flush()
    return code
