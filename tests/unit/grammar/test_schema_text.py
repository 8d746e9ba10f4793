"""Schemas and grammars as the library is given them (issue 25, point 16)."""

from __future__ import annotations

import json

import pytest

from penstock.errors import InvalidRequestError
from penstock.grammar.schema_text import json_schema, lark_grammar, schemas_within
from schemas import schemas

PLAIN = '{"properties": {"a": {}}}'
CLOSED = '{"properties": {"a": {}}, "additionalProperties": false}'


def test_whole_numbers_are_written_without_a_fraction_and_uniqueness_only_where_it_is_asked_for() -> None:
    counts = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
    schema = dict.fromkeys(counts, 2.0) | {"uniqueItems": False}
    found = json_schema(json.dumps({"items": schema}), open_objects=False).text
    assert found == json.dumps({"items": dict.fromkeys(counts, 2)})
    kept = '{"minimum": 2.0, "uniqueItems": true, "const": {"maxItems": 2.0, "uniqueItems": false}}'
    assert json_schema(kept, open_objects=False).text == kept


def test_what_needs_no_change_is_given_as_it_came() -> None:
    for schema in schemas(30):
        text = json.dumps(schema, indent=1)
        if "\\s" not in text:
            assert json_schema(text, open_objects=True).text == text


def test_objects_in_a_grammar_are_closed_as_in_a_schema() -> None:
    grammar = f'start: a | "b"\na: %json {PLAIN} "c" %json\n {PLAIN}\n'
    assert lark_grammar(grammar, open_objects=False).text == grammar.replace(PLAIN, CLOSED)
    assert lark_grammar(grammar, open_objects=True).text == grammar


@pytest.mark.parametrize(
    "word",
    ['"%json {"', '"\\"%json {"', "// %json {", "# %json {", "/%json {/", "/a\\/\n%json {/", "<%json>"],
)
def test_r8_only_a_schema_is_taken_for_one(word: str) -> None:
    """What is passed over as a literal or a comment is one for the library too, and the other way round."""
    grammar = f"start: {word}\n  %json {PLAIN} {word}\n"
    assert [*schemas_within(grammar)] == [json.loads(PLAIN)]


@pytest.mark.parametrize("rest", ["", "{", "nan", "{'a'}", "[" * 100_000, '"', "\\"])
def test_r8_what_is_no_json_behind_the_word_is_refused(rest: str) -> None:
    with pytest.raises(InvalidRequestError, match="%json") as raised:
        list(schemas_within("start: %json " + rest))
    assert raised.value.code == "invalid_schema"


@pytest.mark.parametrize("piece", ['"', "/", "\\/", '\\"', "/a\\", "<", "#"])
def test_r8_a_grammar_of_any_pieces_is_read_in_one_go(piece: str) -> None:
    """A text of 64 KiB that never closes what it opens; quadratic work would take minutes."""
    assert [*schemas_within("start: a" + piece * (65_000 // len(piece)))] == []
