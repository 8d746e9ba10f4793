"""Turns arguments whose objects and lists are written as tags within tags into JSON.

A family writes `<place><city>Rome</city><zip>00184</zip></place>` for an object, and
`<days><item>1</item><item>2</item></days>` for a list. The tool's schema says which is which, and of what
type the innermost values are. If it does not, tags that are all named `item` are a list. Called by
`framed_calls`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tokenizer.argument_types import ArgumentTypes, json_argument, resolved
from penstock.tokenizer.tool_formats import Tags

ITEM = "item"
_MAX_DEPTH = 32


def nested_argument(text: str, tags: Tags, schema: Any, tool_types: ArgumentTypes, depth: int = 0) -> str:
    """Return the JSON of a value that may have tags in it.

    Args:
        schema: the schema of the value.
        tool_types: the types of all arguments of the tool.
    """
    types = tool_types.of(schema)
    plain = text.strip()
    if not plain and types and types <= {"array", "object", "null"}:
        return "[]" if "array" in types else "{}"
    children = _children(plain, tags) if plain.startswith(tags.key_open) and depth < _MAX_DEPTH else None
    if children is None:
        return json_argument(text, types)
    schema = resolved(schema, tool_types.root)
    is_list = all(key == ITEM for key, _ in children) if not types else "array" in types
    if is_list:
        of_item = schema.get("items")
        items = [nested_argument(value, tags, of_item, tool_types, depth + 1) for _, value in children]
        return f"[{', '.join(items)}]"
    properties = schema.get("properties")
    known: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
    entries = [
        f"{json.dumps(key, ensure_ascii=False)}: "
        f"{nested_argument(value, tags, known.get(key), tool_types, depth + 1)}"
        for key, value in children
    ]
    return f"{{{', '.join(entries)}}}"


def _children(text: str, tags: Tags) -> Sequence[tuple[str, str]] | None:
    """Return the name and the text of each outermost tag; None if the text is not tags alone.

    Args:
        text: without white space at its ends.
    """
    opening = re.compile(rf"\s*{re.escape(tags.key_open)}([^<>/\s]+){re.escape(tags.key_end)}")
    found, pos = [], 0
    while pos < len(text):
        match = opening.match(text, pos)
        if match is None:
            return None
        key = match[1]
        end = _end_of(text, match.end(), tags, key)
        if end < 0:
            return None
        found.append((key, text[match.end() : end]))
        pos = end + len(tags.end_of(key))
    return found


def _end_of(text: str, pos: int, tags: Tags, key: str) -> int:
    """Return the position of the closing tag of the value that begins at `pos`; -1 if there is none."""
    begin, end, depth = f"{tags.key_open}{key}{tags.key_end}", tags.end_of(key), 1
    while True:
        at = text.find(end, pos)
        if at < 0:
            return -1
        depth += text.count(begin, pos, at) - 1
        if not depth:
            return at
        pos = at + len(end)
