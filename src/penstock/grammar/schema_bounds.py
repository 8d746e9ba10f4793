"""The bounds of a request's schema, pattern, choice or grammar, checked before anything is built of it.

A JSON schema is read keyword by keyword. Keywords that the grammar would silently leave unobeyed are refused
by name, and so are references out of the document and numbers that would unfold to huge grammars. Whether the
rest can be obeyed is found out by building a grammar of it (`grammar.proving`). The checks open no file and
run no pattern of the request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.config.limits import GrammarLimits
from penstock.errors import InvalidRequestError
from penstock.grammar.references import localize_references
from penstock.grammar.schema_errors import refused, unsupported
from penstock.grammar.schema_text import COUNTS, OPTIONS, schemas_within
from penstock.grammar.subschemas import steps_of, subschemas, value_at
from penstock.request import StructuredOutputs

# Keywords that llguidance ignores without an error: constraints of one draft or another. Its own options are
# refused here too; `_check_grammar` takes those that are allowed out before.
_IGNORED = frozenset({"additionalItems", "disallow", "divisibleBy", "extends", OPTIONS})
# Options of the library that leave constraints unobeyed.
_LENIENT = frozenset({"lenient", "coerce_one_of"})
_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{\]}]', re.DOTALL)  # or a string


def check_bounds(structured: StructuredOutputs, limits: GrammarLimits) -> None:
    """Raise `InvalidRequestError` if a grammar is too large, cannot be read or would not be obeyed."""
    for text in _texts(structured):
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise refused("it is not valid Unicode text (it may hold a lone surrogate)") from None
        _at_most("its length in bytes", size, limits.max_schema_bytes, "--max-schema-bytes")
    if structured.choice is not None:
        _at_most("the number of choices", len(structured.choice), limits.max_enum_items, "--max-enum-items")
        size = sum(len(text.encode()) for text in structured.choice)
        _at_most("the length of all choices in bytes", size, limits.max_schema_bytes, "--max-schema-bytes")
    if structured.json is not None:
        check_schema(structured.json, limits)
    if structured.grammar is not None:
        _check_grammar(structured.grammar, limits)


def check_schema(text: str, limits: GrammarLimits) -> None:
    """Check a schema, except for its length; the caller has bounded that of the text around it."""
    _check_document(_document(text, limits), limits)


def _check_grammar(grammar: str, limits: GrammarLimits) -> None:
    """Check the schemas in a grammar. Each may have library options that say how its JSON is written."""
    for schema in schemas_within(grammar):
        if not isinstance(schema, dict):
            continue
        options = schema.pop(OPTIONS, {})
        if not isinstance(options, dict) or options.keys() & _LENIENT:
            raise unsupported(OPTIONS, "a schema constrains the value")
        _check_document(schema, limits)


def _check_document(document: dict[str, Any], limits: GrammarLimits) -> None:
    localize_references(document)
    _Reader(limits, document).read_all()


def _texts(structured: StructuredOutputs) -> Iterator[str]:
    for text in (structured.json, structured.regex, structured.grammar):
        if text is not None:
            yield text
    yield from structured.choice or ()


def _document(text: str, limits: GrammarLimits) -> dict[str, Any]:
    if _brackets(text) > 2 * limits.max_schema_depth + 2:  # a level has a schema and a map or list around it
        raise _too_deep(limits)
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refused(f"the schema is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise refused("the schema is not a JSON object")
    return document


def _brackets(text: str) -> int:
    """Return how deep brackets nest; those in strings are text. A string without an end hides the rest."""
    depth = deepest = 0
    for bracket in _BRACKET.finditer(text):
        if bracket[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif bracket[0] in "]}":
            depth = max(0, depth - 1)
    return deepest


@dataclass(slots=True)
class _Reader:
    """Reads one document, and the places to which its references lead, once each."""

    limits: GrammarLimits
    document: dict[str, Any]
    num_enum_items: int = 0
    found: list[Any] = field(default_factory=list)  # targets of references, still to be read
    seen: set[int] = field(default_factory=set)  # `id()` of each schema that was read

    def read_all(self) -> None:
        self.found.append(self.document)
        while self.found:
            self._read(self.found.pop(), 1)

    def _read(self, schema: Any, depth: int) -> None:
        if depth > self.limits.max_schema_depth:
            raise _too_deep(self.limits)
        if isinstance(schema, bool) or id(schema) in self.seen:
            return
        if not isinstance(schema, dict):
            raise refused(f"a schema must be an object, true or false, found {_kind(schema)}")
        self.seen.add(id(schema))
        self._check_keywords(schema)
        for _, nested in subschemas(schema):
            self._read(nested, depth + 1)

    def _check_keywords(self, schema: dict[str, Any]) -> None:
        limits = self.limits
        for keyword in _IGNORED & schema.keys():
            raise unsupported(keyword, "it is not supported")
        if isinstance(schema.get("items"), list):
            raise unsupported("items", "a list of schemas is not supported here; write prefixItems")
        for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(schema.get(keyword), bool):
                raise unsupported(keyword, "it is a number, which replaces minimum or maximum")
        for keyword in ("$ref", "$id"):
            self._check_reference(keyword, schema.get(keyword))
        for keyword in COUNTS:
            count = schema.get(keyword, 0)
            if isinstance(count, bool) or not isinstance(count, int | float):
                raise unsupported(keyword, f"it must be a number, not {_kind(count)}")
            _at_most(keyword, count, limits.max_repeats, "--max-repeats")
            if count < 0 or count != int(count):
                raise unsupported(keyword, f"it must be a whole number of at least 0, not {count}")
        _check_num_fields(schema)
        for pattern in _patterns(schema):
            size = len(pattern.encode("utf-8", "replace"))
            _at_most(
                "the length of a pattern in bytes", size, limits.max_pattern_bytes, "--max-pattern-bytes"
            )
        if isinstance(schema.get("enum"), list):
            self.num_enum_items += len(schema["enum"])
            _at_most(
                "the number of enum values", self.num_enum_items, limits.max_enum_items, "--max-enum-items"
            )

    def _check_reference(self, keyword: str, target: Any) -> None:
        if target is None:
            return
        if not isinstance(target, str):
            raise unsupported(keyword, f"it must be a string, not {_kind(target)}")
        if keyword == "$ref":
            self.found.append(value_at(self.document, steps_of(target)))


def _check_num_fields(schema: dict[str, Any]) -> None:
    """Refuse a `minProperties` that the grammar cannot promise.

    The grammar counts fields as they are written, and a field whose name is free may be written twice. So it
    can promise the required fields and one more, and not that further ones have different names.
    """
    required = schema.get("required")
    surely = 1 + (len(required) if isinstance(required, list) else 0)
    if schema.get("minProperties", 0) > surely:
        raise unsupported("minProperties", f"only {surely} fields with different names can be guaranteed")


def _patterns(schema: dict[str, Any]) -> Iterator[str]:
    if isinstance(schema.get("pattern"), str):
        yield schema["pattern"]
    if isinstance(schema.get("patternProperties"), dict):
        yield from schema["patternProperties"]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _at_most(what: str, value: float, limit: int, flag: str) -> None:
    if value > limit:
        raise InvalidRequestError(
            f"structured output: {what} is {value}; the limit is {limit}.",
            remedy=f"Lower it, or raise {flag}.",
            param="structured_outputs",
            code="out_of_range",
        )


def _too_deep(limits: GrammarLimits) -> InvalidRequestError:
    return InvalidRequestError(
        f"structured output: schemas nest deeper than {limits.max_schema_depth} levels.",
        remedy="Make the schema flatter, or raise --max-schema-depth.",
        param="structured_outputs",
        code="out_of_range",
    )
