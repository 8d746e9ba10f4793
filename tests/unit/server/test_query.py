"""Queries of URLs as structs: which words are read as which values, and which are refused by name."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import InvalidRequestError
from penstock.server.routes.query import with_query


class Query(msgspec.Struct, frozen=True, kw_only=True):
    limit_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0
    count: Annotated[int, msgspec.Meta(ge=0, le=10_000)] | None = None
    every: bool = msgspec.field(default=False, name="all")
    mode: Literal["keep", "wait"] = "keep"
    ids: Annotated[list[str], msgspec.Meta(max_length=2)] | None = None


class Needed(msgspec.Struct, frozen=True, kw_only=True):
    name: str


def read(
    query: str, kind: type[msgspec.Struct] = Query, headers: list[tuple[bytes, bytes]] | None = None
) -> Any:
    seen: list[msgspec.Struct] = []

    async def answer(given: msgspec.Struct) -> Response:
        seen.append(given)
        return Response()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/route",
        "server": ("localhost", 80),
        "query_string": query.encode(),
        "headers": headers or [],
    }
    asyncio.run(with_query(answer, kind)(Request(scope)))
    return seen[0]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", Query()),
        ("limit_s=1e2&count=7", Query(limit_s=100.0, count=7)),
        ("limit_s=.5", Query(limit_s=0.5)),
        ("limit_s=3600&count=10000", Query(limit_s=3600.0, count=10_000)),
        ("count=5.0", Query(count=5)),
        ("count=%2B5", Query(count=5)),
        *[(f"all={word}", Query(every=True)) for word in ("true", "1", "True", "yes", "on")],
        *[(f"all={word}", Query(every=False)) for word in ("false", "0", "FALSE", "no", "off")],
        ("mode=wait", Query(mode="wait")),
        ("ids=a&ids=b", Query(ids=["a", "b"])),
        ("ids=", Query(ids=[""])),
    ],
)
def test_words_are_read_as_the_type_says(query: str, expected: Query) -> None:
    assert read(query) == expected


@pytest.mark.parametrize(
    ("query", "param"),
    [
        *[
            (f"limit_s={word}", "limit_s")
            for word in ("", "0", "-1", "3601", "nan", "inf", "1e400", "x", "1;2")
        ],
        *[(f"limit_s={word}", "limit_s") for word in ("%D9%A1", "true", "0x10", "null")],
        *[(f"count={word}", "count") for word in ("", "1.5", "-1", "10001", "9" * 5000, "null", "%D9%A1")],
        *[(f"all={word}", "all") for word in ("", "2", "perhaps", "null")],
        *[(f"mode={word}", "mode") for word in ("", "KEEP", "stop")],
        ("ids=a&ids=b&ids=c", "ids"),
        ("mode=keep&mode=wait", "mode"),
    ],
)
def test_other_words_are_refused_by_the_name_of_the_parameter(query: str, param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        read(query)
    assert (raised.value.param, raised.value.code) == (param, "invalid_value")
    assert len(str(raised.value)) < 300


def test_a_word_of_several_names_the_others() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"^mode: Invalid enum value 'stop'. Give one of: keep, wait\.$"
    ):
        read("mode=stop")


def test_what_is_needed_must_be_there() -> None:
    with pytest.raises(InvalidRequestError, match=r"^name is required\.$") as raised:
        read("", Needed)
    assert (raised.value.param, raised.value.code) == ("name", "missing_required_parameter")
    assert read("name=null", Needed) == Needed(name="null")


@pytest.mark.parametrize("query", ["modes=keep", "every=true", "=x", "mode=keep&Mode=wait"])
def test_a_name_that_the_type_does_not_have_is_refused(query: str) -> None:
    with pytest.raises(
        InvalidRequestError, match="It takes limit_s and count and all and mode and ids"
    ) as raised:
        read(query)
    assert raised.value.code == "unknown_parameter"


@pytest.mark.parametrize(
    "headers",
    [[(b"content-length", b"3")], [(b"transfer-encoding", b"chunked")], [(b"content-length", b"9999")]],
)
def test_a_body_is_refused(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(InvalidRequestError, match=r"^/route takes no body") as raised:
        read("", headers=headers)
    assert raised.value.code == "unexpected_body"
    assert read("", headers=[(b"content-length", b"2")]) == Query(), "an empty object says nothing"
