"""The HTTP of commands that talk to a running server: a JSON call, and a stream of events.

Used by `cli.chat`, `cli.trace`, `cli.bench.online` and `cli.bench.observed_server`. Calls block; each opens a
connection of the standard library's HTTP client. `cli.bench.http_stream` is the client for many streams at
once.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.cli.bench.http_stream import EventParser, Target
from penstock.cli.client_tls import connection_error
from penstock.errors import (
    AuthenticationError,
    LinkClosedError,
    NotFoundError,
    OverloadedError,
    PeerError,
    PenstockError,
    ProtocolError,
    TooLargeError,
    UnavailableError,
    UsageError,
    WaitTimeoutError,
)

_MAX_ERROR_BYTES = 65536
_HEALTH_PAUSE_S = 0.2
_HEALTH_TIMEOUT_S = 10.0
_REMEDIES: Mapping[int, str] = {
    401: "Give the key in PENSTOCK_API_KEY.",
    429: "The server is full; try again in a moment.",
    503: "The server is starting, draining or has lost a stage; look at its /health.",
}


_KINDS: Mapping[int, type[PenstockError]] = {
    400: UsageError,
    401: AuthenticationError,
    404: NotFoundError,
    413: TooLargeError,
    429: OverloadedError,
    503: UnavailableError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModelCard:
    """One entry of /v1/models. Sizes are None if the server does not report them."""

    id: str
    max_model_len: int | None
    vocab_size: int | None


def served_model(target: Target, name: str | None, timeout_s: float = 30.0) -> ServedModelCard:
    """Return the card of the named model, or of the first that the server lists.

    Args:
        name: name of a model; None: the first that the server lists.

    Raises:
        NotFoundError: the server does not serve such a model; the error names those that it serves.
        PeerError: the server does not answer, or not as it should.
        PenstockError: the server refuses the request.
    """
    listing = get_json(target, "/v1/models", timeout_s)
    cards = [entry for entry in listing.get("data") or [] if isinstance(entry, dict) and entry.get("id")]
    for entry in cards:
        if name in (None, entry["id"]):
            return ServedModelCard(
                id=str(entry["id"]),
                max_model_len=_count(entry.get("max_model_len")),
                vocab_size=_count(entry.get("vocab_size")),
            )
    known = ", ".join(str(entry["id"]) for entry in cards) or "none"
    raise NotFoundError(
        f"{target.url} does not serve {name or 'any model'}.",
        remedy=f"The server has: {known}.",
        param="model",
    )


def wait_ready(
    target: Target, timeout_s: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    """Wait until /health no longer answers 503. A server without /health counts as ready.

    Raises:
        WaitTimeoutError: the server was not ready in time; the error has the server's reason.
        LinkClosedError: no server listens at the address; this is raised at once.
    """
    deadline = clock() + timeout_s
    while True:
        status, body = _health(target)
        if status != 503:
            return
        if clock() >= deadline:
            raise WaitTimeoutError(
                f"{target.url} is not ready after {timeout_s:g} s: {body}.",
                remedy="Look at the server's log.",
            )
        sleep(_HEALTH_PAUSE_S)


def _health(target: Target) -> tuple[int, str]:
    connection = _connect(target, _HEALTH_TIMEOUT_S)
    try:
        answer = _ask(connection, target, "GET", "/health", None)
        with _reading(target, _HEALTH_TIMEOUT_S):
            return answer.status, answer.read(1000).decode("utf-8", "replace").strip()
    finally:
        connection.close()


def first_key(keys: str) -> str:
    """Return the first key of a setting: it may be the server's, which lists several keys with commas."""
    return keys.split(",")[0].strip()


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def get_json(target: Target, path: str, timeout_s: float) -> dict[str, Any]:
    """Return the JSON object at `path`. Raises a `PenstockError` if the server does not answer with one."""
    connection = _connect(target, timeout_s)
    try:
        answer = _exchange(connection, target, "GET", path, None)
        with _reading(target, timeout_s):
            content = answer.read()
    finally:
        connection.close()
    try:
        body = json.loads(content)
    except ValueError as error:
        raise ProtocolError(
            f"{target.url}{path} is not JSON.", remedy="Check that the address is that of a Penstock server."
        ) from error
    if not isinstance(body, dict):
        raise ProtocolError(
            f"{target.url}{path} is not a JSON object.",
            remedy="Check that the address is that of a Penstock server.",
        )
    return body


