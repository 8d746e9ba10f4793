"""Asks for a join token on the terminal, where no file holds it: unseen, and again after a slip."""

from __future__ import annotations

import getpass
from collections.abc import Callable
from pathlib import Path

from penstock.errors import JoinTokenError, UsageError
from penstock.trust.join_token import JoinToken, worker_token

_MAX_TRIES = 3


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
            prompt = f"{error.message}\nJoin token, once more: "
    return JoinToken.parse(_asked(ask, prompt))


def given_token(path: Path | None) -> JoinToken:
    """Return the token that a user has given: the content of a file, or typed where no file is named.

    Raises:
        UsageError: the file is missing, or others may read it.
        JoinTokenError: it does not hold a token, or none was typed.
    """
    if path is None:
        return ask_token()
    try:
        return worker_token(path)
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no file {str(path)!r}.",
            remedy="Copy the token file of the head to this host, or leave --join-token-file out.",
            param="join_token_file",
        ) from error


def _asked(ask: Callable[[str], str], prompt: str) -> str:
    try:
        return ask(prompt)
    except EOFError:  # no terminal, and nothing on the standard input
        raise JoinTokenError(
            "no join token was given.",
            remedy="Give a file that holds it with --join-token-file.",
            code="no_token",
        ) from None
