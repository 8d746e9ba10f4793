"""Errors as OpenAI error objects: `{"error": {"message", "type", "param", "code"}}`, on every route.

`app` gives Starlette `answer_http_exception`, and handlers of its own. Those and the gate use
`error_response`; streams that have begun use `error_bytes`. A bug becomes a 500 that carries the request's id
and no trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import PenstockError

RETRY_AFTER_S = 1
_RETRYABLE = frozenset({429, 503})
_TYPE_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}
_CODE_BY_STATUS = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


class ErrorObject(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorObject


class ForbiddenError(PenstockError):
    """The request comes from a web page or host name that this server does not serve."""

    http_status = 403
    error_type = "permission_error"
    default_code = "origin_not_allowed"


def error_object(error: BaseException, request_id: str = "") -> ErrorObject:
    """Return the wire form of any exception; of a foreign one it shows the id to look up in the log alone."""
    if isinstance(error, PenstockError):
        return ErrorObject(
            message=printable(str(error)), type=error.error_type, param=error.param, code=error.code
        )
    return ErrorObject(
        message=f"Internal error; the server's log has it under request id {request_id}.",
        type="server_error",
        code="internal_error",
    )


def printable(text: str) -> str:
    """Return the text without lone surrogates, which UTF-8 cannot carry."""
    return text.encode("utf-8", "replace").decode("utf-8")


def status_of(error: BaseException) -> int:
    return error.http_status if isinstance(error, PenstockError) else 500


def error_bytes(error: BaseException, request_id: str = "") -> bytes:
    return msgspec.json.encode(ErrorBody(error=error_object(error, request_id)))


def error_headers(status: int) -> dict[str, str]:
    return {"retry-after": str(RETRY_AFTER_S)} if status in _RETRYABLE else {}


def error_response(error: BaseException, request_id: str = "") -> Response:
    status = status_of(error)
    return json_response(error_bytes(error, request_id), status=status, headers=error_headers(status))


def json_response(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status_code=status, headers=headers, media_type="application/json")


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """404, 405 and their like, which the router raises."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    body = ErrorBody(
        error=ErrorObject(
            message=f"{HTTPStatus(status).phrase}: {request.method} {printable(request.url.path)}",
            type=_TYPE_BY_STATUS.get(status, "invalid_request_error"),
            code=_CODE_BY_STATUS.get(status),
        )
    )
    return json_response(msgspec.json.encode(body), status=status, headers=error.headers)
