"""Decides what undeclared fields an object may have, if its JSON schema does not say: none, or a few.

A field is declared if `properties` has its name. By JSON Schema an object is open: it may have any further
fields. A weak model then invents fields until its text is cut short.

So an object with `properties` is closed where that is sound: some texts are no longer possible, and every
text that still is possible is valid by the original schema. In two cases the number of undeclared fields is
bounded instead:

- Schemas are combined. Closing one of them could leave no text at all, or a text that is valid by two
  alternatives of `oneOf`, which allows one.
- The schema asks for undeclared fields. For example, `required` has names that are not declared.

The library bounds the number of fields by `maxProperties`. But it refuses that keyword beside declared fields
that are not required, unless it reads the schema leniently. A lenient library does not count those fields,
which is what is wanted here. But it also passes over keywords that it does not support. So a schema that
needs leniency must first be built without it, with open objects (`grammar.proving_process`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.grammar.subschemas import steps_of, subschemas, value_at

# Keywords that the library combines with the other constraints of the schema in which they stand.
_APPLIED = frozenset({"allOf", "anyOf", "oneOf", "$ref", "const", "enum", "not", "if", "then", "else"})
_CONSTRAINTS = _APPLIED | {
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "minProperties",
    "maxProperties",
    "type",
    *("items", "prefixItems", "minItems", "maxItems"),
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_BRANCHES = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else"})


@dataclass(slots=True)
class _Use:
    """A schema, and what holds of at least one of the places where it is used.

    Attributes:
        in_branch: the schema, or one around it, is a branch of `allOf`, `anyOf`, `oneOf`, `not`, `if`, `then`
            or `else`, or the target of a `$ref` beside other constraints.
        is_combined: the library may merge the schema with another one.
    """

    schema: Any
    in_branch: bool
    is_combined: bool


def settle_objects(document: dict[str, Any]) -> bool:
    """Close the open objects of a document where that is sound, and bound the others.

    Some objects stay as they are:

    - maps, which are objects without `properties` or with a schema for undeclared fields,
    - objects that cannot be closed, and have a `maxProperties` or declare no field.

    Returns:
        whether the library must read the document leniently.
    """
    uses = _uses_of(document)
    names: set[str] = set()
    for use in uses:
        names |= {*_declared(use.schema), *_required(use.schema)}
    is_lenient = False
    for use in uses:
        if not _is_open(use.schema):
            continue
        if _may_close(use):
            use.schema["additionalProperties"] = False
        elif "maxProperties" not in use.schema and _declared(use.schema):
            is_lenient |= _bound(use, len(names))
    return is_lenient


def _is_open(schema: dict[str, Any]) -> bool:
    return isinstance(schema.get("properties"), dict) and schema.get("additionalProperties") in (
        None,
        True,
        {},
    )


def _may_close(use: _Use) -> bool:
    schema = use.schema
    declared = _declared(schema)
    return not (
        use.in_branch
        or use.is_combined
        or schema.keys() & (_APPLIED | {"additionalProperties", "patternProperties"})
        or _required(schema) - declared
        or schema.get("minProperties", 0) > len(declared)
    )


def _bound(use: _Use, num_names: int) -> bool:
    """Bound the number of undeclared fields of an object; return whether the library must be lenient for it.

    The bound is the number of fields that the object declares, or what `required` and `minProperties` ask
    for if that is more. An object that is combined has the bound `2 * num_names`, for all objects with which
    it may be merged: once for their required fields, which the library counts too, once for undeclared ones.

    Args:
        num_names: number of names of fields, declared or required, in the whole document.
    """
    schema, declared, required = use.schema, _declared(use.schema), _required(use.schema)
    if use.is_combined or schema.keys() & _APPLIED:
        schema["maxProperties"] = 2 * num_names
        return True
    free = max(0, len(declared) - len(required - declared))
    schema["maxProperties"] = max(len(required) + free, schema.get("minProperties", 0))
    return bool(declared - required)


def _declared(schema: dict[str, Any]) -> set[str]:
    properties = schema.get("properties")
    return set(properties) if isinstance(properties, dict) else set()


def _required(schema: dict[str, Any]) -> set[str]:
    required = schema.get("required")
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def _uses_of(document: dict[str, Any]) -> list[_Use]:
    """Return each schema that the root of a document leads to, once.

    A schema in `$defs` or `definitions` is among them only if a `$ref` leads to it.
    """
    found: dict[int, _Use] = {}
    waiting = [_Use(document, in_branch=False, is_combined=False)]
    while waiting:
        new = waiting.pop()
        if not isinstance(new.schema, dict):
            continue
        known = found.get(id(new.schema))
        if known is not None:
            both = _Use(new.schema, known.in_branch or new.in_branch, known.is_combined or new.is_combined)
            if both == known:
                continue
            new = both
        found[id(new.schema)] = new
        waiting += _uses_within(new, document)
    return list(found.values())


def _uses_within(use: _Use, document: dict[str, Any]) -> Iterator[_Use]:
    schema = use.schema
    constraints = schema.keys() & _CONSTRAINTS
    is_combined = use.is_combined or _combines(schema, constraints)
    for (keyword, *_), nested in subschemas(schema):
        if keyword not in ("$defs", "definitions"):
            yield _Use(nested, use.in_branch or keyword in _BRANCHES, is_combined)
    if isinstance(schema.get("$ref"), str):
        target = value_at(document, steps_of(schema["$ref"]))
        yield _Use(target, use.in_branch or len(constraints) > 1, is_combined)


def _combines(schema: dict[str, Any], constraints: set[str]) -> bool:
    """Return whether the library merges schemas within a schema with each other, or with its constraints."""
    if constraints & _APPLIED and len(constraints - {"type"}) > 1:
        return True
    all_of = schema.get("allOf")
    is_several = isinstance(all_of, list) and len(all_of) > 1
    return is_several or {"properties", "patternProperties"} <= constraints
