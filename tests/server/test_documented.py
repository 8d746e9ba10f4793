"""The ranges and queries of our OpenAPI document are those of the pages of the docs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from live_server import LiveServer
from pages import page, rows, section, words
from penstock.config.server import ServerConfig
from penstock.server.http.access import ADMIN_PATHS

# Fields whose row says a range that the model decides, or in other words than numbers.
IN_WORDS = {"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "top_k", "seed"}
TABLES = [
    ("CompletionRequest", [("api", "All three"), ("api", "Completions")]),
    ("ChatRequest", [("api", "All three"), ("api", "Chat")]),
    ("ResponsesRequest", [("api", "All three"), ("api", "Responses")]),
    ("ChatRequest", [("sampling", "Sampling")]),
    ("MessagesRequest", [("api", "All three"), ("clients", "The Messages API")]),
]


@pytest.fixture(scope="module")
def document() -> Iterator[Any]:
    with LiveServer(config=ServerConfig(admin_keys=["an-admin"])) as live:
        yield json.loads(live.request("GET", "/openapi.json")[1])


def ranges(schema: dict[str, Any]) -> list[str]:
    """How a page says the bounds of a number, of how many there are, or of each of them."""
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    found = []
    if high is not None:
        found.append(f"above {low}, to {high}" if "exclusiveMinimum" in schema else f"{low} to {high}")
    found += [f"{schema[name]:,}" for name in ("maxItems", "maxProperties", "maxLength") if name in schema]
    for name in ("items", "additionalProperties"):
        inner = schema.get(name)
        if isinstance(inner, dict) and inner.get("minimum") != 0:  # ids: within the vocabulary
            found += ranges(inner)
    return found


@pytest.mark.parametrize(("name", "sections"), TABLES)
def test_r8_every_range_of_the_document_is_in_its_row(
    document: Any, name: str, sections: list[tuple[str, str]]
) -> None:
    of_page: dict[str, str] = {}
    for where in sections:
        of_page |= rows(section(*where))
    told = 0
    described = {field for field, row in of_page.items() if "in a chat" not in row} - IN_WORDS
    for field, schema in document["components"]["schemas"][name]["properties"].items():
        for variant in schema.get("anyOf", [schema]) if field in described else []:
            for text in ranges(variant):
                assert re.search(rf"(?<![\d.,-]){re.escape(text)}(?![.,]?\d)", of_page[field]), (field, text)
                told += 1
    assert told >= 12


def test_every_query_of_an_administrator_is_on_the_page(document: Any) -> None:
    named = words(section("operating"))
    for path in ADMIN_PATHS:
        assert f"{path}" in page("operating"), path
        for operation in document["paths"][path].values():
            names = {one["name"] for one in operation.get("parameters", [])}
            assert names - named == set(), path
