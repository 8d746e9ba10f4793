"""The errors as OpenAI error objects, `{"error": {"message", "type", "param", "code"}}`.

All routes write errors in this form, except those of Anthropic's API (`anthropic.error_form`).

`app` makes one `ErrorAnswers`, which Starlette's handlers and the gate use. A stream that has begun writes
its error as an event, with `error_bytes` or `error_object`. A bug becomes a 500 that carries the request's id
and no trace.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import AuthenticationError, PenstockError
from penstock.server.http.request_record import record_of

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


class PasswordMissingError(AuthenticationError):
    """The key is missing or wrong where it may come as a password: a browser then asks its user for it."""


def error_object(error: BaseException, request_id: str = "") -> ErrorObject:
    """Return the wire form of any exception.

    An exception that is not a `PenstockError` is not shown. Its client gets the request's id, under which the
    log has the exception.
    """
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


def json_response(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status_code=status, headers=headers, media_type="application/json")


class ErrorForm(Protocol):
    """The form in which one API writes errors.

    Attributes:
        id_header: name of a header that carries the request's id besides `x-request-id`; empty: none does.
    """

    @property
    def id_header(self) -> bytes: ...

    def encode(self, error: ErrorObject, status: int, request_id: str) -> bytes:
        """Return the body of the answer that reports this error."""


class OpenAIErrors:
    """The form of the OpenAI API, and of all paths that belong to no other API."""

    id_header = b""

    def encode(self, error: ErrorObject, status: int, request_id: str) -> bytes:
        return msgspec.json.encode(ErrorBody(error=error))


class ErrorAnswers:
    """Answers requests that fail, each in the form of the API that its path belongs to; one for the server.

    Args:
        forms: by path, the form of errors for that path and all paths below it.
    """

    def __init__(self, forms: Mapping[str, ErrorForm]) -> None:
        self._forms = forms
        self._default = OpenAIErrors()

    def form_of(self, path: str) -> ErrorForm:
        """Return the form of the API that has `path`."""
        for beginning, form in self._forms.items():
            if path == beginning or path.startswith(beginning + "/"):
                return form
        return self._default

    def response(self, path: str, error: BaseException, request_id: str) -> Response:
        """Return the answer to a request for `path` that has failed."""
        status = status_of(error)
        headers = error_headers(status)
        if isinstance(error, PasswordMissingError):
            headers["www-authenticate"] = 'Basic realm="Penstock", charset="UTF-8"'
        return self._response(path, status, error_object(error, request_id), request_id, headers)

    @property
    def handlers(self) -> dict[Any, Callable[[Request, Exception], Awaitable[Response]]]:
        """Return the handlers by kind of exception, for the framework."""
        return {
            PenstockError: self._answer_penstock_error,
            HTTPException: self._answer_http_exception,
            Exception: self._answer_bug,
        }

    async def _answer_penstock_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, PenstockError)
        return self._failed(request, error, error.code or type(error).__name__)

    async def _answer_bug(self, request: Request, error: Exception) -> Response:
        """Answer with the request's id, by which an operator finds the trace that the gate logs."""
        return self._failed(request, error, "bug")

    def _failed(self, request: Request, error: Exception, code: str) -> Response:
        record = record_of(request.scope)
        record.error_code = code
        return self.response(request.url.path, error, record.request_id)

    async def _answer_http_exception(self, request: Request, error: Exception) -> Response:
        """Answer with a status that the router raises, such as 404 or 405."""
        assert isinstance(error, HTTPException)
        status, path = error.status_code, request.url.path
        shown = ErrorObject(
            message=f"{HTTPStatus(status).phrase}: {request.method} {printable(path)}",
            type=_TYPE_BY_STATUS.get(status, "invalid_request_error"),
            code=_CODE_BY_STATUS.get(status),
        )
        return self._response(path, status, shown, record_of(request.scope).request_id, error.headers)

    def _response(
        self,
        path: str,
        status: int,
        error: ErrorObject,
        request_id: str,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        body = self.form_of(path).encode(error, status, request_id)
        return json_response(
            body, status=status, headers=error_headers(status) if headers is None else headers
        )
