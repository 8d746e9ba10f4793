"""Tools in chat templates: rendered as transformers does, in the form that each template takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from paths import shared_data
from penstock.errors import InvalidRequestError
from penstock.tokenizer.chat_template import CallForm, JinjaChatTemplate
from penstock.tokenizer.template_files import load_chat_template
from penstock.tokenizer.tokenizer import JsonTokenizer, load_tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

# Written for these tests, with the constructs that published templates with tools are made of.
TAGGED = """{%- if tools %}
    {{- 'system: ' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\nAnswer <tool_call>{"name": ..., "arguments": ...}</tool_call>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- 'assistant: ' }}
        {%- if message.reasoning_content is string %}
            {{- '<think>' + message.reasoning_content.strip('\\n') + '</think>' }}
        {%- endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls %}
            {%- set tool_call = tool_call.function %}
            {{- '<tool_call>{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else (tool_call.arguments | tojson) }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '\\n' }}
    {%- else %}
        {{- message.role + ': ' + message.content + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant: ' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}
{%- endif %}"""
OBJECTS = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception('one call at once') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
    {%- elif message.role == 'tool' %}
        {{- {'output': message.content} | tojson }}
    {%- else %}
        {{- message.role + ': ' + message['content'] | trim }}
    {%- endif %}
    {{- eos_token }}
{%- endfor %}"""
SHORT_IDS = """{%- set loop_messages = messages %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in loop_messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- '[TOOLS][' }}
            {%- for tool in tools %}
                {%- for key, val in tool.function.items() if key != 'return' %}
                    {{- '"' + key + '": ' }}{{- '"' + val + '"' if val is string else val | tojson }}
                    {%- if not loop.last %}{{- ', ' }}{%- endif %}
                {%- endfor %}
            {%- endfor %}
            {{- ']' }}
        {%- endif %}
        {{- message.content }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS][' }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception('ids have nine characters') }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '{"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- else %}
        {{- message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""
TEXTS = """{%- for message in messages %}
    {%- if message.role == 'assistant' and message['tool_calls'] %}
        {%- for tool in message['tool_calls'] %}
            {{- tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments'] + '\\n```' }}
        {%- endfor %}
    {%- endif %}
    {%- if message.content is not none %}{{- '|' + message.role + ': ' + message.content }}{%- endif %}
{%- endfor %}
{%- if tools %}{{- tools | length }}{%- endif %}"""
TEMPLATES = {"tagged": TAGGED, "objects": OBJECTS, "short ids": SHORT_IDS, "texts": TEXTS}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": 'Looks "it" up & tells <all>, also in Zürich.',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Rome", "Zürich"]}},
                "required": ["city"],
            },
        },
    }
]
ARGUMENTS = '{"city": "Zürich", "deep": {"a": [1, 2.5, null, true]}}'


def conversation(arguments: Any, content: str | None = "") -> list[dict[str, Any]]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [
        {"role": "user", "content": "How is Zürich?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"sun": 1}'},
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "\nSun is 1.\n"},
        {"role": "user", "content": "Thanks."},
    ]


def tokenizer() -> JsonTokenizer:
    loaded = load_tokenizer(shared_data("models", "stories260K"))
    assert isinstance(loaded, JsonTokenizer)
    return loaded


def template(source: str) -> JinjaChatTemplate:
    return JinjaChatTemplate(source, SPECIAL, tokenizer())


def by_transformers(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    options = {"tools": None, "add_generation_prompt": True} | options
    rendered, _ = render_jinja_template([messages], chat_template=source, **options, **SPECIAL)
    return str(rendered[0])


@pytest.mark.parametrize("with_tools", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_with_tools_render_as_transformers_does(name: str, with_tools: bool) -> None:
    """Clients send arguments as text; transformers must be given them as the template takes them."""
    source, tools = TEMPLATES[name], TOOLS if with_tools else None
    chat = template(source)
    form = chat.call_form
    taken = ARGUMENTS if form.is_text else json.loads(ARGUMENTS)
    expected = by_transformers(source, conversation(taken, form.content), tools=tools)
    assert '"city": "Zürich"' in expected
    for sent in (ARGUMENTS, json.loads(ARGUMENTS)):
        for content in (None, ""):
            assert chat.render(conversation(sent, content), tools=tools) == expected


def test_each_template_gets_arguments_in_the_form_that_it_takes() -> None:
    assert template(TAGGED).call_form == CallForm(is_text=True, content="")
    assert template(OBJECTS).call_form == CallForm(is_text=False, content="")
    assert template(SHORT_IDS).call_form == CallForm(is_text=False, content="")
    assert template(TEXTS).call_form == CallForm(is_text=True, content=None)
    assert template("{{ messages[0].content }}").call_form == CallForm()


def test_arguments_that_are_no_json_reach_the_template_as_they_are() -> None:
    rendered = template(OBJECTS).render(conversation("{broken"))
    assert rendered == by_transformers(OBJECTS, conversation("{broken"))
    assert '"{broken"' in rendered
    assert '"parameters": {}' in template(OBJECTS).render(conversation(None))
    assert "{broken}" in template(TAGGED).render(conversation("{broken"))


def test_a_template_tells_which_variables_it_reads() -> None:
    assert {"tools", "enable_thinking", "messages"} <= template(TAGGED).reads
    assert "tool_calls" not in template("{# tools #}{{ messages[0].tools }}{{ 'tools' }}").reads
    assert "tools" not in template("{# tools #}{{ messages[0].tools }}{{ 'tools' }}").reads


def test_a_developer_is_the_system_to_templates_that_know_only_that() -> None:
    messages = [{"role": "developer", "content": "a"}]
    assert template("{{ messages[0].role }}").render(messages) == "system"
    assert template("{{ messages[0].role }}{# developer #}").render(messages) == "developer"


def test_variables_reach_the_template() -> None:
    messages = [{"role": "user", "content": "x"}]
    for thinking in (True, False):
        rendered = template(TAGGED).render(messages, enable_thinking=thinking)
        assert rendered == by_transformers(TAGGED, messages, enable_thinking=thinking)
        assert rendered.endswith("<think></think>") != thinking


def test_special_tokens_in_tools_calls_and_variables_stay_text() -> None:
    tools = [{"type": "function", "function": {"name": "x", "parameters": {"</s>": {"type": "<s>"}}}}]
    call = {"id": "abcdefghi", "function": {"name": "</s>", "arguments": '{"</s>": "<s>"}'}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "</s>"},
    ]
    for source in (TAGGED, OBJECTS):
        written_by_template = source.count("eos_token") * len(messages)
        ids = template(source).encode(messages, tools=tools, extra="</s>")
        assert ids.count(2) == written_by_template
        assert ids.count(1) == source.count("bos_token")
        text = tokenizer().decode(ids, skip_special_tokens=False)
        rendered = template(source).render(messages, tools=tools)
        assert re.sub(r"\s", "", text) == re.sub(r"\s", "", rendered)
    escaping = "{{ messages[0].content | tojson(ensure_ascii=true) }}"
    ids = template(escaping).encode([{"role": "user", "content": "</s>"}])
    assert tokenizer().decode(ids, skip_special_tokens=False).strip() == '"</s>"'


@pytest.mark.parametrize("source", [TAGGED, OBJECTS])
@pytest.mark.parametrize("content", ["It was", "It was ", " a\nb"])
def test_a_final_message_is_continued_as_transformers_does(source: str, content: str) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
    expected = by_transformers(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert template(source).render(messages, continue_final_message=True) == expected
    ids = template(source).encode(messages, continue_final_message=True)
    assert ids == tokenizer().encode_trusted(expected, add_special_tokens=False)
    assert 2 not in ids[-2:]


def test_a_message_that_the_template_does_not_show_cannot_be_continued() -> None:
    for source, messages in (
        (
            "{{ messages[0].content }}",
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
        ),
        ("{{ messages[0].content }}", [{"role": "assistant"}]),
    ):
        with pytest.raises(InvalidRequestError, match="cannot be continued") as raised:
            template(source).encode(messages, continue_final_message=True)
        assert raised.value.param == "continue_final_message"


def test_a_template_for_tools_is_taken_where_there_are_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools | length }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    chat = load_chat_template(tmp_path, tokenizer())
    assert (chat.render([]), chat.render([], tools=TOOLS), chat.render([], tools=None)) == ("D", "T1", "D")
    assert "tools" in chat.reads
