"""Turns a request to `/v1/responses` into the chat request that asks for the same.

What the two APIs have in common is checked only once, in the chat request. An error there has the chat's
names of fields; `own_names` turns them back into the names that the client has sent. Called by
`routes.responses`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from penstock.config.limits import Limits
from penstock.errors import InvalidRequestError
from penstock.server.openai.custom_tools import InputGrammar, arguments_of, custom_tool, input_grammar
from penstock.server.openai.fields import REASONING_BUDGETS, refuse_asked, unknown_fields
from penstock.server.openai.openai_types import (
    ChatMessage,
    ChatRequest,
    Function,
    FunctionCall,
    JsonSchemaFormat,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    SampledRequest,
    Tool,
    ToolCall,
)
from penstock.server.openai.own_names import MessageOrigin, OwnNames, OwnWords
from penstock.server.openai.prompts import joined_text
from penstock.server.openai.responses_types import (
    LOGPROBS,
    FunctionTool,
    InputItem,
    InputPart,
    NamedChoice,
    ResponsesRequest,
    TextFormat,
)

_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})

# Fields that need a server which stores responses, and others that we do not support: the values that ask for
# nothing, and what to do instead of giving another value.
_KEEP = "This server does not store responses: send the whole conversation in input."
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "previous_response_id": ((None,), _KEEP),
    "conversation": ((None,), _KEEP),
    "background": ((None, False), "Leave it out, and wait for the response or stream it."),
    "prompt": ((None,), "Send the text itself in input or instructions."),
    "truncation": ((None, "disabled"), "Leave it out, and shorten the input if it is too long."),
}
_NO_BUDGET = "Leave it out: max_output_tokens limits reasoning and answer together."
# The same for fields of chats that would change the answer, and for bounds on reasoning.
_OF_CHATS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "messages": ((None,), "Send them in input."),
    "n": ((None, 1), "Send several requests."),
    "max_tokens": ((None,), "Use max_output_tokens instead."),
    "max_completion_tokens": ((None,), "Use max_output_tokens instead."),
    "response_format": ((None,), "Use text.format instead."),
    "logprobs": ((None, False), "Use include and top_logprobs."),
    "prompt_logprobs": ((None,), "Use /v1/chat/completions for them."),
    "return_token_ids": ((None, False), "Use /v1/chat/completions for them."),
    "add_special_tokens": ((None, False), "The chat template writes the special tokens."),
    **dict.fromkeys(REASONING_BUDGETS, ((None,), _NO_BUDGET)),
}
# The same for the names of a bound that other servers take within `reasoning`.
_OF_REASONING: Mapping[str, tuple[tuple[object, ...], str]] = {
    f"reasoning.{name}": ((None,), _NO_BUDGET) for name in ("max_tokens", "budget_tokens", "budget")
}
# Fields that are accepted and change nothing; a warning names them if they have none of these values.
_UNUSED: Mapping[str, tuple[object, ...]] = {
    "store": (None, False),
    "max_tool_calls": (None,),
    "service_tier": (None, "auto", "default"),
    "prompt_cache_key": (None,),
    "prompt_cache_retention": (None, "in_memory"),
}

# Beginnings of the types of tools that the API runs itself.
_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search")
_CALLS = ("function_call", "custom_tool_call")

MAX_METADATA = 16
_MAX_METADATA_KEY, _MAX_METADATA_VALUE, _MAX_NOTE = 64, 512, 512


_WORDS = OwnWords(
    fields={
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "logprobs": "top_logprobs",
    },
    params={},
    call="function_call",
    parameters="parameters",
)


class ChatOfResponse:
    """A request to `/v1/responses` as a chat request, with what a chat cannot express.

    Attributes:
        request: the chat request.
        names: turns the chat's names of fields into those of the given request.
        unused: fields of the given request that change nothing here.
        inputs: grammars of the texts of custom tools, by the tool's name.
        customs: names of the custom tools.
        skipped: tools that the API would run itself, and that are left out.
    """

    def __init__(self, request: ResponsesRequest, limits: Limits) -> None:
        refuse_asked(_REFUSED, lambda name: getattr(request, name))
        _check_notes(request)
        messages, origins = _messages(request, limits)
        tools = _Tools(request.tools or ())
        wants_logprobs = LOGPROBS in (request.include or ())
        if request.top_logprobs and not wants_logprobs:
            raise _wrong(
                "top_logprobs needs an include of message.output_text.logprobs.",
                "top_logprobs",
                remedy=f"Add include: [{LOGPROBS!r}], or leave top_logprobs out.",
            )
        shared = {name: getattr(request, name) for name in SampledRequest.__struct_fields__}
        text_format = None if request.text is None else request.text.format
        self.request = ChatRequest(
            **shared,
            messages=messages,
            max_completion_tokens=request.max_output_tokens,
            logprobs=wants_logprobs,
            top_logprobs=request.top_logprobs,
            tools=tools.made or None,
            tool_choice=_choice(request),
            parallel_tool_calls=request.parallel_tool_calls,
            response_format=None if text_format is None else _format(text_format),
            reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
            include_reasoning=request.include_reasoning,
            chat_template_kwargs=request.chat_template_kwargs,
        )
        self.names = OwnNames(_WORDS, origins, tools.names)
        self.unused = _unused(request)
        self.inputs, self.customs, self.skipped = tools.inputs, frozenset(tools.customs), tools.skipped


def _wrong(message: str, param: str, *, remedy: str = "", code: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(message, remedy=remedy, param=param, code=code)


def refuse_fields_of_chats(body: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` for a field that has another name here, and for a bound on reasoning.

    Without this they would be ignored as unknown fields.
    """
    refuse_asked(_OF_CHATS, body.get)
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict):
        refuse_asked(_OF_REASONING, lambda name: reasoning.get(name.removeprefix("reasoning.")))


