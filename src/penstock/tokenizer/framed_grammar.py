"""The grammars of calls whose arguments stand between marks: the parts that `tool_grammar` puts together.

How far the grammar binds a value to its schema depends on how the value is written:

- JSON follows the schema, also a number or a list between tags.
- Text between tags is one of the strings that the schema lists. If the schema lists none, any text may stand
  there, up to the tag that ends it.
- Literals of Gemma have the declared type. The insides of lists and objects are not bound.

`framed_calls` can read every call that these grammars allow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.tokenizer.argument_types import ArgumentTypes
from penstock.tokenizer.tool_formats import Frame, ToolFormat, with_attribute

_NOTHING = '""'
_NUMBER, _ID = "/[0-9]{1,4}/", "/[A-Za-z0-9_-]{1,40}/"
_KEY = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
_DEFINITIONS = ("$defs", "definitions")
_SCALARS = frozenset({"integer", "number", "boolean", "null"})
_IN_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

Schema = Mapping[str, Any]
Ids = Mapping[str, int]


def written(text: str, ids: Ids, *, is_exact: bool = False) -> str:
    """Return the expression for marks: tokens by id, other text as text, and line ends that may be left out.

    Args:
        text: one mark, or several in a row.
        ids: ids of the marks that are one token each.
        is_exact: line ends may not be left out.
    """
    marks = sorted((mark for mark in ids if mark), key=len, reverse=True)
    pattern = "|".join(["\n", *map(re.escape, marks)])
    parts, end = [], 0
    for match in re.finditer(pattern, text):
        parts += [text_of(text[end : match.start()])]
        line_end = '"\\n"' if is_exact else '"\\n"?'
        parts += [line_end if match[0] == "\n" else f"<[{ids[match[0]]}]>"]
        end = match.end()
    return " ".join(part for part in [*parts, text_of(text[end:])] if part)


def text_of(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def in_regex(text: str) -> str:
    escaped = re.sub(r"[\\^$.|?*+()\[\]{}/]", lambda match: "\\" + match[0], text)
    return escaped.replace("\n", "\\n")


def framed_calls(form: ToolFormat, frame: Frame, ids: Ids, *, is_single: bool) -> str:
    """Return the expression for one call if `is_single`, else for one or more calls, with their marks."""
    opening = "" if form.is_bare or form.is_opened or frame.call_written else form.opening
    opening, end = written(opening + frame.section_open, ids), written(frame.section_end, ids)
    if not frame.is_section:
        marked = joined(opening, "call", end)
        return marked if is_single else f'{marked} ("\\n"? {marked})*'
    more = "" if is_single else f"({joined(written(frame.separator, ids), 'call')})*"
    return joined(opening, "call", more, end)


def framed_call(frame: Frame, ids: Ids, name: str, index: int) -> str:
    """Return the expression for a call of this tool; `arguments_rules` has the rule of its arguments."""
    call_open = frame.call_written.replace("{name}", name) or frame.call_open
    if frame.id_end:
        head = joined(written(call_open, ids), _ID, written(f"{frame.id_end}{frame.prefix}{name}", ids))
    else:
        head = written(f"{call_open}{frame.prefix}{name}", ids)
    number = f'":" {_NUMBER}' if frame.has_index else ""
    name_end = written(frame.name_end_written or frame.name_end, ids)
    if frame.number_attribute:
        before, behind = with_attribute(frame.name_end, frame.number_attribute).split("{}")
        name_end = joined(written(before, ids), _NUMBER, written(behind, ids))
    return joined(head, number, name_end, f"arguments_{index}", written(frame.call_end, ids))


def arguments_rules(frame: Frame, ids: Ids, schema: Schema | None, index: int) -> Iterator[str]:
    """Yield the rules for the arguments of the tool with the number `index`.

    Args:
        schema: the schema of all arguments; None: the tool has no parameters.
    """
    arguments = _Arguments(frame, ids, {"properties": {}} if schema is None else schema, index)
    yield from arguments.tagged_rules() if frame.body == "tags" else arguments.listed_rules()


def gemma_rules(quote: str, ids: Ids) -> Iterator[str]:
    """Yield the rules of any value of Gemma."""
    yield "gemma: gemma_text | gemma_number | gemma_list | gemma_object"
    yield from _text_rules("gemma_text", quote, ids, before=written(quote, ids))
    yield 'gemma_number: "true" | "false" | "null" | /-?(0|[1-9][0-9]{0,20})(\\.[0-9]{1,20})?/'
    yield 'gemma_list: "[" (gemma ("," gemma)*)? "]"'
    yield f'gemma_object: "{{" (gemma_entry ("," gemma_entry)*)? "}}"\ngemma_entry: {_KEY} ":" gemma'


class _Arguments:
    """The arguments of one tool.

    Args:
        schema: the schema of all arguments.
        index: the tool's number, which is a part of the names of rules.
    """

    def __init__(self, frame: Frame, ids: Ids, schema: Schema, index: int) -> None:
        self._frame = frame
        self._ids = ids
        self._schema = schema
        self._types = ArgumentTypes(schema)
        self._index = index
        properties = schema.get("properties")
        self._properties: dict[str, Any] = dict(properties) if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        self._required = frozenset(required) if isinstance(required, list) else frozenset()
        # Undeclared arguments are allowed if the schema says so, or if it declares nothing at all.
        self._is_open = bool(schema.get("additionalProperties")) or "properties" not in schema

    # --- between tags -----------------------------------------------------------------------------------

    def tagged_rules(self) -> Iterator[str]:
        """Yield a rule for each argument, in the order of the schema; those not required may be missing."""
        index = self._index
        names = [
            f"argument_{index}_{number}{'' if key in self._required else '?'}"
            for number, key in enumerate(self._properties)
        ]
        others = [f"other_{index}*"] if self._is_open else []
        yield f"arguments_{index}: {' '.join([*names, *others]) or _NOTHING}"
        for number, (key, schema) in enumerate(self._properties.items()):
            yield from self._tagged(key, schema, f"argument_{index}_{number}")
        if self._is_open:
            yield from self._tagged("", {}, f"other_{index}")

    def _tagged(self, key: str, schema: Any, rule: str) -> Iterator[str]:
        """Yield the rules of one argument between its tags.

        Args:
            key: the name of the argument; "": any name.
        """
        tags = self._frame.tags
        assert tags is not None
        types = self._types.of(schema)
        is_text = not types or "string" in types
        key_end = tags.key_end_of(types)
        name = text_of(key) or _KEY
        head = f"{written(tags.key_open, self._ids)} {name} {written(key_end, self._ids)}"
        if key:
            head = written(f"{tags.key_open}{key}{key_end}", self._ids)
        value_end, behind = tags.end_of(key), ""
        if not key and "{key}" in tags.value_end:
            value_end, _, rest = tags.value_end.partition("{key}")
            behind = joined(_KEY, written(rest, self._ids))
        padding, end = text_of(tags.padding), written(value_end, self._ids)
        listed = _listed_texts(schema)
        if listed:
            yield f"{rule}: {joined(head, padding, f'({listed})', padding, end)}"
        elif is_text:
            yield f"{rule}: {joined(head, padding, f'{rule}_text', behind)}"
            yield from _text_rules(f"{rule}_text", value_end, self._ids)
        elif tags.is_nested and not types <= _SCALARS:
            tag, part = written(tags.key_open, self._ids), f"{rule}_part".upper()
            yield f"{rule}: {joined(head, part, f'({tag} {part})*', end)}"
            yield f"{part}: /(?s:.*)/"  # tags within the value, of any names
        else:
            yield f"{rule}: {joined(head, padding, f'{rule}_json', padding, end)}"
            yield f"{rule}_json: {self._json(schema)}"

    # --- between brackets -------------------------------------------------------------------------------

    def listed_rules(self) -> Iterator[str]:
        """Yield the rules of arguments with commas between them.

        A rule `head_...` holds while no argument has come, a rule `tail_...` once one has: then a comma
        stands before the next one.
        """
        index, is_python = self._index, self._frame.body == "python"
        opening, closing = ("", "") if is_python else ('"{"', '"}"')
        yield f"arguments_{index}: {joined(opening, f'head_{index}_0', closing)}"
        comma, assign = ('", "', "=") if is_python else ('","', ":")
        number = 0
        for number, (key, schema) in enumerate(self._properties.items()):
            item = f"{text_of(key + assign)} value_{index}_{number}"
            tail, is_required = f"tail_{index}_{number + 1}", key in self._required
            skipped = "" if is_required else f" | head_{index}_{number + 1}"
            yield f"head_{index}_{number}: {item} {tail}{skipped}"
            yield f"tail_{index}_{number}: ({comma} {item}){'' if is_required else '?'} {tail}"
            yield f"value_{index}_{number}: {self._value(schema)}"
            number += 1
        other = f"{_KEY} {text_of(assign)} {self._value({})}"
        more = f"({comma} {other})*" if self._is_open else _NOTHING
        yield f"tail_{index}_{number}: {more}"
        yield f"head_{index}_{number}: " + (f"({other} {more})?" if self._is_open else _NOTHING)

    def _value(self, schema: Any) -> str:
        types = self._types.of(schema)
        if self._frame.body == "python":
            return '"True" | "False"' if types == {"boolean"} else self._json(schema)
        if types == {"string"} and (listed := _listed_texts(schema)):
            quote = written(self._frame.quote, self._ids)
            return f"{quote} ({listed}) {quote}"
        if types == {"string"}:
            return "gemma_text"
        return self._json(schema) if types and types <= _SCALARS else "gemma"

    def _json(self, schema: Any) -> str:
        """Return the expression for one argument as JSON, with definitions if it may refer to them."""
        own = {**(schema if isinstance(schema, Mapping) else {}), "x-guidance": _IN_JSON}
        text = json.dumps(own)
        if '"$ref"' in text:
            definitions = {key: self._schema[key] for key in _DEFINITIONS if key in self._schema}
            text = json.dumps({**definitions, **own})
        return "%json " + text


def _text_rules(rule: str, end: str, ids: Ids, before: str = "") -> Iterator[str]:
    """Yield the rules of text up to the mark that ends it; the text cannot have that mark in it."""
    mark = end.strip("\n")
    after = written(end[end.index(mark) + len(mark) :], ids)
    if any(mark.startswith(token) for token in ids if token):
        text = rule.upper()
        yield f"{rule}: {joined(before, text, written(mark, ids), after)}"
        yield f"{text}: /(?s:.*)/ & ~/(?s:.*){in_regex(mark)}(?s:.*)/"
    else:
        yield f"{rule}: {joined(before, f'{rule}_whole', after)}"
        yield f"{rule}_whole[lazy]: /(?s:.*){in_regex(mark)}/"


def _listed_texts(schema: Any) -> str:
    """Return the strings that a schema lists, as alternatives; "" if it lists other values or none."""
    if not isinstance(schema, Mapping):
        return ""
    values: list[Any] = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
    if not all(isinstance(value, str) and value for value in values):
        return ""
    return " | ".join(text_of(value) for value in values)


def joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
