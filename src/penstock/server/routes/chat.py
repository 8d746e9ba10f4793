"""The route `POST /v1/chat/completions`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.client.outputs import TextDelta
from penstock.server.answers.encoding import encode_in_slices
from penstock.server.answers.generation import GenerationResponse, with_reasoning_tokens
from penstock.server.answers.sse import CHAT
from penstock.server.http.errors import json_response
from penstock.server.openai.fields import warning_headers
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
from penstock.server.routes.intake import Intake
from penstock.server.routes.responder import AnswerShape, Responder


class ChatRoute:
    """Reads a chat request, and answers it or shows what it would give the model."""

    def __init__(self, intake: Intake, chats: ChatReader, responder: Responder) -> None:
        self._intake = intake
        self._chats = chats
        self._responder = responder

    async def create(self, request: Request) -> Response:
        """Answer a conversation, streamed or as a whole."""
        return await self._intake.accept(request, self._prepare)

    async def _prepare(self, request: Request) -> GenerationResponse:
        read = await self._intake.read_generation(request, ChatRequest)
        chat = await self._chats.read(read.fields)
        return self._responder.respond(
            read, [chat.sequence], CHAT, chat_body, reading=chat.reading, unused=chat.unused
        )

    async def render(self, request: Request) -> Response:
        """Return what a chat completion with this body would give the model; nothing runs."""
        read = await self._intake.read_generation(request, ChatRequest)
        text, sequence, unused = await self._chats.render(read.fields)
        rendered = self._responder.rendered(text, sequence.prompt_token_ids)
        return json_response(msgspec.json.encode(rendered), headers=warning_headers(read.ignored, unused))


def chat_body(shape: AnswerShape, outcomes: list[TextDelta], usage: Usage) -> bytes:
    """Return the body of a whole reply."""
    readers = [shape.reader(index) for index in range(len(outcomes))]
    for reader, outcome in zip(readers, outcomes, strict=True):
        reader.note_tokens(outcome.token_ids)
    choices = [
        _choice(shape, index, outcome, reader)
        for index, (outcome, reader) in enumerate(zip(outcomes, readers, strict=True))
    ]
    prompt = choices[0].prompt_token_ids
    response = ChatResponse(
        id=shape.form.response_id,
        object="chat.completion",
        created=shape.form.created,
        model=shape.form.model,
        choices=choices,
        usage=with_reasoning_tokens(usage, [reader.reasoning_tokens for reader in readers]),
        prompt_token_ids=prompt,
        prompt_logprobs=shape.prompt_logprobs(0, outcomes[0]),
    )
    return encode_in_slices(response)


def _choice(shape: AnswerShape, index: int, outcome: TextDelta, reader: MessageReader) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=whole_message(reader, outcome.text),
        logprobs=_logprobs(shape, outcome),
        finish_reason=reader.finish_reason(outcome.finish_reason or "stop"),
        stop_reason=outcome.stop_reason,
        **shape.shown_ids(index, outcome),
    )


def _logprobs(shape: AnswerShape, outcome: TextDelta) -> ChatLogprobs | None:
    if outcome.logprobs is None:
        return None
    return chat_logprobs(outcome.token_ids, outcome.logprobs, shape.form.token_bytes)
