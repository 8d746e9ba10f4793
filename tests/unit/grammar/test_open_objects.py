"""Objects that say nothing of undeclared fields: closed where that is sound, bounded where it is not
(issue 25, point 15)."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import msgspec
import pytest

from json_formats import CHECKER
from masks import EOS, TOKENIZER, allowed, text_of, walk
from penstock.config.limits import GrammarLimits
from penstock.grammar.matcher import Matcher, Vocabulary
from penstock.grammar.open_objects import settle_objects
from penstock.grammar.proving_process import tried
from penstock.grammar.schema_bounds import check_bounds
from penstock.request import StructuredOutputs
from schemas import Schema, schemas

NUMBER: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
PLAIN: Schema = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a"]}
ADDRESS: Schema = {"title": "Address", "type": "object", "properties": {"n": NUMBER}, "required": ["n"]}
# As the classes of a plain Python program give it: objects within one another, defaults, a list.
PERSON: Schema = {
    "$defs": {"Address": ADDRESS},
    "title": "Person",
    "type": "object",
    "properties": {
        "age": NUMBER | {"title": "Age"},
        "kind": {"enum": ["x", "y"], "default": "x"},
        "home": {"$ref": "#/$defs/Address", "description": "where"},
        "others": {"type": "array", "items": {"$ref": "#/$defs/Address"}, "maxItems": 2},
    },
    "required": ["age", "home"],
}


def settled(schema: Schema) -> tuple[Any, bool]:
    copy = json.loads(json.dumps(schema))
    return copy, settle_objects(copy)


def takes(vocabulary: Vocabulary, schema: Schema, value: Any, *, open_objects: bool = False) -> bool:
    """Whether a request with this schema is taken, and its answer may be the value."""
    structured = StructuredOutputs(json=json.dumps(schema), open_objects=open_objects)
    check_bounds(structured, GrammarLimits())
    assert tried(vocabulary, structured).error is None
    matcher = Matcher(vocabulary, structured)
    text = json.dumps(value, separators=(",", ":"))
    matcher.accept(TOKENIZER.encode(text, add_special_tokens=False))
    return not matcher.error and EOS in allowed(matcher)


CLOSED: dict[str, Schema] = {
    "an object": PLAIN,
    "one without a type": {"properties": {"a": NUMBER}},
    "one that may be null": PLAIN | {"type": ["object", "null"]},
    "one without fields": {"type": "object", "properties": {}},
    "one with a number of fields that it has": PLAIN | {"minProperties": 2},
}


@pytest.mark.parametrize("schema", CLOSED.values(), ids=CLOSED)
def test_an_object_that_declares_its_fields_is_closed(schema: Schema) -> None:
    assert settled(schema) == (schema | {"additionalProperties": False}, False)


def test_objects_in_fields_items_and_definitions_are_closed() -> None:
    found, is_lenient = settled(PERSON)
    assert not is_lenient
    assert found.pop("additionalProperties") is False
    assert found["$defs"]["Address"].pop("additionalProperties") is False
    assert found == PERSON


NEIGHBOUR: Schema = {"properties": {"c": NUMBER}}
NOT_CLOSED: dict[str, Schema] = {
    "allOf": {"allOf": [PLAIN]},
    "anyOf": {"anyOf": [PLAIN, {"type": "null"}]},
    "oneOf": {"oneOf": [PLAIN, {"type": "null"}]},
    "if": {"if": PLAIN},
    "a field of a branch": {"anyOf": [{"properties": {"x": PLAIN}}]},
    "a reference from a branch": {"anyOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": PLAIN}},
    "a reference with siblings": {"$ref": "#/$defs/x", "$defs": {"x": PLAIN}, **NEIGHBOUR},
    "a reference from a branch, and another": {
        "properties": {"p": {"$ref": "#/$defs/x"}, "q": {"anyOf": [{"$ref": "#/$defs/x"}]}},
        "$defs": {"x": PLAIN},
    },
    "fields beside branches": PLAIN | {"allOf": [{"required": ["z"]}]},
    "a required field that is not declared": PLAIN | {"required": ["a", "z"]},
    "patterns of names": PLAIN | {"patternProperties": {"^x": NUMBER}},
    "more fields than are declared": PLAIN | {"minProperties": 3},
    "it asks for others": PLAIN | {"additionalProperties": True},
}


@pytest.mark.parametrize("schema", NOT_CLOSED.values(), ids=NOT_CLOSED)
def test_an_object_that_others_depend_on_is_bounded_and_not_closed(schema: Schema) -> None:
    text = json.dumps(settled(schema)[0])
    inner = '{"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"type": "integer", "minimum": 0, '
    own = text.partition(inner)[2].partition("maxProperties")
    assert own[1], text
    assert '"additionalProperties": false' not in own[0]


LEFT: dict[str, Schema] = {
    "closed already": PLAIN | {"additionalProperties": False},
    "a map": {"type": "object"},
    "a map with known keys": PLAIN | {"additionalProperties": NUMBER},
    "a bound of its own": {"anyOf": [PLAIN | {"required": ["a", "b"], "maxProperties": 9}]},
    "a definition that nothing uses": {"$defs": {"x": PLAIN}, "type": "null"},
    "data": {"const": PLAIN, "default": PLAIN},
}


@pytest.mark.parametrize("schema", LEFT.values(), ids=LEFT)
def test_what_is_not_open_or_is_a_map_stays_as_it_is(schema: Schema) -> None:
    assert settled(schema) == (schema, False)


def test_d12_fields_of_its_own_are_not_written_into_a_closed_object(vocabulary: Vocabulary) -> None:
    """The default; with open objects every one of these is what JSON Schema allows."""
    for schema, right, wrong in (
        (PLAIN, {"a": 1}, {"a": 1, "z": 2}),
        (PERSON, {"age": 1, "home": {"n": 2}}, {"age": 1, "home": {"n": 2, "z": 3}}),
    ):
        assert takes(vocabulary, schema, right)
        assert not takes(vocabulary, schema, wrong)
        assert takes(vocabulary, schema, wrong, open_objects=True)


BOUNDED = {
    "all required": ({"anyOf": [PLAIN | {"required": ["a", "b"]}, {"type": "null"}]}, {"a": 1, "b": 2}, 2),
    "some required": ({"anyOf": [PLAIN, {"type": "null"}]}, {"a": 1}, 2),
    "some required, all there": ({"anyOf": [PLAIN, {"type": "null"}]}, {"a": 1, "b": 2}, 2),
    "asked for": (PLAIN | {"additionalProperties": True}, {"a": 1}, 2),
    "one is required and not declared": (PLAIN | {"required": ["a", "z"]}, {"a": 1, "b": 1, "z": 1}, 1),
    "combined: as many as all the names": ({"allOf": [PLAIN, NEIGHBOUR]}, {"a": 1, "b": 2, "c": 3}, 5),
}


@pytest.mark.parametrize(("schema", "declared", "most"), BOUNDED.values(), ids=BOUNDED)
def test_d12_an_open_object_ends_behind_a_number_of_undeclared_fields(
    vocabulary: Vocabulary, schema: Schema, declared: dict[str, int], most: int
) -> None:
    for count in range(most + 3):
        value = declared | {f"k{number}": number for number in range(count)}
        assert takes(vocabulary, schema, value) == (count <= most), value
        assert takes(vocabulary, schema, value, open_objects=True)


def test_d12_alternatives_still_exclude_each_other(vocabulary: Vocabulary) -> None:
    """Where branches were closed, an object of the second would pass for one that the first does not have."""
    schema = {"oneOf": [{"properties": {"a": NUMBER}}, PLAIN | {"required": ["b"]}]}
    structured = StructuredOutputs(json=json.dumps(schema | {"type": "object"}))
    error = tried(vocabulary, structured).error
    assert error is not None
    assert error.code == "unsupported_schema"


UNSUPPORTED: dict[str, Schema] = {
    "not": {"not": {}},
    "oneOf": {"oneOf": [{}, {}]},
    "idn-email": {"type": "string", "format": "idn-email"},
    "contains": {"contains": NUMBER},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "maxProperties": PLAIN | {"additionalProperties": NUMBER, "maxProperties": 1},
}


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_r8_what_is_not_supported_is_refused_beside_a_bounded_object_too(
    vocabulary: Vocabulary, keyword: str
) -> None:
    """The library is lenient with these schemas; what it would pass over is found before."""
    schema = {"anyOf": [PLAIN | {"properties": {"a": UNSUPPORTED[keyword], "b": {}}}, {"type": "null"}]}
    assert settled(schema)[1]
    for structured in (
        StructuredOutputs(json=json.dumps(schema)),
        StructuredOutputs(grammar=f"start: %json {json.dumps(schema)}"),
    ):
        error = tried(vocabulary, structured).error
        assert error is not None
        assert error.code == "unsupported_schema"
        assert keyword in error.message


def opened(value: Any) -> Any:
    """The schema without what closes its objects."""
    if isinstance(value, list):
        return [opened(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: opened(item) for name, item in value.items() if item is not False}


@pytest.mark.parametrize("seed", range(2))
def test_d12_what_is_drawn_is_valid_by_the_schema_as_it_was_given(vocabulary: Vocabulary, seed: int) -> None:
    """Alone, in branches, combined: closing and bounding refuse no schema, and let no wrong text through."""
    num_whole = 0
    for first, second in itertools.pairwise(map(opened, schemas(16, seed=seed))):
        defs = {"$defs": first.pop("$defs", {}) | second.get("$defs", {})}
        for schema in (
            first | defs,
            {"anyOf": [first, {"type": "null"}], **defs},
            {"oneOf": [first, {"type": "null"}], **defs},
            {"allOf": [first, second], **defs},
            {"$ref": "#/$defs/first", "maxProperties": 9, "$defs": defs["$defs"] | {"first": first}},
        ):
            asked = StructuredOutputs(json=json.dumps(schema))
            error = tried(vocabulary, asked).error
            assert error == tried(vocabulary, msgspec.structs.replace(asked, open_objects=True)).error
            tokens, is_whole = walk(Matcher(vocabulary, asked), random.Random(seed)) if not error else ([], 0)
            num_whole += is_whole
            if is_whole:
                jsonschema.validate(json.loads(text_of(tokens)), schema, format_checker=CHECKER)
    assert num_whole > 20


def test_a_text_of_a_plain_class_comes_to_its_end_by_itself(vocabulary: Vocabulary) -> None:
    """A model that knows nothing draws it from the masks alone; with open objects hardly any text ends."""
    for seed in range(8):
        structured = StructuredOutputs(json=json.dumps(PERSON))
        tokens, is_whole = walk(Matcher(vocabulary, structured), random.Random(seed), most=150)
        assert is_whole
        jsonschema.validate(json.loads(text_of(tokens)), PERSON)
