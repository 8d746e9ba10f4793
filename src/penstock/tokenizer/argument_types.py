"""The types of a tool's arguments, and the JSON of an argument that a model wrote as bare text.

In the XML forms of calls a value has no quotes: only the tool's JSON schema says whether `5` is a number or a
string. A string stays the text that it is. Called by the readers (`framed_calls`, `nested_arguments`) and by
what writes calls and their grammars (`call_writer`, `framed_grammar`), so that all see the same types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.tokenizer.literals import json_number, json_of_literal

Schema = Mapping[str, Any]

_MAX_REFERENCES = 8
_NUMBERS = frozenset({"integer", "number"})
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_NAME_OF = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}


class ArgumentTypes:
    """The types of the values of one tool's arguments.

    Each schema is read once, since arguments and definitions may all refer to the same large definition.

    Args:
        root: the schema of all arguments, in which a `$ref` finds definitions.
    """

    def __init__(self, root: Schema) -> None:
        self.root = root
        # By the `id` of a schema and the number of references that may still be followed: the types of that
        # schema, and the schema itself, so that no other one gets its `id`.
        self._known: dict[tuple[int, int], tuple[frozenset[str], Schema]] = {}

    def of(self, schema: Any) -> frozenset[str]:
        """Return the names of the JSON types that a value may have; empty if its schema does not say."""
        return self._types(schema, _MAX_REFERENCES)

    def _types(self, schema: Any, num_references: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or not num_references:
            return frozenset()
        key = id(schema), num_references
        if key not in self._known:
            self._known[key] = self._types_declared(schema, num_references), schema
        return self._known[key][0]

    def _types_declared(self, schema: Schema, num_references: int) -> frozenset[str]:
        if "$ref" in schema:
            return self._types(_referred(schema["$ref"], self.root), num_references - 1)
        declared = schema.get("type")
        if isinstance(declared, str):
            return frozenset({declared}) | ({"null"} if schema.get("nullable") else frozenset())
        if isinstance(declared, list):
            return frozenset(filter(lambda name: isinstance(name, str), declared))
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                parts = [self._types(part, num_references - 1) for part in schema[key]]
                return frozenset().union(*parts) if all(parts) else frozenset()
        if isinstance(schema.get("allOf"), list):
            every = [self._types(part, num_references - 1) for part in schema["allOf"]]
            return next(filter(None, every), frozenset())
        return _types_of_values(schema)


def json_argument(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that was written as bare text.

    A text that fits none of the types becomes a string, so that the client sees what the model has written.
    """
    if types == {"string"}:
        return _quoted(text)
    plain = text.strip()
    value = _other_than_string(plain) or (json_number(plain) if types & _NUMBERS else "")
    kind = _type_of(value) if value else ""
    if kind and (not types or kind in _widened(types)):
        return value
    return _quoted(text)


def _other_than_string(text: str) -> str:
    """Return the text as JSON of another type than a string, if it means one in JSON or Python; else ""."""
    word = _WORDS.get(text.lower())
    if word is not None:
        return word
    if text[:1] in ("{", "["):
        return text if _is_json(text) else json_of_literal(text)
    return text if _is_json(text) and not text.startswith('"') else ""


def json_type(value: Any) -> str:
    """Return the name of the JSON type of a decoded value."""
    return "null" if value is None else _NAME_OF.get(type(value), "object")


def _type_of(value: str) -> str:
    """Return the JSON type of a value; "" if it cannot be decoded, such as 1e999 or half a surrogate pair."""
    try:
        return json_type(msgspec.json.decode(value.encode()))
    except (msgspec.DecodeError, UnicodeError):
        return ""


def _widened(types: frozenset[str]) -> frozenset[str]:
    """Return the types, and those that may stand in their place: `3` for a number, `3.0` for an integer."""
    return types | _NUMBERS if types & _NUMBERS else types


def resolved(schema: Any, root: Schema) -> Schema:
    """Return a schema, or the definition to which its `$ref` leads; an empty one if there is no schema."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        if "$ref" not in schema:
            return schema
        schema = _referred(schema["$ref"], root)
    return {}


def _types_of_values(schema: Schema) -> frozenset[str]:
    """Return the types of the values that a schema lists."""
    listed = schema.get("enum")
    values = listed if isinstance(listed, list) else [schema[key] for key in ("const",) if key in schema]
    return frozenset(map(json_type, values))


def _referred(reference: Any, root: Schema) -> Any:
    """Return the definition within `root` that a local reference names; None where there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].strip("/").split("/"):
        if part and not isinstance(found, Mapping):
            return None
        if part:
            found = found.get(part.replace("~1", "/").replace("~0", "~"))
    return found


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True