def unknown_here(body: Mapping[str, Any]) -> list[str]:
    """Return `fields.unknown_fields` without the fields of chats, which `refuse_fields_of_chats` checks."""
    return [name for name in unknown_fields(body, ResponsesRequest) if name not in _OF_CHATS]


def _check_notes(request: ResponsesRequest) -> None:
    """Raise `InvalidRequestError` if metadata or notes are too long, since the response repeats them."""
    metadata = request.metadata or {}
    longest_key = max(map(len, metadata), default=0)
    longest_value = max(map(len, metadata.values()), default=0)
    for param, what, value, most in (
        ("metadata", "The number of pairs in metadata", len(metadata), MAX_METADATA),
        ("metadata", "The length of a key of metadata", longest_key, _MAX_METADATA_KEY),
        ("metadata", "The length of a value of metadata", longest_value, _MAX_METADATA_VALUE),
        *(
            (name, f"The length of {name}", len(getattr(request, name) or ""), _MAX_NOTE)
            for name in ("user", "safety_identifier", "prompt_cache_key")
        ),
    ):
        if value > most:
            raise _wrong(f"{what} is {value}; the limit is {most}.", param, code="out_of_range")


def _unused(request: ResponsesRequest) -> list[str]:
    names = [name for name, neutral in _UNUSED.items() if getattr(request, name) not in neutral]
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        names.append("text.verbosity")
    if request.reasoning is not None and request.reasoning.summary is not None:
        names.append("reasoning.summary")
    return names


def _messages(request: ResponsesRequest, limits: Limits) -> tuple[list[ChatMessage], list[MessageOrigin]]:
    """Return the conversation, and for each message the parts of the request from which it was made."""
    messages: list[ChatMessage | _Turn] = []
    origins: list[MessageOrigin] = []
    if request.instructions:
        messages.append(ChatMessage(role="system", content=request.instructions))
        origins.append(MessageOrigin("instructions"))
    for index, item in enumerate(_items(request.input, limits.max_messages - len(messages))):
        last, where = messages[-1] if messages else None, f"input[{index}]"
        call = where if item.kind in _CALLS else ""
        if isinstance(last, _Turn) and last.takes(item):
            last.take(item, where)
            origins[-1] = MessageOrigin(origins[-1].where, origins[-1].call or call)
            continue
        messages.append(_begun(item, where))
        origins.append(MessageOrigin(where, call))
    return [message.message() if isinstance(message, _Turn) else message for message in messages], origins


def _items(given: str | list[InputItem], most: int) -> list[InputItem]:
    if isinstance(given, str):
        return [InputItem(role="user", content=given)]
    if not 1 <= len(given) <= most:
        raise _wrong(
            f"input must hold 1 to {most} items, got {len(given)}.",
            "input",
            remedy="Leave out the oldest items." if given else "Give at least one item, or a text.",
            code="out_of_range",
        )
    return given


def _begun(item: InputItem, where: str) -> ChatMessage | _Turn:
    """Return the message, or the turn of the model, that begins with this item."""
    if item.kind in ("function_call_output", "custom_tool_call_output"):
        return _result(item, where)
    if item.kind == "message" and item.role != "assistant":
        return _message(item, where)
    turn = _Turn()
    turn.take(item, where)
    return turn


