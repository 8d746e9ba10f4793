"""The record of one HTTP request while it runs, for its log line and for the metrics.

The gate makes one for each request, puts it into the ASGI scope, and sets the status when the answer begins.
Routes that generate fill in the numbers of tokens, the times and how the request ended.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import MutableMapping
from typing import Any

SCOPE_KEY = "penstock.record"
REQUEST_ID_HEADER = b"x-request-id"

_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")


class RequestRecord:
    """The record of one request so far. Times are seconds of the monotonic clock.

    Attributes:
        request_id: the id that answers and the log show: the client's own if it is harmless, else ours.
        unique_id: our id, which no other request has; ids of sequences begin with it.
        status: status of the answer; 0 before the answer begins.
        prompt_tokens: tokens of all prompts; 0 before sequences are started.
        queue_seconds: the longest time that one of its sequences waited to be scheduled.
        error_code: what kind of error has ended or refused it.
    """

    __slots__ = (
        "cached_tokens",
        "error_code",
        "finish_reason",
        "first_token_at",
        "last_token_at",
        "method",
        "output_tokens",
        "path",
        "prompt_tokens",
        "queue_seconds",
        "request_id",
        "started_at",
        "status",
        "unique_id",
    )

    def __init__(self, *, request_id: str, unique_id: str, method: str, path: str, started_at: float) -> None:
        self.request_id = request_id
        self.unique_id = unique_id
        self.method = method
        self.path = path
        self.started_at = started_at
        self.status = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.queue_seconds: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finish_reason: str | None = None
        self.error_code: str | None = None

    @property
    def generated(self) -> bool:
        """Whether the engine was given prompts of this request, to generate or to pool."""
        return self.prompt_tokens > 0

    def ttft_seconds(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.started_at

    def tpot_seconds(self) -> float | None:
        """Return the mean time of an output token after the first; None with fewer than two tokens."""
        if self.first_token_at is None or self.last_token_at is None or self.output_tokens < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (self.output_tokens - 1)


def open_record(scope: MutableMapping[str, Any], now: float) -> RequestRecord:
    """Make the record of a request, and put it into the ASGI scope.

    The client's own id is used if it is at most 128 letters, digits and `._:-`.
    """
    unique = secrets.token_hex(12)
    given = next((value for name, value in scope["headers"] if name == REQUEST_ID_HEADER), b"")
    record = RequestRecord(
        request_id=given.decode() if _ID.fullmatch(given) else unique,
        unique_id=unique,
        method=scope["method"],
        path=scope["path"],
        started_at=now,
    )
    scope[SCOPE_KEY] = record
    return record


def record_of(scope: MutableMapping[str, Any]) -> RequestRecord:
    record = scope[SCOPE_KEY]
    assert isinstance(record, RequestRecord)
    return record