def stream_json(
    target: Target, path: str, body: Mapping[str, Any], timeout_s: float
) -> Iterator[dict[str, Any]]:
    """Yield the events of a streaming POST, each a JSON object, up to `[DONE]`.

    Closing the iterator closes the connection, which ends the request in the server.

    Raises:
        PenstockError: the error that the server answered, in place of the stream or within it.
        LinkClosedError: the stream ended before `[DONE]`.
        WaitTimeoutError: nothing came for `timeout_s` seconds.
    """
    connection = _connect(target, timeout_s)
    try:
        answer = _exchange(connection, target, "POST", path, json.dumps(body).encode())
        yield from _events(answer, target, timeout_s)
    finally:
        connection.close()


@contextmanager
def _reading(target: Target, timeout_s: float | None) -> Iterator[None]:
    """Say in words of ours what goes wrong while an answer is read."""
    try:
        yield
    except TimeoutError as error:
        raise WaitTimeoutError(f"{target.url} sent nothing for {timeout_s:g} s.") from error
    except (OSError, http.client.HTTPException) as error:
        raise LinkClosedError(f"{target.url} closed the connection: {error or 'no reason'}.") from error


def _piece(answer: http.client.HTTPResponse, target: Target, timeout_s: float) -> bytes:
    with _reading(target, timeout_s):
        return answer.read1(65536)


def _events(answer: http.client.HTTPResponse, target: Target, timeout_s: float) -> Iterator[dict[str, Any]]:
    parser = EventParser()
    while piece := _piece(answer, target, timeout_s):
        for data in parser.feed(piece):
            if data == b"[DONE]":
                return
            event = _event(data, target)
            if "error" in event:
                raise _as_error(event["error"], 500)
            yield event
    raise LinkClosedError(f"{target.url} ended the stream before [DONE].", remedy="Look at the server's log.")


def _event(data: bytes, target: Target) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise ProtocolError(
            f"{target.url} sent an event that is not a JSON object.",
            remedy="Check that the address is that of a Penstock server.",
        )
    return event


def _connect(target: Target, timeout_s: float) -> http.client.HTTPConnection:
    if target.context is None:
        return http.client.HTTPConnection(target.host, target.port, timeout=timeout_s)
    return http.client.HTTPSConnection(target.host, target.port, timeout=timeout_s, context=target.context)


def _exchange(
    connection: http.client.HTTPConnection, target: Target, method: str, path: str, body: bytes | None
) -> http.client.HTTPResponse:
    """Send a request, and return the answer before its body is read. Raises an error unless it is 200."""
    answer = _ask(connection, target, method, path, body)
    if answer.status != 200:
        with _reading(target, connection.timeout):
            content = answer.read(_MAX_ERROR_BYTES)
        raise _refusal(answer.status, content)
    return answer


def _ask(
    connection: http.client.HTTPConnection, target: Target, method: str, path: str, body: bytes | None
) -> http.client.HTTPResponse:
    try:
        connection.request(method, target.prefix + path, body=body, headers=target.headers)
        return connection.getresponse()
    except TimeoutError as error:
        raise WaitTimeoutError(f"{target.url} did not answer within {connection.timeout:g} s.") from error
    except (OSError, http.client.HTTPException) as error:
        raise connection_error(target.url, error) from error


def _refusal(status: int, body: bytes) -> PenstockError:
    try:
        return _as_error(json.loads(body)["error"], status)
    except (ValueError, KeyError, TypeError):
        return ProtocolError(
            f"the server answered HTTP {status} without an error object.",
            remedy="Check that the address is that of a Penstock server.",
        )


def _as_error(error: Any, status: int) -> PenstockError:
    details = error if isinstance(error, dict) else {"message": str(error)}
    kind = _KINDS.get(status, PeerError)
    remedy = _REMEDIES.get(status, "")
    return kind(
        str(details.get("message")), remedy=remedy, param=details.get("param"), code=details.get("code")
    )
