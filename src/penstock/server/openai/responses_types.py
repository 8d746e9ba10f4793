"""The types of a request to `/v1/responses`, and of its answer.

The names and shapes are those of OpenAI's Responses API and of the Open Responses specification, as far as a
server that stores no responses can follow them. msgspec reads and writes them, as it does `openai_types`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from penstock.server.openai.openai_types import NamedFunction, ReasoningEffort, SampledRequest

Status = Literal["in_progress", "completed", "incomplete", "failed"]
Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
LOGPROBS: Include = "message.output_text.logprobs"
# A list of `ChatTokenLogprob`, encoded: it may be long, and stands in several events.
EncodedLogprobs = Annotated[
    msgspec.Raw,
    msgspec.Meta(
        extra_json_schema={"type": "array", "items": {"$ref": "#/components/schemas/ChatTokenLogprob"}}
    ),
]


class InputPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item of the input: a message, reasoning of the model, a call, or the result of a call.

    `type` says which; a message may leave it out. `id` and `status`, which items of earlier answers have, are
    accepted and mean nothing.
    """

    type: str | None = None
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    input: str | None = None

    @property
    def kind(self) -> str:
        """The value of `type`; "message" without one."""
        return "message" if self.type is None else self.type


class CustomFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The format of the text for a custom tool: free text, or text that follows a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool; `type` says whether it is a function, a custom tool, or one that the API runs itself.

    The fields that a chat request has within `function` stand here beside `type`. Only a custom tool has
    `format`.
    """

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | msgspec.UnsetType | None = msgspec.UNSET


class NamedChoice(NamedFunction, frozen=True, kw_only=True):
    type: Literal["function", "custom"]


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`strict` changes nothing: the answer always keeps to the schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The answer has the whole reasoning and no summary of it, whatever `summary` is."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesStreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_obfuscation: bool | None = None


class ResponsesRequest(SampledRequest, frozen=True, kw_only=True):
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: int | None = None
    include: list[Include] | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    truncation: str | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: EncodedLogprobs = msgspec.field(default_factory=lambda: msgspec.Raw(b"[]"))


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: Status
    role: str = "assistant"
    content: list[OutputText]


class OutputReasoning(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: Status
    summary: list[Any] = msgspec.field(default_factory=list)
    content: list[ReasoningText]


class OutputCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """`arguments` may be invalid JSON if the status is `incomplete`."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


class OutputCustomCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """`input` is the text for the tool; if the status is `incomplete`, the arguments as far as they go."""

    id: str
    status: Status
    call_id: str
    name: str
    input: str


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    reason: str


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """The result, and the fields of the request, with the values that held for those that were not given."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = msgspec.field(default_factory=list)
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    presence_penalty: float
    frequency_penalty: float
    prompt_cache_key: str | None
    reasoning: ReasoningOptions
    safety_identifier: str | None
    temperature: float
    text: TextOptions
    tool_choice: Literal["none", "auto", "required"] | NamedChoice
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    user: str | None
    background: bool = False
    previous_response_id: str | None = None
    service_tier: str = "default"
    store: bool = False
    truncation: str = "disabled"
