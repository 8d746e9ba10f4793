"""The types of a request to `/v1/messages`, and of its answer.

The names and shapes are those of Anthropic's Messages API. msgspec reads and writes them as it does the types
of `openai.openai_types`. Fields of blocks that change nothing here, such as `cache_control`, are left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from penstock.server.openai.openai_types import SampledRequest

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]

EncodedObject = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]


class TextBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the system's text, or of a tool's result. Types other than `text` are refused."""

    type: str
    text: str | None = None


class ContentBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message; `type` says whether it is text, reasoning, a call of a tool or a call's result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class InputMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class ToolParam(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the client runs, of the type `custom` or without a type, or a tool of the API itself."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """`budget_tokens` changes nothing: `max_tokens` bounds reasoning and answer together."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ConversationRequest(SampledRequest, frozen=True, kw_only=True):
    """The common fields of a request to answer a conversation and of a request to count its tokens.

    `metadata`, `service_tier` and `cache_control` are accepted and change nothing.
    """

    messages: list[InputMessage]
    system: str | list[TextBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    stop_sequences: list[str] | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: dict[str, Any] | None = None


class MessagesRequest(ConversationRequest, frozen=True, kw_only=True):
    """If prompt and `max_tokens` together are longer than the context, the answer may fill the context."""

    max_tokens: int


class CountTokensRequest(ConversationRequest, frozen=True, kw_only=True):
    max_tokens: int | None = None


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int


class AnswerText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str


class AnswerThinking(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """`signature` is not checked when a client sends it back."""

    thinking: str
    signature: str


class AnswerToolUse(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """`input` is the JSON object that the model has written."""

    id: str
    name: str
    input: EncodedObject


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


class ThinkingTokens(msgspec.Struct, frozen=True, kw_only=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt's tokens are `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | msgspec.UnsetType = msgspec.UNSET


class MessageObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[AnswerBlock] = msgspec.field(default_factory=list)
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
