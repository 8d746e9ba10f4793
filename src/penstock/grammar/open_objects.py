"""Decides what undeclared fields an object may have, if its JSON schema does not say: none, or a few.

By JSON Schema such an object is open, and a weak model goes on with fields of its own until its text is cut
short. So an object that declares its fields is closed where that only takes texts away, and every text that
is left is valid by the schema as it was given. Where schemas are combined, closing one of them could leave no
text, or one that is valid by two alternatives of `oneOf`; there, and where the schema asks for undeclared
fields, their number is bounded.

The library bounds the number of fields by `maxProperties`, but refuses it beside fields that are not
required unless it reads the schema leniently. Then it counts the undeclared fields alone, which is what is
wanted here. Leniency also passes over what is not supported; so a schema that needs it must be found good
without it first (`grammar.proving_process`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.grammar.subschemas import steps_of, subschemas, value_at

# What the library combines with the other constraints of the schema in which it stands.
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
    """The uses of a schema, all together.

    Attributes:
        in_branch: in a branch of alternatives, or of schemas that must all fit.
        is_combined: the library may merge it with another schema.
    """

    schema: Any
    in_branch: bool
    is_combined: bool


def settle_objects(document: dict[str, Any]) -> bool:
    """Close the open objects of a document where that is sound, and bound the others.

    An object whose undeclared fields have a schema of their own is a map with some known keys, and stays as
    it is; so does one that declares none.

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
    """Bound the undeclared fields of an object. Return whether that takes leniency.

    Args:
        num_names: names of fields in the whole document: those of an object that is combined are among them.
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
    """Return the schemas that the root of a document leads to; a definition counts where it is used."""
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
    """Return whether the library merges what stands within a schema with something else in it."""
    if constraints & _APPLIED and len(constraints - {"type"}) > 1:
        return True
    all_of = schema.get("allOf")
    is_several = isinstance(all_of, list) and len(all_of) > 1
    return is_several or {"properties", "patternProperties"} <= constraints
