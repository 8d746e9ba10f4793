"""Reads a worker's join token from a file, or asks for it on the terminal.

The terminal does not show what is typed, and a mistyped token is asked for again. A worker asks in a thread,
while its main thread waits for signals. `typed_line` can therefore be cancelled, so that the worker can end.
Used by `penstock worker` and `penstock doctor`.
"""

from __future__ import annotations

import contextlib
import getpass
import math
import os
import socket
import sys
import termios
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from penstock.errors import JoinTokenError, UsageError
from penstock.process.readiness import await_readable
from penstock.trust.cancellation import Cancellation, CancelledError
from penstock.trust.join_token import JoinToken, worker_token

JOIN_TOKEN = "PENSTOCK_JOIN_TOKEN"  # the variable of the environment that may hold the token of a worker
NO_TOKEN = "no_token"  # code of the error if no token was given
LOOK_S = 0.2  # between two looks for a file
_MAX_TRIES = 3
_TERMINAL = "/dev/tty"


class Tokens(Protocol):
    """A source of the join token of a worker."""

    def at_hand(self) -> JoinToken | None:
        """Return the token that can be read without asking a user; None if there is none."""
        ...

    def ask(self, cancellation: Cancellation) -> JoinToken:
        """Return the token, which a user is asked for if need be.

        Raises what `given_token` does, or `CancelledError`.
        """
        ...


class GivenTokens:
    """The token that is in a file, or that a user types. Implements `Tokens`.

    Args:
        path: path of the file; None: the user is asked.
        settle: returns when all earlier lines of output stand on the terminal, above the question.
    """

    def __init__(self, path: Path | None, settle: Callable[[], object] = lambda: None) -> None:
        self._path = path
        self._settle = settle

    def at_hand(self) -> JoinToken | None:
        if self._path is None:
            return None
        with contextlib.suppress(UsageError, JoinTokenError):
            return given_token(self._path)
        return None

    def ask(self, cancellation: Cancellation) -> JoinToken:
        def typed(prompt: str) -> str:
            self._settle()
            return typed_line(prompt, cancellation)

        return given_token(self._path, typed)


class EnvironmentToken:
    """The token in the environment of a process. Implements `Tokens`.

    Args:
        text: the text of the token.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def at_hand(self) -> JoinToken | None:
        with contextlib.suppress(JoinTokenError):
            return JoinToken.parse(self._text)
        return None

    def ask(self, cancellation: Cancellation) -> JoinToken:
        return JoinToken.parse(self._text)


def environment_token(path: Path | None, environment: Mapping[str, str]) -> EnvironmentToken | None:
    """Return the token in the environment; None if there is none, or if a file is to be read instead.

    Args:
        path: path of the file that the user has named; None: the user has named none.
        environment: variables of the environment.
    """
    text = environment.get(JOIN_TOKEN) if path is None else None
    return EnvironmentToken(text) if text else None


class AwaitedTokens:
    """The token in a file that the head may not have written yet. Implements `Tokens`.

    It is for hosts that are all started at once.

    Args:
        path: path of the file, where all hosts see it.
        wait_s: longest wait for the file.
    """

    def __init__(self, path: Path, wait_s: float) -> None:
        self._path = path
        self._wait_s = wait_s

    def at_hand(self) -> JoinToken | None:
        return GivenTokens(self._path).at_hand()

    def ask(self, cancellation: Cancellation) -> JoinToken:
        for _ in range(math.ceil(self._wait_s / LOOK_S)):
            with contextlib.suppress(FileNotFoundError):
                return worker_token(self._path)
            cancellation.pause(LOOK_S)
        return given_token(self._path)


def ask_token(ask: Callable[[str], str] = getpass.getpass) -> JoinToken:
    """Return the token that is typed or pasted.

    Args:
        ask: shows a prompt and returns what is typed, without showing it.

    Raises:
        JoinTokenError: it is mistyped for the third time, or nothing is typed.
    """
    prompt = "Join token: "
    for _ in range(_MAX_TRIES - 1):
        try:
            return JoinToken.parse(_asked(ask, prompt))
        except JoinTokenError as error:
            prompt = f"{error.message}\nJoin token, again: "
    return JoinToken.parse(_asked(ask, prompt))


def given_token(path: Path | None, ask: Callable[[str], str] = getpass.getpass) -> JoinToken:
    """Return the token that a user has given: the content of a file, or typed where no file is named.

    Args:
        path: path of the file; None: the token is typed.
        ask: as in `ask_token`.

    Raises:
        UsageError: the file is missing, or other users may read it.
        JoinTokenError: the file does not hold a token, or none was typed.
    """
    if path is None:
        return ask_token(ask)
    try:
        return worker_token(path)
    except FileNotFoundError as error:
        raise UsageError(
            f"the file {str(path)!r} does not exist.",
            remedy="Copy the token file of the head to this host, or leave --join-token-file out.",
            param="join_token_file",
        ) from error


def typed_line(prompt: str, cancellation: Cancellation) -> str:
    """Return the line that a user types unseen at the terminal; without one, a line of standard input.

    Raises:
        EOFError: there is nothing to read.
        CancelledError: the call was cancelled. The terminal is then as before.
    """
    own, other = socket.socketpair()
    with own, other, _input() as (reading, writing):
        cancellation.add(own)
        with _unseen(reading, writing):
            os.write(writing, prompt.encode())
            line = b""
            while not line.endswith(b"\n"):
                if own.fileno() in await_readable([reading, own.fileno()]):
                    raise CancelledError
                typed = os.read(reading, 1)  # one byte, so that nothing of the next line is taken
                if not typed and not line:
                    raise EOFError
                line += typed or b"\n"
    return line.decode("utf-8", "replace").removesuffix("\n")


@contextlib.contextmanager
def _input() -> Iterator[tuple[int, int]]:
    """Yield the descriptor from which the line is read, and the one to which the prompt is written."""
    try:
        terminal = os.open(_TERMINAL, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # a service has none
        try:
            yield sys.stdin.fileno(), sys.stderr.fileno()
        except (OSError, ValueError, AttributeError) as error:  # they are closed
            raise EOFError from error
        return
    try:
        yield terminal, terminal
    finally:
        os.close(terminal)


@contextlib.contextmanager
def _unseen(reading: int, writing: int) -> Iterator[None]:
    """Let the terminal not show what is typed in the `with` block; do nothing if it is not a terminal."""
    if not os.isatty(reading):
        yield
        return
    before = termios.tcgetattr(reading)
    silent = termios.tcgetattr(reading)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(reading, termios.TCSAFLUSH, silent)
    try:
        yield
    finally:
        termios.tcsetattr(reading, termios.TCSAFLUSH, before)
        os.write(writing, b"\n")  # the line end that the user typed was not shown


def _asked(ask: Callable[[str], str], prompt: str) -> str:
    try:
        return ask(prompt)
    except EOFError:  # no terminal, and nothing on the standard input
        raise JoinTokenError(
            "no join token was given.",
            remedy="Give a file that holds it with --join-token-file.",
            code=NO_TOKEN,
        ) from None
