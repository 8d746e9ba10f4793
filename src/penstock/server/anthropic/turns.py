"""Translates the messages of a Messages request into those of a chat.

Neighbouring messages of one role form a turn. A turn of the user becomes a message for each result of a tool,
and one for each text before, between and after the results. Any other turn becomes one message. Called by
`messages_input`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.config.limits import Limits
from penstock.errors import InvalidRequestError
from penstock.server.anthropic.messages_types import (
    ContentBlock,
    ConversationRequest,
    InputMessage,
    TextBlock,
)
from penstock.server.openai.openai_types import ChatMessage, FunctionCall, ToolCall
from penstock.server.openai.own_names import MessageOrigin

# Beginning of a part of the system's text by which a client program says whom to bill. It is not for the
# model, and differs from request to request: with it no prompt would begin like an earlier one.
_BILLING = "x-anthropic-billing-header:"
_ERROR = "Error: "  # before the result of a tool that has failed

BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
Made = tuple[ChatMessage, MessageOrigin]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """Blocks of neighbouring messages of one role.

    Attributes:
        where: the first message's name in errors.
        blocks: each with its name in errors.
    """

    role: str
    where: str
    blocks: list[tuple[str, ContentBlock]]


def chat_messages(request: ConversationRequest, limits: Limits) -> list[Made]:
    """Return the messages of the chat, with their origins.

    Raises:
        InvalidRequestError: there are too many messages, or none; or a block lacks a field, or has a type
            that this server does not accept there. The error names the field or the block.
    """
    if not 1 <= len(request.messages) <= limits.max_messages:
        raise InvalidRequestError(
            f"messages must hold 1 to {limits.max_messages} messages, got {len(request.messages)}.",
            remedy="Leave out the oldest messages." if request.messages else "Give at least one message.",
            param="messages",
            code="out_of_range",
        )
    made = [*_system(request.system)]
    for turn in _turns(request.messages):
        made += _MADE_OF[turn.role](turn)
    return made


def _system(system: str | Sequence[TextBlock] | None) -> Iterator[Made]:
    if system is None or isinstance(system, str):
        text = system or ""
    else:
        texts = [_text(block, f"system[{index}]") for index, block in enumerate(system)]
        text = "\n".join(text for text in texts if not text.startswith(_BILLING))
    if text:
        yield ChatMessage(role="system", content=text), MessageOrigin("system")


def _turns(messages: Sequence[InputMessage]) -> list[_Turn]:
    turns: list[_Turn] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not turns or turns[-1].role != message.role:
            turns.append(_Turn(role=message.role, where=where, blocks=[]))
        turns[-1].blocks.extend(_placed(message.content, f"{where}.content"))
    return turns


def _placed(content: str | Sequence[ContentBlock], where: str) -> Iterator[tuple[str, ContentBlock]]:
    if isinstance(content, str):
        yield where, ContentBlock(type="text", text=content)
    else:
        for index, block in enumerate(content):
            yield f"{where}[{index}]", block


def _of_user(turn: _Turn) -> Iterator[Made]:
    """Yield a message for each result, and one for the text before, between and after them, in order."""
    texts: list[str] = []
    for where, block in turn.blocks:
        if block.type != "tool_result":
            texts.append(_text(block, where))
            continue
        if texts:
            yield _said("user", texts, turn)
            texts = []
        yield _result(block, where), MessageOrigin(where)
    if texts or not turn.blocks:
        yield _said("user", texts, turn)


def _of_system(turn: _Turn) -> Iterator[Made]:
    yield _said("system", [_text(block, where) for where, block in turn.blocks], turn)


def _said(role: str, texts: Sequence[str], turn: _Turn) -> Made:
    return ChatMessage(role=role, content="\n".join(texts)), MessageOrigin(turn.where)


def _of_assistant(turn: _Turn) -> Iterator[Made]:
    """Yield one message. Nothing is put between its texts, which the model wrote one after the other."""
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[ToolCall] = []
    first_call = ""
    for where, block in turn.blocks:
        if block.type == "thinking":
            thoughts.append(_required(block.thinking, f"{where}.thinking"))
        elif block.type == "tool_use":
            first_call = first_call or where
            calls.append(_call(block, where))
        elif block.type != "redacted_thinking":  # which is encrypted for another server
            texts.append(_text(block, where))
    message = ChatMessage(
        role="assistant",
        content="".join(texts),
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) or None,
    )
    yield message, MessageOrigin(turn.where, first_call)


_MADE_OF = {"user": _of_user, "assistant": _of_assistant, "system": _of_system}


def _call(block: ContentBlock, where: str) -> ToolCall:
    name = _required(block.name, f"{where}.name")
    call = FunctionCall(name=name, arguments=block.input or {})
    return ToolCall(id=_required(block.id, f"{where}.id"), function=call)


def _result(block: ContentBlock, where: str) -> ChatMessage:
    content = block.content or ""
    if not isinstance(content, str):
        texts = [_text(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
        content = "\n".join(texts)
    call_id = _required(block.tool_use_id, f"{where}.tool_use_id")
    return ChatMessage(
        role="tool", tool_call_id=call_id, content=_ERROR + content if block.is_error else content
    )


def _text(block: ContentBlock | TextBlock, where: str) -> str:
    if block.type != "text":
        raise InvalidRequestError(
            f"{where} is a block of type {block.type[:64]!r}, which this server does not accept there.",
            remedy="It accepts text; from the user also tool_result, from the assistant thinking, "
            "redacted_thinking and tool_use.",
            param=where,
            code="unsupported_content",
        )
    return _required(block.text, f"{where}.text")


def _required(value: str | None, where: str) -> str:
    if value is None:
        raise InvalidRequestError(f"{where} is required.", param=where, code="missing_required_parameter")
    return value
