"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.outputs import TextDelta
from penstock.request import SamplingParams, StructuredOutputs
from penstock.server.chat_options import opens_reasoning, reading_of, shown_markers, template_options
from penstock.server.engine_port import ServedModel
from penstock.server.errors import json_response
from penstock.server.fields import convert, unknown_fields, warning_headers
from penstock.server.generation import GenerationResponse, Sequence, with_reasoning_tokens
from penstock.server.generation_route import Answer, GenerationRoute
from penstock.server.logprobs import chat_logprobs
from penstock.server.message_reader import MessageReader, Reading, whole_message
from penstock.server.openai_types import (
    ChatChoice,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    Usage,
)
from penstock.server.sampling import chat_sampling, check_choices, fit_to_context
from penstock.server.sse import CHAT
from penstock.server.structured import behind_reasoning, refuse_with_tools, structured_field
from penstock.server.tools import ToolUse, bound_schemas, grammar_of, tool_use


class ChatRoute:
    def __init__(self, route: GenerationRoute) -> None:
        self._route = route

    async def create(self, request: Request) -> Response:
        """Answer a conversation, streamed or as a whole."""
        return await self._route.accept(request, self._prepare)

    async def _prepare(self, request: Request) -> GenerationResponse:
        route = self._route
        body = await route.read(request)
        chat = convert(body, ChatRequest)
        route.check_common(chat)
        model = route.model
        sampling = chat_sampling(chat, model, route.limits)
        check_choices(sampling, 1, route.limits)
        use, options, unused = self._beside_messages(chat)
        prompt = await route.prompts.chat(chat.messages, use, options)
        is_open = opens_reasoning(chat, prompt, model)
        reading = reading_of(chat, use, model.syntax, is_open=is_open)
        grammar = grammar_of(use, model.syntax, is_open=is_open)
        refuse_with_tools(sampling, use, structured_field(chat))
        asked_by = structured_field(chat) if grammar is None else "tools"
        if grammar is None:
            await route.prove(sampling, asked_by)
            grammar = behind_reasoning(sampling, model.syntax, asked_by, is_open=is_open)
        for param, schema in bound_schemas(use).items():
            route.check_schema(schema, param)
        sampling = _for_reading(sampling, reading, model, grammar)
        await route.prove(sampling, asked_by)
        sequence = self._sequence(prompt, sampling)
        return route.respond(request, body, chat, [sequence], CHAT, chat_body, reading=reading, unused=unused)

    async def render(self, request: Request) -> Response:
        """What a chat completion with this body would give the model, as text and ids; nothing runs."""
        route = self._route
        body = await route.read(request)
        chat = convert(body, ChatRequest)
        route.check_common(chat)
        sampling = chat_sampling(chat, route.model, route.limits)
        use, options, unused = self._beside_messages(chat)
        sequence = self._sequence(await route.prompts.chat(chat.messages, use, options), sampling)
        text = await route.prompts.chat_text(chat.messages, use, options)
        rendered = route.rendered(text, sequence.prompt_token_ids)
        return json_response(
            msgspec.json.encode(rendered), headers=warning_headers(unknown_fields(body, ChatRequest), unused)
        )

    def _beside_messages(self, chat: ChatRequest) -> tuple[ToolUse, dict[str, Any], list[str]]:
        """Tools and options for the chat template, and the fields that have no effect on it."""
        syntax, limits = self._route.model.syntax, self._route.limits
        return tool_use(chat, syntax, limits), *template_options(chat, syntax, limits)

    def _sequence(self, prompt: list[int], sampling: SamplingParams) -> Sequence:
        most = self._route.max_model_len
        fitted = fit_to_context(sampling, len(prompt), most, default=None, prompt_field="messages")
        return Sequence(prompt_token_ids=prompt, sampling=fitted)


def _for_reading(
    sampling: SamplingParams, reading: Reading | None, model: ServedModel, grammar: str | None
) -> SamplingParams:
    """The sampling of an answer that can be read so, and that follows the grammar."""
    changes: dict[str, Any] = {}
    if markers := shown_markers(reading, model.syntax):
        changes["shown_special_tokens"] = markers
    if grammar is not None:
        changes["structured_outputs"] = StructuredOutputs(grammar=grammar)
    changed = msgspec.structs.replace(sampling, **changes)
    changed.validate(model.vocab_size)
    return changed


def chat_body(answer: Answer, outcomes: list[TextDelta], usage: Usage) -> bytes:
    """A whole answer."""
    readers = [answer.reader(index) for index in range(len(outcomes))]
    for reader, outcome in zip(readers, outcomes, strict=True):
        reader.note_tokens(outcome.token_ids)
    choices = [
        _choice(answer, index, outcome, reader)
        for index, (outcome, reader) in enumerate(zip(outcomes, readers, strict=True))
    ]
    prompt = choices[0].prompt_token_ids
    response = ChatResponse(
        id=answer.form.response_id,
        object="chat.completion",
        created=answer.form.created,
        model=answer.form.model,
        choices=choices,
        usage=with_reasoning_tokens(usage, [reader.reasoning_tokens for reader in readers]),
        prompt_token_ids=prompt,
        prompt_logprobs=answer.prompt_logprobs(0, outcomes[0]),
    )
    return msgspec.json.encode(response)


def _choice(answer: Answer, index: int, outcome: TextDelta, reader: MessageReader) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=whole_message(reader, outcome.text),
        logprobs=_logprobs(answer, outcome),
        finish_reason=reader.finish_reason(outcome.finish_reason or "stop"),
        stop_reason=outcome.stop_reason,
        **answer.shown_ids(index, outcome),
    )


def _logprobs(answer: Answer, outcome: TextDelta) -> ChatLogprobs | None:
    if outcome.logprobs is None:
        return None
    return chat_logprobs(outcome.token_ids, outcome.logprobs, answer.form.token_bytes)
