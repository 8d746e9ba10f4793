"""The texts of JSON schemas and grammars of requests as the library of grammars is given them.

`json_schema` and `lark_grammar` return the text as it came where there is nothing to change. Otherwise
references are JSON pointers, patterns and numbers are in the library's notation, and open objects are settled
(`open_objects`). The same text always gives the same, so that what was proved is what the last stage builds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.grammar.open_objects import settle_objects
from penstock.grammar.patterns import from_ecma
from penstock.grammar.references import localize_references
from penstock.grammar.schema_errors import refused
from penstock.grammar.subschemas import every_schema
from penstock.request import StructuredOutputs

COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
# A schema within a grammar, and what may look like one: literals, expressions, comments and names of tokens,
# as the library splits a grammar into words. A text of which it makes other words is refused by it.
_WORD = re.compile(
    r'"(?:\\.|[^"\\])*(?:"|\\?\Z)'
    r"|(?:#|//)[^\n]*"
    r"|/(?:\\.|[^/\\])+(?:/|\\?\Z)"
    r"|<[^<>\s]+>"
    r"|(?P<json>%json[ \t\r\n]*)",
    re.DOTALL,
)
OPTIONS = "x-guidance"  # of the library, at the root of a schema


class LibraryText(msgspec.Struct, frozen=True):
    """A schema or a grammar as the library is given it.

    Attributes:
        is_lenient: the library does not refuse what it does not support; it must have taken the text as it
            came, with open objects, before.
    """

    text: str
    is_lenient: bool = False


def json_schema(text: str, *, open_objects: bool) -> LibraryText:
    """Return a schema as the library is given it.

    Args:
        open_objects: objects stay as open as JSON Schema has them.

    Raises:
        InvalidRequestError: a reference in it leads nowhere.
    """
    document = json.loads(text)
    as_given = json.dumps(document)
    lenient = _prepare(document, open_objects=open_objects)
    prepared = json.dumps(document)
    return LibraryText(text if prepared == as_given else prepared, lenient)


def lark_grammar(text: str, *, open_objects: bool) -> LibraryText:
    """Return a grammar with the schemas in it as the library is given them; raises as `json_schema`."""
    pieces, position, is_any_lenient = [], 0, False
    for start, end, schema in _embedded(text):
        if _prepare(schema, open_objects=open_objects):
            is_any_lenient = True
            schema[OPTIONS] = schema.get(OPTIONS, {}) | {"lenient": True}
        pieces += [text[position:start], json.dumps(schema)]
        position = end
    return LibraryText("".join([*pieces, text[position:]]), is_any_lenient)


def is_lenient(structured: StructuredOutputs) -> bool:
    """Return whether the library reads what a request asks for leniently."""
    open_objects = structured.open_objects
    if structured.json is not None:
        return json_schema(structured.json, open_objects=open_objects).is_lenient
    return lark_grammar(structured.grammar or "", open_objects=open_objects).is_lenient


def schemas_within(grammar: str) -> Iterator[Any]:
    """Yield the JSON schemas that stand in a grammar behind `%json`.

    Raises:
        InvalidRequestError: what stands there is not JSON.
    """
    for _, _, schema in _embedded(grammar):
        yield schema


def _embedded(grammar: str) -> Iterator[tuple[int, int, Any]]:
    """Yield where each schema in a grammar begins and ends, and the schema."""
    decoder, position = json.JSONDecoder(), 0
    while (word := _WORD.search(grammar, position)) is not None:
        position = word.end()
        if word["json"] is None:
            continue
        start = position
        try:
            schema, position = decoder.raw_decode(grammar, start)
        except (ValueError, RecursionError) as error:
            raise refused(f"the text after %json is not JSON: {error}") from None
        yield start, position, schema


def _prepare(document: Any, *, open_objects: bool) -> bool:
    """Change a schema for the library; return whether it must be read leniently."""
    if not isinstance(document, dict):
        return False
    localize_references(document)
    schemas = every_schema(document)
    lenient = not open_objects and settle_objects(document)
    for schema in schemas:
        _write_as_library(schema)
    return lenient


def _write_as_library(schema: dict[str, Any]) -> None:
    for keyword in COUNTS:
        count = schema.get(keyword)
        if isinstance(count, float) and count.is_integer():
            schema[keyword] = int(count)
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = from_ecma(schema["pattern"])
    by_pattern = schema.get("patternProperties")
    if isinstance(by_pattern, dict):
        schema["patternProperties"] = {from_ecma(name): nested for name, nested in by_pattern.items()}
