"""Writes calls as a row of `tool_formats` has them, and tells a model of tools where its template does not.

Some templates leave former calls out of a conversation, or take no tools. A model that was trained for calls
then sees neither what it has done nor what it can do; so the calls are written into the text of the message,
and the tools into the system's, each in the model's own form. `chat_template` does so; tests read back what
is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tokenizer.tool_formats import CALL_ID, NAME_END, Frame, ToolFormat

_TOOLS = """## Tools
You can call these tools:
{tools}

To call one or more of them, write calls in exactly this form, with the name of a tool and arguments that \
fit its parameters:
{example}"""
_EXAMPLE = {"first_argument": "value", "second_argument": 2}


def written_tools(form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a text about the tools, and about how they are called."""
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
    opening, padding = ("", "") if form.is_bare else (form.opening, form.padding)
    return padding.join(f"{opening}{padding}{one}{padding}{form.closing}" for one in objects)


def _object(form: ToolFormat, index: int, name: str, arguments: Mapping[str, Any]) -> str:
    head = {form.index_key: str(index)} if form.index_key else {}
    return _json({**head, form.name_key: name, form.arguments: arguments})


def _framed(form: ToolFormat, frame: Frame, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    written = [
        f"{frame.call_open}{frame.prefix}{name}{f':{index}' if frame.has_index else ''}{frame.name_end}"
        f"{_body(frame, arguments)}{frame.call_end}"
        for index, (name, arguments) in enumerate(calls)
    ]
    if frame.is_section:
        return f"{form.opening}{frame.separator.join(written)}{frame.section_end}"
    return "\n".join(f"{form.opening}{one}{frame.section_end}" for one in written)


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
    text = value if isinstance(value, str) else _json(value)
    key_end = tags.key_end
    if tags.says_type:
        key_end = key_end.replace(">", f' string="{_json(isinstance(value, str))}">')
    return f"{tags.key_open}{key}{key_end}{tags.padding}{text}{tags.padding}{tags.value_end}"


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
