"""The query of a URL as a struct, and routes that take their parameters from there.

A query type is a struct with a default for each parameter that may be left out. The same type says in
`/openapi.json` what the parameters may be.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import msgspec
from msgspec import inspect
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import InvalidRequestError
from penstock.server.http.limits import declared_length
from penstock.server.openai.fields import alternatives, refused_field

Q = TypeVar("Q", bound=msgspec.Struct)
Endpoint = Callable[[Request], Awaitable[Response]]

MAX_NAME_CHARACTERS = 160  # of an unknown parameter, in an error
_EMPTY_BODY_BYTES = len("{}")  # some clients send an empty object with every POST
_ZEROS = re.compile(r"\.0+$")  # 5.0 is a whole number in JSON Schema
_SWITCH: Mapping[str, bool] = {
    **dict.fromkeys(("true", "1", "yes", "on", "t", "y"), True),
    **dict.fromkeys(("false", "0", "no", "off", "f", "n"), False),
}


def without_query(answer: Callable[[], Awaitable[Response]]) -> Endpoint:
    """Return the endpoint of a route that ignores the query and the body of its requests."""

    @wraps(answer)
    async def endpoint(_request: Request) -> Response:
        return await answer()

    return endpoint


def with_query(answer: Callable[[Q], Awaitable[Response]], query_type: type[Q]) -> Endpoint:
    """Return the endpoint of a route that reads its query strictly, and that refuses a body."""
    described = inspect.type_info(query_type)
    assert isinstance(described, inspect.StructType)
    readers = {field.encode_name: _reader(field.encode_name, field.type) for field in described.fields}

    @wraps(answer)
    async def endpoint(request: Request) -> Response:
        _refuse_body(request)
        given = request.query_params
        _refuse_unread_names(request.url.path, given, readers)
        values = {name: read(given) for name, read in readers.items() if name in given}
        return await answer(_as_struct(values, query_type))

    return endpoint


def _as_struct(values: dict[str, Any], query_type: type[Q]) -> Q:
    try:
        return msgspec.convert(values, query_type)
    except msgspec.ValidationError as error:
        refused = refused_field(str(error), query_type)
        if refused.code != "missing_required_parameter":
            refused.code = "invalid_value"
        raise refused from None


def _refuse_body(request: Request) -> None:
    """Raise `InvalidRequestError` for a body.

    A client may have put its parameters there. Without them the operation would not be what the client wants.
    """
    has_body = declared_length(request) > _EMPTY_BODY_BYTES
    if has_body or "transfer-encoding" in request.headers:
        raise InvalidRequestError(
            f"{request.url.path} takes no body.",
            remedy="Put the parameters into the query, as in /pause?mode=keep.",
            param="body",
            code="unexpected_body",
        )


def _refuse_unread_names(path: str, given: QueryParams, readers: Mapping[str, _Reader]) -> None:
    """Raise `InvalidRequestError` for an unknown name, and for a name with several values where one is read.

    A misspelt name would otherwise be ignored, and the operation would not be what the client wants.
    """
    names = [name for name, _value in given.multi_items()]
    unknown = next((name for name in names if name not in readers), None)
    if unknown is not None:
        named = unknown[:MAX_NAME_CHARACTERS]
        raise InvalidRequestError(
            f"{named!r} is not a parameter of {path}.",
            remedy=f"It takes {' and '.join(readers)}." if readers else "It takes no parameters.",
            param=named,
            code="unknown_parameter",
        )
    several = [name for name in names if names.count(name) > 1 and not readers[name].takes_several]
    if several:
        raise InvalidRequestError(
            f"{several[0]} is given {names.count(several[0])} times.",
            remedy="Give it once.",
            param=several[0],
            code="invalid_value",
        )


class _Reader:
    """Reads one parameter of a query.

    Args:
        name: the parameter's name.
        read: returns the value of a text, or raises `ValueError`.
        expected: what the text should be, for an error.
    """

    takes_several = False

    def __init__(self, name: str, read: Callable[[str], object], expected: str) -> None:
        self._name = name
        self._read = read
        self._expected = expected

    def __call__(self, given: QueryParams) -> object:
        text = given[self._name]
        try:
            return self._read(text)
        except ValueError:
            raise InvalidRequestError(
                f"{self._name}: {text[:MAX_NAME_CHARACTERS]!r} is not {self._expected}.",
                param=self._name,
                code="invalid_value",
            ) from None


class _ListReader(_Reader):
    takes_several = True

    def __call__(self, given: QueryParams) -> object:
        return given.getlist(self._name)


def _reader(name: str, kind: inspect.Type) -> _Reader:
    for alternative in alternatives(kind):
        if isinstance(alternative, inspect.FloatType):
            return _Reader(name, _number, "a number")
        if isinstance(alternative, inspect.IntType):
            return _Reader(name, _whole_number, "a whole number")
        if isinstance(alternative, inspect.BoolType):
            return _Reader(name, _switch, "true or false")
        if isinstance(alternative, inspect.ListType):
            return _ListReader(name, str, "a text")
    return _Reader(name, str, "a text")


def _number(text: str) -> float:
    if not text.isascii():  # digits of other scripts
        raise ValueError(text)
    return float(text)


def _whole_number(text: str) -> int:
    if not text.isascii():
        raise ValueError(text)
    return int(_ZEROS.sub("", text))


def _switch(text: str) -> bool:
    try:
        return _SWITCH[text.lower()]
    except KeyError:
        raise ValueError(text) from None
