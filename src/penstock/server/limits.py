"""Limits of what a client may send (each with the status it is answered with), and the reading of bodies.

Endpoints call `read_json`. A body is refused with 413 by its declared length before a byte of it is read, and
by its true length while it is read. JSON is taken strictly: UTF-8 without a byte order mark, one value, no
NaN, no lone surrogates, at most `max_json_depth` levels. Of a key given twice the last value counts.
Limits on request lines, headers, connections and time are `http_protocol`'s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from penstock.errors import AbortedError, InvalidRequestError, TooLargeError
from penstock.server.text_workers import TextWorkers

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a request. `max_prompt_bytes` lets through whatever could fit at 16 bytes a token."""

    max_body_bytes: int
    max_prompt_bytes: int
    max_json_depth: int = 64
    max_messages: int = 4096
    max_prompts: int = 256

    @classmethod
    def for_context(cls, max_model_len: int) -> Limits:
        return cls(max_body_bytes=(2 << 20) + 8 * max_model_len, max_prompt_bytes=16 * max_model_len)


async def read_json(request: Request, limits: Limits, workers: TextWorkers) -> dict[str, Any]:
    """The request's body as a JSON object.

    Raises:
        TooLargeError: longer than `max_body_bytes`.
        InvalidRequestError: not JSON, not an object, or too deep.
        AbortedError: the client left before it had sent all.
    """
    body = await _read_body(request, limits.max_body_bytes)
    value = await workers.run(len(body), parse_json, body, limits.max_json_depth)
    if not isinstance(value, dict):
        raise _bad_json(f"the body must be a JSON object, got {_json_name(value)}")
    return value


async def _read_body(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(int(declared), limit)
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
    """Decode strictly; see the module's text for what is refused."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _bad_json(str(error)) from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    if not _within_depth(body, max_depth):
        raise _too_deep(max_depth)
    return value


def _within_depth(body: bytes, max_depth: int) -> bool:
    """Peel the innermost brackets of valid JSON once per level; linear work per level, all of it in C."""
    skeleton = _STRING.sub(b"", body).translate(None, _NOT_BRACKETS)
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
    return InvalidRequestError(f"The request body nests deeper than {limit} levels.", code="json_too_deep")


def _too_large(size: int, limit: int) -> TooLargeError:
    return TooLargeError(
        f"The request body has at least {size} bytes; the limit is {limit} bytes.",
        remedy="Send a shorter prompt or fewer prompts in one request.",
    )
