"""`POST /v1/chat/completions`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.client.outputs import TextDelta
from penstock.server.answers.generation import GenerationResponse, with_reasoning_tokens
from penstock.server.answers.sse import CHAT
from penstock.server.http.errors import json_response
from penstock.server.openai.fields import convert, unknown_fields, warning_headers
from penstock.server.openai.logprobs import chat_logprobs
from penstock.server.openai.message_reader import MessageReader, whole_message
from penstock.server.openai.openai_types import (
    ChatChoice,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    Usage,
)
from penstock.server.routes.chat_reader import ChatReader
from penstock.server.routes.generation_route import Answer, GenerationRoute


class ChatRoute:
    def __init__(self, route: GenerationRoute, chats: ChatReader) -> None:
        self._route = route
        self._chats = chats

    async def create(self, request: Request) -> Response:
        """Answer a conversation, streamed or as a whole."""
        return await self._route.accept(request, self._prepare)

    async def _prepare(self, request: Request) -> GenerationResponse:
        body = await self._route.read(request)
        asked = convert(body, ChatRequest)
        self._route.check_common(asked)
        chat = await self._chats.read(asked)
        return self._route.respond(
            request, body, asked, [chat.sequence], CHAT, chat_body, reading=chat.reading, unused=chat.unused
        )

    async def render(self, request: Request) -> Response:
        """What a chat completion with this body would give the model, as text and ids; nothing runs."""
        body = await self._route.read(request)
        asked = convert(body, ChatRequest)
        self._route.check_common(asked)
        text, sequence, unused = await self._chats.render(asked)
        rendered = self._route.rendered(text, sequence.prompt_token_ids)
        return json_response(
            msgspec.json.encode(rendered), headers=warning_headers(unknown_fields(body, ChatRequest), unused)
        )


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
