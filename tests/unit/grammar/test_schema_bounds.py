"""What is refused of a schema before anything is built of it (section 5 of the limits)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.config.limits import GrammarLimits
from penstock.errors import InvalidRequestError, UsageError
from penstock.grammar.schema_bounds import check_bounds
from penstock.request import StructuredOutputs
from schemas import schemas

LIMITS = GrammarLimits(
    max_schema_bytes=2000, max_schema_depth=4, max_enum_items=5, max_pattern_bytes=8, max_repeats=50
)


def check(schema: Any, limits: GrammarLimits = LIMITS) -> None:
    check_bounds(StructuredOutputs(json=json.dumps(schema)), limits)


def refused(schema: Any, limits: GrammarLimits = LIMITS) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as raised:
        check(schema, limits)
    assert raised.value.param == "structured_outputs"
    assert raised.value.remedy or raised.value.code == "invalid_schema"
    return raised.value


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels - 1):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def around(inner: Any) -> list[dict[str, Any]]:
    """Schemas that have `inner` in some place."""
    return [
        {"properties": {"a": inner}},
        {"items": inner},
        {"prefixItems": [{}, inner]},
        {"additionalProperties": inner},
        {"anyOf": [inner]},
        {"$defs": {"x": inner}},
        {"$ref": "#/somewhere/0", "somewhere": [inner]},
        {"$ref": "#/a~1b/c%20d", "a/b": {"c d": inner}},
    ]


WRONG = [
    ({"maxItems": 51}, "maxItems is 51; the limit is 50", "--max-repeats"),
    ({"minLength": 1_000_000_000}, "minLength", "--max-repeats"),
    ({"minProperties": 1e300}, "minProperties", "--max-repeats"),
    ({"pattern": "a" * 9}, "pattern in bytes is 9", "--max-pattern-bytes"),
    ({"patternProperties": {"é" * 5: {}}}, "pattern in bytes is 10", "--max-pattern-bytes"),
    ({"enum": list(range(6))}, "enum values is 6", "--max-enum-items"),
    ({"$ref": "http://127.0.0.1/x"}, "$ref", "Leave $ref out"),
    ({"$ref": "file:///etc/passwd"}, "$ref", "Leave $ref out"),
    ({"$ref": "#/nowhere"}, "nothing is at", "Leave $ref out"),
    ({"$ref": "#anchor"}, "$ref", "Leave $ref out"),
    ({"$ref": 3}, "$ref", "Leave $ref out"),
    ({"divisibleBy": 2}, "divisibleBy", "Leave divisibleBy out"),
    ({"additionalItems": False}, "additionalItems", "Leave additionalItems out"),
    ({"x-guidance": {"lenient": True}}, "x-guidance", "Leave x-guidance out"),
    ({"items": [{}, {}]}, "prefixItems", "Leave items out"),
    ({"exclusiveMinimum": True, "minimum": 3}, "exclusiveMinimum", "Leave exclusiveMinimum out"),
    ({"minProperties": 2}, "only 1 fields with different names can be guaranteed", "Leave minProperties out"),
    ({"minProperties": 4, "required": ["a", "b"]}, "only 3 fields", "Leave minProperties out"),
    ({"minItems": "3"}, "minItems", "Leave minItems out"),
    ({"minItems": 1.5}, "a whole number of at least 0, not 1.5", "Leave minItems out"),
    ({"maxLength": -1}, "a whole number of at least 0, not -1", "Leave maxLength out"),
]


@pytest.mark.parametrize(("inner", "told", "remedy"), WRONG)
def test_r8_what_is_too_much_or_would_not_be_obeyed_is_named_wherever_it_stands(
    inner: dict[str, Any], told: str, remedy: str
) -> None:
    for schema in [inner, *around(inner)]:
        error = refused(schema)
        assert told in error.message
        assert remedy in error.remedy
        grammar = StructuredOutputs(grammar=f'start: "a" %json {json.dumps(schema)}')
        with pytest.raises(InvalidRequestError) as raised:
            check_bounds(grammar, LIMITS)
        assert told in raised.value.message or "x-guidance" in told


@pytest.mark.parametrize("option", ["lenient", "coerce_one_of"])
def test_r8_a_grammar_cannot_have_a_schema_in_it_be_passed_over(option: str) -> None:
    """Issue 25, point 16. By options of the library, which are for spaces and escapes only."""
    grammar = 'start: %%json {"not": {}, "x-guidance": %s}'
    with pytest.raises(InvalidRequestError, match="x-guidance") as raised:
        check_bounds(StructuredOutputs(grammar=grammar % json.dumps({option: True})), LIMITS)
    assert raised.value.code == "unsupported_schema"
    check_bounds(StructuredOutputs(grammar=grammar % '{"whitespace_flexible": false}'), LIMITS)
    check_bounds(StructuredOutputs(grammar="start: %json true"), LIMITS)


def test_r8_what_looks_like_a_keyword_and_is_data_is_none() -> None:
    check({"properties": {"maxItems": {"type": "null"}, "$ref": {"type": "null"}, "divisibleBy": {}}})
    check({"const": {"maxItems": 10**9, "$ref": "http://x"}})
    check({"enum": [{"x-guidance": 1}, {"items": [1]}], "default": {"pattern": "a" * 100}})


def test_r8_enum_items_are_counted_over_the_whole_schema() -> None:
    check({"anyOf": [{"enum": [1, 2]}, {"enum": [3, 4, 5]}]})
    assert "enum values is 6" in refused({"anyOf": [{"enum": [1, 2]}, {"enum": [3, 4, 5, 6]}]}).message


def test_r8_depth_is_counted_in_schemas() -> None:
    check(nested(4))
    assert "deeper than 4 levels" in refused(nested(5)).message
    assert "--max-schema-depth" in refused(nested(5)).remedy
    deepest = '{"not":' * 20_000 + "true" + "}" * 20_000
    with pytest.raises(InvalidRequestError, match="deep"):
        check_bounds(StructuredOutputs(json=deepest), GrammarLimits(max_schema_bytes=1 << 20))


def test_brackets_within_strings_are_not_counted() -> None:
    intervals = {f"p{number}": {"description": r"in [0, 1), or \"{\\"} for number in range(20)}
    check({"properties": intervals})
    text: Any = 1
    for _ in range(20):
        text = {"a]}": text}
    assert refused({"const": text}).code == "out_of_range"


def test_references_that_lead_round_in_circles_are_read_once() -> None:
    check({"$ref": "#"})
    check({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(2000)} | {"a2000": {}}
    check({"$ref": "#/$defs/a0", "$defs": chain}, GrammarLimits(max_schema_bytes=1 << 20))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "true", '{"a":1}x', '{"properties":{"a":3}}'])
def test_r8_what_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        check_bounds(StructuredOutputs(json=text), LIMITS)
    assert raised.value.code == "invalid_schema"


@pytest.mark.parametrize(
    "asked",
    [
        StructuredOutputs(regex="a" * 2001),
        StructuredOutputs(grammar="é" * 1001),
        StructuredOutputs(json=" " * 2000 + "{}"),
        StructuredOutputs(choice=["a" * 500] * 5),
        StructuredOutputs(choice=["a"] * 6),
    ],
)
def test_r8_sizes_are_bounded_in_bytes(asked: StructuredOutputs) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        check_bounds(asked, LIMITS)
    assert raised.value.code == "out_of_range"


def test_lone_surrogates_are_refused() -> None:
    for asked in (StructuredOutputs(regex="\ud800"), StructuredOutputs(choice=["\ud800"])):
        with pytest.raises(InvalidRequestError, match="Unicode"):
            check_bounds(asked, LIMITS)


def test_what_apis_have_is_within_the_defaults() -> None:
    for schema in schemas(100):
        check(schema, GrammarLimits())


@pytest.mark.parametrize("bad", [{"max_repeats": 0}, {"compile_timeout_s": 0.0}, {"grammar_cache_bytes": -1}])
def test_limits_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as raised:
        GrammarLimits(**bad)
    assert raised.value.param == next(iter(bad))
