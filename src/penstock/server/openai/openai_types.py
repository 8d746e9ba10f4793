"""The types of requests to the OpenAI routes, and of answers.

Requests are converted from decoded JSON by msgspec in strict mode: a string is not a number and a number is
not a boolean. None means "not given". Fields that no type has are ignored; `fields` makes a warning of their
names. Chunks of streams are not made of these types: `sse` writes their bytes.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.config.engine import Pooling
from penstock.request import FinishReason

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ChatFinishReason = Literal["stop", "length", "abort", "error", "tool_calls"]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`continuous_usage_stats` is vLLM's: every chunk has the usage so far, besides the usage at the end."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`strict` changes nothing: the answer always keeps to the schema."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields mean the same as in `request.StructuredOutputs`; a schema may be an object or text."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    whitespace: bool | None = None
    open_objects: bool | None = None


class SampledRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of all requests that generate; the sampling fields mean the same as in `SamplingParams`."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    session_id: str | None = None
    structured_outputs: StructuredOutputFields | None = None
    speculative: bool | None = None
    user: str | None = None


class GenerateRequest(SampledRequest, frozen=True, kw_only=True):
    """The fields of requests for chats and of requests for completions."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_tokens(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: Any = None


class Function(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function that may be called; `parameters` is a schema of type object, or null without arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerateRequest, frozen=True, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None


class CompletionRequest(GenerateRequest, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for embeddings.

    `pooling` and `normalize` are not OpenAI's. They and `dimensions` mean the same as in `PoolingParams`.
    """

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    user: str | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`reasoning_tokens` is there if they could be counted, the others if tokens were guessed ahead."""

    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """`embedding` is a list of numbers, or float32 in base64, lowest byte first, if that was asked for."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The log-probability of one id at one position of a prompt (vLLM's shape)."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]  # the prompt's own id first; None for the first token


class MadeFunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str


class MadeToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str = "function"
    function: MadeFunctionCall


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """`content` is null if there are calls and no text."""

    role: str = "assistant"
    content: str | None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[MadeToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ResponseHead(msgspec.Struct, frozen=True, kw_only=True):
    """The fields with which every answer begins."""

    id: str
    object: str
    created: int
    model: str


class ChatResponse(ResponseHead, frozen=True, kw_only=True):
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(ResponseHead, frozen=True, kw_only=True):
    choices: list[CompletionChoice]
    usage: Usage


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt that the model would be given. `prompt` is null if the request gave token ids.

    Only the ids say exactly what the model gets. If a message spells out a special token, the model gets
    ordinary text, which looks in `prompt` like a special token that the template wrote.
    """

    prompt: str | None
    token_ids: list[int]
    count: int
    max_model_len: int


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "penstock"
    max_model_len: int
    vocab_size: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]
