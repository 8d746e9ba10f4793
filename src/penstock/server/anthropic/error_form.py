"""The errors of `/v1/messages` and of the paths below it, in the form of Anthropic's API.

The answer is `{"type": "error", "error": {"type", "message"}, "request_id"}`, with the status that the error
has on every route. Used by `app`, and by `answers.message_output` for streams that have begun.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.server.http.errors import ErrorObject

_TYPE_BY_STATUS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class MessagesError(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    message: str


class MessagesErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "error"
    error: MessagesError
    request_id: str


class MessagesErrors:
    """The form of Anthropic's API."""

    id_header = b"request-id"

    def encode(self, error: ErrorObject, status: int, request_id: str) -> bytes:
        """Return the body of the answer; the type of the error follows from the status."""
        kind = _TYPE_BY_STATUS.get(status, "invalid_request_error" if status < 499 else "api_error")
        shown = MessagesError(type=kind, message=error.message)
        return msgspec.json.encode(MessagesErrorBody(error=shown, request_id=request_id))
