"""JSON schemas as APIs have them, made from a seed: records, lists, unions, references, enums.

Strings, arrays and numbers have bounds. The embedded model has learnt from a text without a double quote, and
with hardly a digit but 3: a string or a number that may go on for ever does so there, and says nothing of how
grammars work. `schemas(n)` always gives the same ones.
"""

from __future__ import annotations

import json
import random
from typing import Any

Schema = dict[str, Any]

_NAMES = "id name title email age size price tags owner items kind status note city street code unit due"
_WORDS = "draft open closed small large red green low high north south alpha beta yes no"
_FORMATS = ["date", "date-time", "time", "uuid", "ipv4", "email", "hostname", "duration"]
_PATTERNS = [
    r"^[A-Z]{2,4}-[0-9]{3,6}$",
    r"^#[0-9a-f]{6}$",
    r"^v[0-9]{1,2}\.[0-9]{1,2}(-(rc|beta))?$",
    r"^[a-z]([a-z0-9_]{0,14})$",
    r"^(?:[01][0-9]|2[0-3]):[0-5][0-9]$",
    r"^[^\s@]{1,8}@[a-z]{2,8}\.(com|org)$",
]


def schemas(count: int, seed: int = 20261122) -> list[Schema]:
    """The first `count` of an endless row of schemas."""
    return [_Maker(random.Random(f"{seed}/{number}")).root() for number in range(count)]


class _Maker:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._defs: dict[str, Schema] = {}

    def root(self) -> Schema:
        """Mostly an object, with what it refers to."""
        roll = self._chance.random()
        if roll < 0.75:
            schema = self._object(0)
        elif roll < 0.85:
            schema = self._array(0)
        else:
            schema = self._value(0)
        if self._defs:
            schema["$defs"] = self._defs
        if self._chance.random() < 0.3:
            schema |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Answer"}
        return schema

    def _value(self, depth: int) -> Schema:
        kinds = [self._string] * 4 + [self._number] * 3 + [self._plain] * 2 + [self._choice] * 2
        if depth < 3:
            kinds += [self._object] * 2 + [self._array] * 2 + [self._union] * 2 + [self._reference] * 2
        made = self._chance.choice(kinds)(depth)
        if self._chance.random() < 0.15:
            made["description"] = "as the user has said"
        return made

    def _plain(self, depth: int) -> Schema:
        return {"type": self._chance.choice(["boolean", "null", "boolean"])}

    def _choice(self, depth: int) -> Schema:
        roll = self._chance.random()
        if roll < 0.6:
            return {"type": "string", "enum": self._chance.sample(_WORDS.split(), self._chance.randint(1, 5))}
        if roll < 0.8:
            return {
                "enum": [*self._chance.sample(_WORDS.split(), 2), self._chance.randint(-5, 500), None, True]
            }
        return {"const": self._chance.choice([*_WORDS.split(), 7, 1.5, False, ["a", 1], {"k": 'v "q" \\ é'}])}

    def _string(self, depth: int) -> Schema:
        roll = self._chance.random()
        if roll < 0.2:
            return {"type": "string", "pattern": self._chance.choice(_PATTERNS)}
        if roll < 0.4:
            return {"type": "string", "format": self._chance.choice(_FORMATS), "maxLength": 40}
        low = self._chance.choice([0, 0, 1, 3])
        return {"type": "string", "minLength": low, "maxLength": low + self._chance.choice([1, 8, 30, 60])}

    def _number(self, depth: int) -> Schema:
        low = self._chance.choice([0, 0, 1, -40, -1000])
        high = low + self._chance.choice([1, 9, 100, 86_400])
        roll = self._chance.random()
        if roll < 0.5:
            return {"type": "integer", "minimum": low, "maximum": high}
        if roll < 0.6:
            return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 2}
        if roll < 0.7:
            return {
                "type": "integer",
                "minimum": 0,
                "maximum": 5000,
                "multipleOf": self._chance.choice([5, 10, 25]),
            }
        if roll < 0.8:
            return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": high}]}
        return {
            "type": "number",
            "minimum": low,
            "maximum": high,
            "multipleOf": self._chance.choice([0.25, 0.5]),
        }

    def _array(self, depth: int) -> Schema:
        if self._chance.random() < 0.2:
            items = [self._value(depth + 1) for _ in range(self._chance.randint(1, 3))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        low = self._chance.choice([0, 0, 1, 2])
        bounds = {"minItems": low, "maxItems": low + self._chance.randint(0, 4)}
        return {"type": "array", "items": self._value(depth + 1)} | bounds

    def _object(self, depth: int) -> Schema:
        names = self._chance.sample(_NAMES.split(), self._chance.randint(1, 5))
        properties = {name: self._value(depth + 1) for name in names}
        required = [name for name in names if self._chance.random() < 0.7]
        made: Schema = {"type": "object", "properties": properties, "required": required}
        made["additionalProperties"] = False
        if depth and self._chance.random() < 0.1:
            del made["additionalProperties"]
            made["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
            made["maxProperties"] = len(names) + 2
            del made["properties"], made["required"]
        return made

    def _union(self, depth: int) -> Schema:
        roll = self._chance.random()
        if roll < 0.4:
            return {"anyOf": [self._value(depth + 1) for _ in range(self._chance.randint(2, 3))]}
        if roll < 0.6:
            kinds = self._chance.sample(_WORDS.split(), 2)
            return {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {"kind": {"const": kind}, "value": self._value(depth + 2)},
                        "required": ["kind", "value"],
                        "additionalProperties": False,
                    }
                    for kind in kinds
                ]
            }
        if roll < 0.8:
            return {"type": ["string", "null"], "maxLength": 20}
        return {"type": ["integer", "boolean"], "minimum": 0, "maximum": 99}

    def _reference(self, depth: int) -> Schema:
        name = self._chance.choice(["Person", "Node", "Money"])
        if name not in self._defs:
            self._defs[name] = {}  # so that a reference in it finds it
            self._defs[name] |= self._definition(name)
        return {"$ref": f"#/$defs/{name}"}

    def _definition(self, name: str) -> Schema:
        if name == "Node":  # holds itself
            properties: Schema = {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
            }
        elif name == "Money":
            properties = {
                "amount": {"type": "integer", "minimum": 0, "maximum": 100_000},
                "currency": {"type": "string", "pattern": "^[A-Z]{3}$"},
            }
        else:
            properties = {
                "name": {"type": "string", "maxLength": 24},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
            }
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }


def text(schema: Schema) -> str:
    return json.dumps(schema)
