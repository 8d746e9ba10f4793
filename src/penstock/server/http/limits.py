"""The limits on what a client may send, for the model that is served, and the reading of bodies.

Endpoints call `read_json`. A body is refused with 413 by its declared length before a byte of it is read, and
by its true length while it is read. JSON is taken strictly:

- UTF-8 without a byte order mark, and one value alone
- no NaN and no lone surrogates
- at most `max_json_depth` levels
- no key twice in one object, since a proxy in front of the server may have checked the other value

`config.limits.Limits` says what each bound means. `http_protocol` applies the bounds of request lines,
headers, connections and time.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from penstock.config.limits import Limits
from penstock.errors import AbortedError, InvalidRequestError, TooLargeError
from penstock.server.http.text_workers import TextWorkers

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_MAX_SHOWN_KEY = 64
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLimits:
    """The bounds in bytes. Those that are not set follow from the length of the model's context."""

    max_body: int
    max_prompt: int  # if it is not set, 16 bytes for each token of the context

    @classmethod
    def resolve(cls, limits: Limits, max_model_len: int) -> ByteLimits:
        return cls(
            max_body=limits.max_body_bytes or (2 << 20) + 8 * max_model_len,
            max_prompt=limits.max_prompt_bytes or 16 * max_model_len,
        )


async def read_json(request: Request, max_bytes: int, max_depth: int, workers: TextWorkers) -> dict[str, Any]:
    """Return the request's body as a JSON object.

    Args:
        workers: parse a long body beside the event loop.

    Raises:
        TooLargeError: the body is longer than `max_bytes`.
        InvalidRequestError: the body is compressed, is not strict JSON or not an object, or nests too deep.
        OverloadedError: too many long texts wait for the workers.
        AbortedError: the client left before it had sent the whole body.
    """
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise InvalidRequestError(
            f"content-encoding is {encoding[:64]!r}, which is not supported.",
            remedy="Send the body without content-encoding.",
            code="unsupported_content_encoding",
        )
    body = await _read_body(request, max_bytes)
    value = await workers.run(len(body), parse_json, body, max_depth)
    if not isinstance(value, dict):
        raise _bad_json(f"the body must be a JSON object, got {_json_name(value)}")
    return value


def declared_length(request: Request) -> int:
    """Return the length that a request declares for its body; 0 if it declares none."""
    digits = request.headers.get("content-length", "").lstrip("0")  # Python reads 4,300 digits at most
    return int(digits) if digits.isdecimal() else 0


async def _read_body(request: Request, limit: int) -> bytes:
    declared = declared_length(request)
    if declared > limit:
        raise _too_large(declared, limit)
    chunks: list[bytes] = []
    total = 0
    try:
        async for chunk in request.stream():
            total += len(chunk)
            if total > limit:
                raise _too_large(total, limit)
            chunks.append(chunk)
    except ClientDisconnect:
        raise AbortedError("The client closed the connection before its request was complete.") from None
    return b"".join(chunks)


def parse_json(body: bytes, max_depth: int) -> Any:
    """Return the value of a JSON text. Raises `InvalidRequestError`; the module's docstring says for what."""
    if not body:
        raise _bad_json("it is empty")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _bad_json(str(error)) from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    outside_strings = _STRING.sub(b"", body)
    if not _within_depth(outside_strings, max_depth):
        raise _too_deep(max_depth)
    if not _has_keys(value, outside_strings.count(b":")):
        raise _bad_json(f"the key {_doubled_key(body)!r} appears twice in one object")
    return value


def _has_keys(value: Any, written: int) -> bool:
    """Return whether all objects in a decoded value have as many keys together as its text.

    The text has more where an object has a key twice. The search ends at the last key, since most bodies are
    a flat object with long lists in it.

    Args:
        written: number of keys in the text.
    """
    containers = [value]
    while written and containers:
        container = containers.pop()
        if isinstance(container, dict):
            written -= len(container)
            container = container.values()
        elif not isinstance(container, list):
            continue
        containers += [inner for inner in container if isinstance(inner, dict | list)]
    return written == 0


def _doubled_key(body: bytes) -> str:
    """Return the first key, cut to a readable length, that an object in this JSON has twice."""
    doubled: list[str] = []

    def look(pairs: list[tuple[str, object]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                doubled.append(key)
            seen.add(key)

    json.loads(body, object_pairs_hook=look, parse_int=str, parse_float=str)
    return doubled[0][:_MAX_SHOWN_KEY]


def _within_depth(outside_strings: bytes, max_depth: int) -> bool:
    """Return whether valid JSON, without its strings, nests no deeper than `max_depth`.

    Each level costs linear work, all of it in C: it removes the innermost brackets.
    """
    skeleton = outside_strings.translate(None, _NOT_BRACKETS)
    for _ in range(max_depth):
        if not skeleton:
            return True
        skeleton = skeleton.replace(b"[]", b"0").replace(b"{}", b"0").replace(b"0", b"")
    return not skeleton


def _json_name(value: object) -> str:
    names = {type(None): "null", bool: "a boolean", str: "a string", list: "an array"}
    return names.get(type(value), "a number")


def _bad_json(detail: str) -> InvalidRequestError:
    return InvalidRequestError(f"The request body is not valid: {detail}.", code="invalid_json")


def _too_deep(limit: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"The request body nests deeper than {limit} levels.",
        remedy="Send flatter JSON, or start the server with a larger --max-json-depth.",
        code="json_too_deep",
    )


def _too_large(size: int, limit: int) -> TooLargeError:
    return TooLargeError(
        f"The request body has at least {size} bytes; the limit is {limit} bytes.",
        remedy="Send a shorter prompt or fewer prompts in one request, or raise --max-body-bytes.",
    )