class _Turn:
    """The items that become one message of the model: reasoning, a text and calls; any may be missing.

    Text between calls or after them belongs to the same turn. If it began a message of its own, the results
    would no longer follow the message with their calls.
    """

    def __init__(self) -> None:
        self._reasoning: str | None = None
        self._text: str | None = None
        self._calls: list[ToolCall] = []

    def takes(self, item: InputItem) -> bool:
        """Return whether the item belongs to this turn."""
        if item.kind in _CALLS:
            return True
        is_text = item.kind == "message" and item.role == "assistant"
        return is_text and (self._text is None or bool(self._calls))

    def take(self, item: InputItem, where: str) -> None:
        """Add an item. Raises `InvalidRequestError` if the server does not accept its type."""
        if item.kind == "message":
            self._text = (self._text or "") + joined_text(item.content, f"{where}.content", _part_text)
        elif item.kind == "reasoning":
            self._reasoning = joined_text(item.content or item.summary, f"{where}.content", _part_text)
        elif item.kind in _CALLS:
            self._calls.append(_call(item, where))
        else:
            raise _wrong(
                f"{where}.type is {item.kind[:64]!r}, which this server does not accept.",
                f"{where}.type",
                remedy="It accepts message, reasoning, function_call, custom_tool_call and call outputs.",
                code="unsupported_content",
            )

    def message(self) -> ChatMessage:
        return ChatMessage(
            role="assistant",
            content=self._text,
            tool_calls=self._calls or None,
            reasoning_content=self._reasoning or None,
        )


def _message(item: InputItem, where: str) -> ChatMessage:
    if item.role not in _ROLES:
        given = "nothing" if item.role is None else repr(item.role[:64])
        raise _wrong(f"{where}.role must be one of {', '.join(_ROLES)}, got {given}.", f"{where}.role")
    content = joined_text(item.content, f"{where}.content", _part_text)
    return ChatMessage(role=item.role, content=content)


def _result(item: InputItem, where: str) -> ChatMessage:
    if item.output is None:
        raise _missing(f"{where}.output")
    return ChatMessage(
        role="tool",
        tool_call_id=_required(item.call_id, f"{where}.call_id"),
        content=joined_text(item.output, f"{where}.output", _part_text),
    )


def _call(item: InputItem, where: str) -> ToolCall:
    name = _required(item.name, f"{where}.name")
    arguments: str | dict[str, Any] = item.arguments or "{}"
    if item.kind == "custom_tool_call":
        arguments = arguments_of(_required(item.input, f"{where}.input"))
    return ToolCall(
        id=_required(item.call_id, f"{where}.call_id"), function=FunctionCall(name=name, arguments=arguments)
    )


def _required(value: str | None, where: str) -> str:
    if value is None:
        raise _missing(where)
    return value


def _missing(where: str) -> InvalidRequestError:
    return _wrong(f"{where} is required.", where, code="missing_required_parameter")


def _part_text(part: InputPart) -> str | None:
    return part.refusal if part.type == "refusal" else part.text if part.type in _TEXT_PARTS else None


def is_hosted(tool: FunctionTool) -> bool:
    """Return whether the API runs a tool itself; this server then does not have it."""
    return tool.type.startswith(_HOSTED)


class _Tools:
    """The tools of a request.

    Attributes:
        made: the tools that the client runs, in the form of a chat.
        names: the name of each of them in errors.
        inputs, customs, skipped: as in `ChatOfResponse`.
    """

    def __init__(self, tools: Sequence[FunctionTool]) -> None:
        self.made: list[Tool] = []
        self.names: list[str] = []
        self.inputs: dict[str, InputGrammar] = {}
        self.customs: list[str] = []
        self.skipped: list[str] = []
        for index, tool in enumerate(tools):
            where = f"tools[{index}]"
            if is_hosted(tool):
                self.skipped.append(f"{where}:{tool.type}")
                continue
            self.made.append(self._custom(tool, where) if tool.type == "custom" else _function(tool, where))
            self.names.append(where)

    def _custom(self, tool: FunctionTool, where: str) -> Tool:
        name = _required(tool.name, f"{where}.name")
        self.customs.append(name)
        grammar = input_grammar(tool.format, f"{where}.format") if tool.format else None
        if grammar is not None:
            self.inputs[name] = grammar
        return custom_tool(tool, name)


def _function(tool: FunctionTool, where: str) -> Tool:
    if tool.type != "function":
        raise _wrong(
            f"{where}.type is {tool.type[:64]!r}, which this server does not have.",
            f"{where}.type",
            remedy="It has tools of type function and custom, which the client runs.",
            code="unsupported_parameter",
        )
    function = Function(
        name=_required(tool.name, f"{where}.name"),
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)


def _choice(request: ResponsesRequest) -> Literal["none", "auto", "required"] | NamedTool | None:
    choice = request.tool_choice
    if isinstance(choice, NamedChoice):
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    return choice


def _format(text_format: TextFormat) -> ResponseFormat:
    if text_format.type != "json_schema":
        return ResponseFormat(type=text_format.type)
    if text_format.schema is None:
        raise _missing("text.format.schema")
    schema = JsonSchemaFormat(name=text_format.name, schema=text_format.schema)
    return ResponseFormat(type="json_schema", json_schema=schema)
