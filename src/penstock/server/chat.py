"""`POST /v1/chat/completions`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.outputs import TextDelta
from penstock.server.errors import json_response
from penstock.server.fields import convert, unknown_fields, warning_headers
from penstock.server.generation import GenerationResponse, Sequence
from penstock.server.generation_route import Answer, GenerationRoute
from penstock.server.logprobs import chat_logprobs
from penstock.server.openai_types import (
    AssistantMessage,
    ChatChoice,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    Usage,
)
from penstock.server.sampling import chat_sampling, fit_to_context
from penstock.server.sse import CHAT


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
        return route.respond(request, body, chat, await self._sequences(chat), CHAT, chat_body)

    async def render(self, request: Request) -> Response:
        """What a chat completion with this body would give the model, as text and ids; nothing runs."""
        body = await self._route.read(request)
        chat = convert(body, ChatRequest)
        self._route.check_common(chat)
        (sequence,) = await self._sequences(chat)
        text = await self._route.prompts.chat_text(chat.messages)
        rendered = self._route.rendered(text, sequence.prompt_token_ids)
        return json_response(
            msgspec.json.encode(rendered), headers=warning_headers(unknown_fields(body, ChatRequest))
        )

    async def _sequences(self, chat: ChatRequest) -> list[Sequence]:
        route = self._route
        sampling = chat_sampling(chat, route.model, route.limits)
        prompt = await route.prompts.chat(chat.messages)
        fitted = fit_to_context(
            sampling, len(prompt), route.max_model_len, default=None, prompt_field="messages"
        )
        return [Sequence(prompt_token_ids=prompt, sampling=fitted)]


def chat_body(answer: Answer, outcomes: list[TextDelta], usage: Usage) -> bytes:
    """A whole answer."""
    choices = [_choice(answer, index, outcome) for index, outcome in enumerate(outcomes)]
    prompt = choices[0].prompt_token_ids
    response = ChatResponse(
        id=answer.form.response_id,
        object="chat.completion",
        created=answer.form.created,
        model=answer.form.model,
        choices=choices,
        usage=usage,
        prompt_token_ids=prompt,
        prompt_logprobs=answer.prompt_logprobs(0, outcomes[0]),
    )
    return msgspec.json.encode(response)


def _choice(answer: Answer, index: int, outcome: TextDelta) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=AssistantMessage(content=outcome.text),
        logprobs=_logprobs(answer, outcome),
        finish_reason=outcome.finish_reason or "stop",
        stop_reason=outcome.stop_reason,
        **answer.shown_ids(index, outcome),
    )


def _logprobs(answer: Answer, outcome: TextDelta) -> ChatLogprobs | None:
    if outcome.logprobs is None:
        return None
    return chat_logprobs(outcome.token_ids, outcome.logprobs, answer.form.token_bytes)
