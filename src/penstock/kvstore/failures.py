"""What goes wrong in a library below a store, as a `StoreError`.

Used by the stores. Of the library's text only the first line is kept: what follows is for its own makers,
and may hold what nobody should read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from penstock.errors import StoreError

_MAX_CAUSE = 300  # characters


@contextmanager
def reported(place: str, remedy: str, kinds: tuple[type[Exception], ...]) -> Iterator[None]:
    """Errors of these kinds leave as `StoreError`.

    Args:
        place: which store, without passwords.
        remedy: what the operator can do, as a sentence.
    """
    try:
        yield
    except kinds as error:
        raise StoreError(f"KV store {place}: {cause_of(error)}.", remedy=remedy) from error


def place_of(url: str) -> str:
    """What a store at this address is called in errors: without user and password."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:  # no number; the library below says so
        port = None
    end = "" if port is None else f":{port}"
    return f"{parts.scheme}://{parts.hostname or ''}{end}{parts.path}"


def cause_of(error: Exception) -> str:
    """Kind and first line, without a full stop."""
    first_line, *_ = str(error).splitlines() or [""]
    text = first_line.strip().rstrip(".")[:_MAX_CAUSE]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
