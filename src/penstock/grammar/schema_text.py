"""Translates the JSON schemas and grammars of requests into texts as the library of grammars reads them.

The library is llguidance. In a text for it references are JSON pointers, patterns and numbers are in its
notation, and open objects are settled (`open_objects`). A schema that needs no change is returned as it came;
schemas within a grammar are written anew in any case. The same request always gives the same text, so that
the last stage builds what was proved.
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
# Finds `%json`, which stands before a schema within a grammar. The other words are found to be skipped, since
# `%json` means nothing within them: literals, comments, expressions and names of tokens. The library splits
# a grammar into the same words; where it does not, it refuses the grammar.
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
    """A schema or a grammar as the library reads it.

    Attributes:
        is_lenient: the library must not refuse what it does not support. Then it must have accepted the same
            request before, with open objects, for which it need not be lenient.
    """

    text: str
    is_lenient: bool = False


def json_schema(text: str, *, open_objects: bool) -> LibraryText:
    """Return a schema as the library reads it.

    Args:
        text: the schema of a request.
        open_objects: leave objects as open as JSON Schema has them; else they are closed or bounded.

    Raises:
        InvalidRequestError: a reference in it leads nowhere.
    """
    document = json.loads(text)
    as_given = json.dumps(document)
    lenient = _prepare(document, open_objects=open_objects)
    prepared = json.dumps(document)
    return LibraryText(text if prepared == as_given else prepared, lenient)


def lark_grammar(text: str, *, open_objects: bool) -> LibraryText:
    """Return a grammar in which the schemas are as the library reads them; raises as `json_schema`."""
    pieces, position, is_any_lenient = [], 0, False
    for start, end, schema in _embedded(text):
        if _prepare(schema, open_objects=open_objects):
            is_any_lenient = True
            schema[OPTIONS] = schema.get(OPTIONS, {}) | {"lenient": True}
        pieces += [text[position:start], json.dumps(schema)]
        position = end
    return LibraryText("".join([*pieces, text[position:]]), is_any_lenient)


def is_lenient(structured: StructuredOutputs) -> bool:
    """Return whether the library must be lenient with the schemas of a request (`LibraryText`)."""
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
    """Change a schema in place, as the library reads it; return whether the library must be lenient."""
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
