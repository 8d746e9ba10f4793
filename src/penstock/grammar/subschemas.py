"""The places of schemas within a JSON schema, and the values to which JSON pointers lead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")  # as RFC 6901 has it, without zeros before it
Steps = tuple[str, ...]  # from the root of a document to a value in it: names of fields, indices of lists

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[Steps, Any]]:
    """Yield each schema that stands directly within `schema`, with the steps to it."""
    for keyword in _BY_NAME:
        if isinstance(schema.get(keyword), dict):
            for name, nested in schema[keyword].items():
                yield (keyword, name), nested
    for keyword in _LISTS:
        if isinstance(schema.get(keyword), list):
            for index, nested in enumerate(schema[keyword]):
                yield (keyword, str(index)), nested
    for keyword in _SINGLE:
        if keyword in schema and not isinstance(schema[keyword], list):
            yield (keyword,), schema[keyword]


def every_schema(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each schema of a document once: schemas at places of keywords, and targets of references.

    All references must be JSON pointers that lead somewhere; `references` writes them so.
    """
    found: dict[int, dict[str, Any]] = {}
    waiting: list[Any] = [document]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in found:
            continue
        found[id(schema)] = schema
        waiting += [nested for _, nested in subschemas(schema)]
        if isinstance(schema.get("$ref"), str):
            waiting.append(value_at(document, steps_of(schema["$ref"])))
    return list(found.values())


def steps_of(pointer: str) -> Steps:
    """Return the steps of a JSON pointer that is written as a fragment (RFC 6901, section 6)."""
    if pointer == "#":
        return ()
    steps = unquote(pointer.removeprefix("#/")).split("/")
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in steps)


def pointer_to(steps: Steps) -> str:
    """Return the JSON pointer of these steps, as a fragment."""
    escaped = (quote(step.replace("~", "~0").replace("/", "~1"), safe="") for step in steps)
    return "#" + "".join(f"/{step}" for step in escaped)


def value_at(document: Any, steps: Steps) -> Any:
    """Return the value to which the steps lead. Raises `KeyError` where they lead nowhere."""
    value = document
    for step in steps:
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and _INDEX.fullmatch(step) and int(step) < len(value):
            value = value[int(step)]
        else:
            raise KeyError(step)
    return value
