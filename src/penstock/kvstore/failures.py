"""The errors of a library below a store, raised as a `StoreError`.

Used by the stores. Of the library's text only the first line is kept: what follows is for the library's
makers, and may hold secrets. An object store's own code for the error, such as NoSuchBucket, stands below
that line. It is put in front, since only the code shows what is wrong with an address or credentials.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from penstock.errors import StoreError

_MAX_CAUSE = 300  # characters
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")  # in the answers of S3, Google and Azure


@contextmanager
def reported(address: str, remedy: str, kinds: tuple[type[Exception], ...]) -> Iterator[None]:
    """Raise errors of these kinds as `StoreError`.

    Args:
        address: address of the store, without passwords.
        remedy: what the operator can do, as a sentence.
        kinds: the types of errors that are raised so; others pass as they are.
    """
    try:
        yield
    except kinds as error:
        raise StoreError(f"KV store {address}: {cause_of(error)}.", remedy=remedy) from error


def place_of(url: str) -> str:
    """Return the name of the store at this address in errors: without user and password."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:  # the port is not a number; the library below will say so
        port = None
    end = "" if port is None else f":{port}"
    return f"{parts.scheme}://{parts.hostname or ''}{end}{parts.path}"


def cause_of(error: Exception) -> str:
    """Return the kind, the object store's code if there is one, and the first line without a full stop."""
    lines = str(error).splitlines() or [""]
    kind = ", ".join(filter(None, (type(error).__name__, code_of(error))))
    text = lines[0].strip().rstrip(".")[:_MAX_CAUSE]
    return f"{kind}: {text}" if text else kind


def code_of(error: Exception) -> str:
    """Return the code that an object store gives for an error, or "" where there is none."""
    match = _CODE.search(str(error))
    return match[1] if match else ""
