"""Writes calls in the form of a model's family, and lists the tools for a model whose template does not.

Some templates leave former calls out of a conversation, or do not show tools. A model that was trained for
calls then does not see what it has done, or what it can do. So `chat_template` adds to the prompt what is
written here: former calls to the text of their message, and tools, with an example of a call, to the system
message. The form of calls is a row of `form_table`. Tests read back the calls that are written here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tokenizer.argument_types import json_type
from penstock.tokenizer.nested_arguments import ITEM
from penstock.tokenizer.tool_formats import CALL_ID, NAME_END, Frame, Tags, ToolFormat, with_attribute

_TOOLS = """## Tools
You can call these tools:
{tools}

To call one or more of them, write calls in exactly this form, with the name of a tool and arguments that \
fit its parameters:
{example}"""
_EXAMPLE = {"first_argument": "value", "second_argument": 2}


def written_tools(form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a text for the system message: the tools, and an example of a call in this form."""
    shown = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return _TOOLS.format(tools=shown, example=written_calls(form, [("tool_name", _EXAMPLE)]))


def written_calls(form: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return calls, each given by its name and arguments, with all of their marks."""
    if form.frame is not None:
        return _framed(form, form.frame, calls)
    if form.is_named:
        end = NAME_END if CALL_ID in form.markers else ""
        return "".join(f"{form.opening}{name}{end}{_json(arguments)}" for name, arguments in calls)
    objects = [_object(form, index, *call) for index, call in enumerate(calls)]
    if form.is_list or (form.is_bare and len(objects) > 1):
        opening = "" if form.is_bare else form.opening
        return f"{opening}[{', '.join(objects)}]{form.closing}"
    if form.is_lines:
        return form.padding.join([form.opening, *objects, form.closing])
    opening, padding = ("", "") if form.is_bare else (form.opening, form.padding)
    return padding.join(f"{opening}{padding}{one}{padding}{form.closing}" for one in objects)


def _object(form: ToolFormat, index: int, name: str, arguments: Mapping[str, Any]) -> str:
    head = {form.index_key: str(index)} if form.index_key else {}
    return _json({**head, form.name_key: name, form.arguments: arguments})


def _framed(form: ToolFormat, frame: Frame, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    written = [
        f"{frame.call_open}{_head(frame, index, name)}{_body(frame, arguments)}{frame.call_end}"
        for index, (name, arguments) in enumerate(calls)
    ]
    if frame.is_section:
        opening = frame.section_open if form.is_bare else f"{form.opening}{frame.section_open}"
        return f"{opening}{frame.separator.join(written)}{frame.section_end}"
    return "\n".join(f"{form.opening}{one}{frame.section_end}" for one in written)


def _head(frame: Frame, index: int, name: str) -> str:
    """Return a call's id, name and number, with the marks between them."""
    id_ = f"call_{index}{frame.id_end}" if frame.id_end else ""
    number, name_end = f":{index}" if frame.has_index else "", frame.name_end
    if frame.number_attribute:
        name_end = with_attribute(name_end, frame.number_attribute.format(index + 1))
    return f"{id_}{frame.prefix}{name}{number}{name_end}"


def _body(frame: Frame, arguments: Mapping[str, Any]) -> str:
    if frame.body == "json":
        return _json(arguments)
    if frame.body == "python":
        return ", ".join(f"{key}={_python(value)}" for key, value in arguments.items())
    if frame.body == "gemma":
        return _gemma(arguments, frame.quote)
    return "".join(_tagged(frame, key, value) for key, value in arguments.items())


def _tagged(frame: Frame, key: str, value: Any) -> str:
    tags = frame.tags
    assert tags is not None
    begin = f"{tags.key_open}{key}{tags.key_end_of({json_type(value)})}"
    return f"{begin}{tags.padding}{_tagged_text(tags, value)}{tags.padding}{tags.end_of(key)}"


def _tagged_text(tags: Tags, value: Any) -> str:
    if tags.is_nested and isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else ((ITEM, item) for item in value)
        return "".join(
            f"{tags.key_open}{key}{tags.key_end}{_tagged_text(tags, item)}{tags.end_of(key)}"
            for key, item in entries
        )
    text = value if isinstance(value, str) else _json(value)
    is_quoted = tags.quotes[0] and isinstance(value, str) and ("<" in text or "&" in text)
    return f"{tags.quotes[0]}{text}{tags.quotes[1]}" if is_quoted else text


def _python(value: Any) -> str:
    return _json(value) if isinstance(value, str) else repr(value)


def _gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_gemma(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(item, quote) for item in value) + "]"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
