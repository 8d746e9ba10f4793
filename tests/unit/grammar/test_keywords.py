"""Keywords and formats of JSON schemas that the page on structured output names: kept to, or refused."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from json_formats import CHECKER, FORMATS
from masks import EOS, TOKENIZER, allowed
from paths import REPOSITORY
from penstock.config.limits import GrammarLimits
from penstock.errors import InvalidRequestError
from penstock.grammar.matcher import Matcher, Vocabulary
from penstock.grammar.proving_process import tried
from penstock.grammar.schema_bounds import check_bounds
from penstock.request import StructuredOutputs
from schemas import Schema

PAGE = " ".join((REPOSITORY / "docs" / "structured-output.md").read_text(encoding="utf-8").split())
NULL: Schema = {"type": "null"}


def named(begin: str, end: str) -> list[str]:
    """What the page quotes between two phrases."""
    return re.findall(r"`([^`]+)`", PAGE.partition(begin)[2].partition(end)[0])


def of(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def array(**keywords: Any) -> Schema:
    return {"type": "array", "items": NULL} | keywords


# A schema in which the keyword counts, a value that fits, and one that fits but for the keyword.
SUPPORTED: dict[str, tuple[Schema, Any, Any]] = {
    "type": ({"type": ["null", "boolean"]}, True, 1),
    "enum": ({"enum": ["a", None]}, None, "b"),
    "const": ({"const": {"k": [1]}}, {"k": [1]}, {"k": [2]}),
    "properties": (of(a=NULL), {"a": None}, {"a": 1}),
    "required": (of(a=NULL, b=NULL) | {"required": ["b"]}, {"b": None}, {"a": None}),
    "additionalProperties": ({"type": "object", "additionalProperties": NULL}, {"x": None}, {"x": 1}),
    "patternProperties": (of() | {"patternProperties": {"^a[0-9]$": NULL}}, {"a1": None}, {"a1": 1}),
    "minProperties": (
        {"type": "object", "additionalProperties": NULL, "minProperties": 1},
        {"x": None},
        {},
    ),
    "maxProperties": (
        {"type": "object", "additionalProperties": NULL, "maxProperties": 1},
        {"x": None},
        {"x": None, "y": None},
    ),
    "items": (array(), [None], [1]),
    "prefixItems": (array(prefixItems=[{"type": "boolean"}], items=False), [True], [None]),
    "minItems": (array(minItems=2), [None, None], [None]),
    "maxItems": (array(maxItems=2), [None, None], [None] * 3),
    "minLength": ({"type": "string", "minLength": 2}, "ab", "a"),
    "maxLength": ({"type": "string", "maxLength": 2}, "ab", "abc"),
    "pattern": ({"type": "string", "pattern": "^a+$"}, "aa", "ab"),
    "minimum": ({"type": "integer", "minimum": 3}, 3, 2),
    "maximum": ({"type": "integer", "maximum": 3}, 3, 4),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 3}, 4, 3),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 3}, 2, 3),
    "multipleOf": ({"type": "integer", "minimum": 0, "multipleOf": 5}, 15, 16),
    "anyOf": ({"anyOf": [NULL, {"const": 2}]}, 2, 1),
    "allOf": ({"allOf": [{"type": "integer"}, {"maximum": 3}]}, 3, 4),
    "oneOf": ({"oneOf": [NULL, {"type": "boolean"}]}, True, 1),
    "$ref": (of(a={"$ref": "#/properties/b"}, b=NULL), {"a": None}, {"a": 1}),
    "$defs": (array(items={"$ref": "#/$defs/d"}) | {"$defs": {"d": NULL}}, [None], [1]),
    "definitions": (array(items={"$ref": "#/definitions/d"}) | {"definitions": {"d": NULL}}, [None], [1]),
}
# Of each format what has it, and what is close to it.
TEXTS: dict[str, tuple[list[str], list[str]]] = {
    "date-time": (
        ["2026-11-02T09:14:00Z", "1999-12-31t23:59:60.5+01:30"],
        ["2026-02-30T00:00:00Z", "2026-11-02 09:14:00Z", "2026-11-02T09:14:00"],
    ),
    "date": (["2026-02-28", "2024-02-29"], ["2026-02-30", "2026-04-31", "2026-13-01", "2026-1-1"]),
    "time": (["09:14:00Z", "23:59:59.25-11:00"], ["24:00:00Z", "09:60:00Z", "09:14:00", "09:14Z"]),
    "duration": (["P3W", "P1Y2M3DT4H5M6S", "PT7M"], ["P", "PT", "P1Y1D", "P1W1D", "PT1H1S", "1D"]),
    "email": (["a.b+c@d.example", "x@y"], ["a@", "@b", "a b@c", "a..b@c", "a@-b"]),
    "hostname": (["a", "x-1.example", "a" * 63], ["-a", "a-", "a..b", "a_b", "a" * 64, ""]),
    "ipv4": (["0.0.0.0", "255.1.20.3"], ["256.1.1.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (["::", "1::2", "2001:db8:0:0:0:0:0:1"], ["1::2::3", ":1", "1:2:3", "g::"]),
    "uri": (["http://a.example/b?c=d#e", "a:", "urn:x:%41"], ["a", "//a/b", "a:b c", "1a:b", "a:%4"]),
    "uuid": (
        ["fe2accef-decb-cc89-6abe-D64FECEE6CED"],
        ["fe2accef", "g" * 8 + "-decb-cc89-6abe-d64fecee6ced"],
    ),
}
REFUSED: dict[str, Schema] = {
    "not": {"not": {}},
    "if": {"if": {}, "then": {}},
    "then": {"then": NULL},
    "else": {"else": NULL},
    "uniqueItems": array(uniqueItems=True),
    "contains": {"contains": NULL},
    "propertyNames": {"propertyNames": {"maxLength": 3}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "unevaluatedItems": {"unevaluatedItems": False},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "additionalItems": array(additionalItems=False),
    "items": {"type": "array", "items": [NULL]},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "minProperties": {"type": "object", "additionalProperties": NULL, "minProperties": 2},
}
# The same of what has no name of its own on the page, with the words that tell it.
REFUSED_IN_WORDS: list[tuple[str, Schema]] = [
    ("$ref", {"$ref": "http://x.example/schema"}),
    ("$ref", {"$ref": "#anchor"}),
    ("$schema", {"$schema": "http://x.example/draft", "type": "null"}),
    ("patternProperty", of() | {"patternProperties": {"a": NULL, "b": NULL}}),
    ("multipleOf", {"type": "integer", "multipleOf": 123_456_789_012}),
    ("1.8446744073709552e19", {"type": "number", "maximum": 2**64}),
    ("idn-email", {"type": "string", "format": "idn-email"}),
    ("regex", {"type": "string", "format": "regex"}),
    ("json-pointer", {"type": "string", "format": "json-pointer"}),
    ("look-around", {"type": "string", "pattern": "(?=a)b"}),
    ("backreferences", {"type": "string", "pattern": r"(a)\1"}),
    ("minContains", array(minContains=1)),
    ("dependencies", {"dependencies": {"a": ["b"]}}),
    ("$recursiveRef", {"$recursiveRef": "#"}),
    ("maxProperties", of(a=NULL, b=NULL, c=NULL) | {"maxProperties": 2}),
]


def is_allowed(vocabulary: Vocabulary, schema: Schema, value: Any) -> bool:
    """Whether the grammar of the schema takes the value, and lets the text end there."""
    structured = StructuredOutputs(json=json.dumps(schema))
    check_bounds(structured, GrammarLimits())
    matcher = Matcher(vocabulary, structured)
    assert not matcher.error
    text = json.dumps(value, separators=(",", ":"))
    matcher.accept(TOKENIZER.encode(text, add_special_tokens=False))
    return not matcher.error and EOS in allowed(matcher)


def is_valid(schema: Schema, value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema, format_checker=CHECKER).is_valid(value)


def test_what_the_page_names_is_what_is_tested_here() -> None:
    assert named("Supported are ", "of `format`:") == list(SUPPORTED)
    assert named("of `format`:", "Annotations") == list(TEXTS) == list(FORMATS)
    refused = set(named("is refused by name", "references out of"))
    assert refused - {"unsupported_schema"} == set(REFUSED)


@pytest.mark.parametrize("keyword", SUPPORTED)
def test_d12_a_keyword_is_kept_to(vocabulary: Vocabulary, keyword: str) -> None:
    schema, right, wrong = SUPPORTED[keyword]
    assert [is_valid(schema, value) for value in (right, wrong)] == [True, False]
    assert is_allowed(vocabulary, schema, right)
    assert not is_allowed(vocabulary, schema, wrong)


@pytest.mark.parametrize("name", TEXTS)
def test_d12_a_format_is_kept_to(vocabulary: Vocabulary, name: str) -> None:
    schema = {"type": "string", "format": name}
    for is_right, texts in zip((True, False), TEXTS[name], strict=True):
        for text in texts:
            assert is_valid(schema, text) == is_right, text
            assert is_allowed(vocabulary, schema, text) == is_right, text


@pytest.mark.parametrize("name", FORMATS)
def test_d12_whatever_is_drawn_has_its_format(vocabulary: Vocabulary, name: str) -> None:
    """With a length, without which a host or address may go on for ever."""
    schema = {"type": "string", "format": name, "maxLength": 40}
    for seed in range(6):
        matcher, chance = Matcher(vocabulary, StructuredOutputs(json=json.dumps(schema))), random.Random(seed)
        tokens: list[int] = []
        while (token_id := chance.choice(allowed(matcher))) != EOS:
            tokens.append(token_id)
            matcher.accept([token_id])
            assert len(tokens) < 100
        text = json.loads(b"".join(map(TOKENIZER.token_bytes, tokens)))
        assert FORMATS[name](text), text


@pytest.mark.parametrize(("name", "schema"), [*REFUSED.items(), *REFUSED_IN_WORDS])
def test_r8_what_would_not_be_kept_to_is_refused_by_name(
    vocabulary: Vocabulary, name: str, schema: Schema
) -> None:
    structured = StructuredOutputs(json=json.dumps(schema))
    try:
        check_bounds(structured, GrammarLimits())
        error = tried(vocabulary, structured).error
        assert error is not None
        code, told = error.code, error.message
    except InvalidRequestError as refused:
        code, told = refused.code, refused.message
    assert code == "unsupported_schema"
    assert name in told
