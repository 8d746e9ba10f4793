"""Turns a request to `/v1/messages` into the chat request that asks for the same.

What the two APIs have in common is checked only once, in the chat request. An error there has the chat's
names of fields; `own_names` turns them back into the names that the client has sent. Called by
`routes.messages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from penstock.config.limits import Limits
from penstock.errors import InvalidRequestError
from penstock.server.anthropic.messages_types import (
    ConversationRequest,
    OutputFormat,
    Thinking,
    ToolChoice,
    ToolParam,
)
from penstock.server.anthropic.turns import chat_messages
from penstock.server.openai.fields import convert, refuse_asked, unknown_fields
from penstock.server.openai.openai_types import (
    ChatMessage,
    ChatRequest,
    Function,
    JsonSchemaFormat,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    SampledRequest,
    Tool,
)
from penstock.server.openai.own_names import OwnNames, OwnWords
from penstock.tokenizer.model_syntax import ModelSyntax

C = TypeVar("C", bound=ConversationRequest)

# Fields of the OpenAI routes that would change the answer: the values that ask for nothing, and what to do
# instead of giving another value.
_OF_CHATS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "stop": ((None,), "Use stop_sequences instead."),
    "n": ((None, 1), "Send several requests."),
    "input": ((None,), "Send it in messages."),
    "instructions": ((None,), "Use system instead."),
    "max_completion_tokens": ((None,), "Use max_tokens instead."),
    "max_output_tokens": ((None,), "Use max_tokens instead."),
    "response_format": ((None,), "Use output_config.format instead."),
    "logprobs": ((None, False), "Use /v1/chat/completions for them."),
    "top_logprobs": ((None, 0), "Use /v1/chat/completions for them."),
    "prompt_logprobs": ((None,), "Use /v1/chat/completions for them."),
    "return_token_ids": ((None, False), "Use /v1/chat/completions for them."),
    "add_special_tokens": ((None, False), "The chat template writes the special tokens."),
}
_WORDS = OwnWords(
    fields={
        "max_completion_tokens": "max_tokens",
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
    },
    params={"stop": "stop_sequences"},
    call="tool_use block",
    parameters="input_schema",
)
_CHOICES: Mapping[str, Literal["none", "auto", "required"]] = {
    "auto": "auto",
    "any": "required",
    "none": "none",
}
# Variables of templates that say whether the model should reason.
_SWITCHES = ("enable_thinking", "thinking")
# Beginnings of the types of tools that clients run without a description: the API's own models know them.
_DESCRIBED = ("bash_", "text_editor_", "computer_", "memory_", "browser_")


def read_fields(body: dict[str, Any], kind: type[C]) -> C:
    """Return the request in `body`. Raises `InvalidRequestError` naming the field at fault."""
    refuse_asked(_OF_CHATS, body.get)
    return convert(body, kind)


def unknown_here(body: Mapping[str, Any], kind: type[ConversationRequest]) -> list[str]:
    """Return `fields.unknown_fields` without the fields of chats, which `read_fields` has checked."""
    return [name for name in unknown_fields(body, kind) if name not in _OF_CHATS]


class ChatOfMessages:
    """A request to `/v1/messages` as a chat request, which does not have its `max_tokens`.

    Args:
        syntax: how the model's template writes reasoning and calls of tools.

    Attributes:
        request: the chat request.
        names: turns the chat's names of fields into those of the given request.
        unused: fields of the given request that change nothing on this model.
        skipped: tools that the API would run itself, and that are left out.
    """

    def __init__(self, request: ConversationRequest, syntax: ModelSyntax, limits: Limits) -> None:
        made = chat_messages(request, limits)
        messages = [message for message, _ in made]
        tools = _Tools(request.tools or ())
        thinking = request.thinking or Thinking(type="disabled")
        thinks = thinking.type != "disabled"
        choice = request.tool_choice
        shared = {name: getattr(request, name) for name in SampledRequest.__struct_fields__}
        self.request = ChatRequest(
            **shared | {"stop": request.stop_sequences},
            messages=messages,
            tools=tools.made or None,
            tool_choice=None if choice is None else _choice(choice),
            parallel_tool_calls=not choice.disable_parallel_tool_use if choice is not None else None,
            response_format=_format(request),
            reasoning_effort=None if request.output_config is None else request.output_config.effort,
            include_reasoning=thinks and thinking.display != "omitted",
            chat_template_kwargs={name: thinks for name in _SWITCHES if name in syntax.reads},
            continue_final_message=_goes_on(messages),
        )
        self.names = OwnNames(_WORDS, [origin for _, origin in made], tools.names)
        self.unused = _unused(thinking, syntax)
        self.skipped = tools.skipped

    def refuse_open_calls(self) -> None:
        """Raise `InvalidRequestError` if the last message has calls of tools: their results are missing."""
        messages = self.request.messages
        if messages and messages[-1].role == "assistant" and messages[-1].tool_calls:
            where = self.names.of(f"messages[{len(messages) - 1}].tool_calls")
            raise InvalidRequestError(
                f"{where} is a tool_use block of the last message without a result.",
                remedy="Send a tool_result for each tool_use block in a user message.",
                param=where,
            )


def _goes_on(messages: Sequence[ChatMessage]) -> bool:
    """Return whether the last message is the beginning of the answer, which then continues it."""
    return bool(messages) and messages[-1].role == "assistant" and not messages[-1].tool_calls


def _unused(thinking: Thinking, syntax: ModelSyntax) -> list[str]:
    unused = []
    if thinking.type != "disabled" and syntax.reasoning is None:
        unused.append("thinking")
    elif thinking.budget_tokens is not None:
        unused.append("thinking.budget_tokens")
    return unused


def _format(request: ConversationRequest) -> ResponseFormat | None:
    of_config: OutputFormat | None = None if request.output_config is None else request.output_config.format
    chosen = of_config or request.output_format
    if chosen is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=chosen.schema))


def _choice(choice: ToolChoice) -> Literal["none", "auto", "required"] | NamedTool:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise _missing("tool_choice.name")
    return NamedTool(type="function", function=NamedFunction(name=choice.name))


class _Tools:
    """The tools of a request.

    Attributes:
        made: the tools that the client runs, in the form of a chat.
        names: the name of each of them in errors.
        skipped: the other tools, which the API would run itself.
    """

    def __init__(self, tools: Sequence[ToolParam]) -> None:
        self.made: list[Tool] = []
        self.names: list[str] = []
        self.skipped: list[str] = []
        for index, tool in enumerate(tools):
            where, kind = f"tools[{index}]", tool.type or "custom"
            if kind == "custom":
                self.made.append(_tool(tool, where))
                self.names.append(where)
            elif kind.startswith(_DESCRIBED):
                raise InvalidRequestError(
                    f"{where}.type is {kind[:64]!r}, a tool without a description on this server.",
                    remedy="Define it as a tool with name, description and input_schema.",
                    param=f"{where}.type",
                    code="unsupported_parameter",
                )
            else:
                self.skipped.append(f"{where}:{kind}")


def _tool(tool: ToolParam, where: str) -> Tool:
    if tool.name is None:
        raise _missing(f"{where}.name")
    if tool.input_schema is None:
        raise _missing(f"{where}.input_schema")
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _missing(where: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} is required.", param=where, code="missing_required_parameter")
