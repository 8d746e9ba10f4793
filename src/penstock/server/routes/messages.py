"""`POST /v1/messages` and `/v1/messages/count_tokens`: the Messages API of Anthropic."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.client.outputs import TextDelta
from penstock.errors import InvalidRequestError, RequestError
from penstock.server.answers.encoding import encode
from penstock.server.answers.generation import GenerationResponse, Sequence, with_reasoning_tokens
from penstock.server.answers.message_output import MessageOutput, MessageText, whole_answer
from penstock.server.anthropic.messages_input import ChatOfMessages, read_fields, unknown_here
from penstock.server.anthropic.messages_types import (
    CountTokensRequest,
    MessageObject,
    MessagesRequest,
    MessageUsage,
    TokenCount,
)
from penstock.server.http.errors import json_response
from penstock.server.http.request_record import record_of
from penstock.server.openai.fields import warning_headers
from penstock.server.openai.message_reader import Reading
from penstock.server.openai.openai_types import Usage
from penstock.server.routes.chat_reader import ChatReader
from penstock.server.routes.intake import Intake
from penstock.server.routes.responder import Responder

MESSAGES = "/v1/messages"
_TOO_LONG = "prompt is too long: "  # by these words clients know that they should shorten the conversation


class MessagesRoute:
    """Reads a message request as a chat, and answers it with blocks or counts its tokens."""

    def __init__(self, intake: Intake, chats: ChatReader, responder: Responder) -> None:
        self._intake = intake
        self._chats = chats
        self._responder = responder

    async def create(self, request: Request) -> Response:
        """Answer a conversation with blocks, streamed or as a whole."""
        return await self._intake.accept(request, self._prepare)

    async def _prepare(self, request: Request) -> GenerationResponse:
        intake = self._intake
        body = await intake.read(request)
        fields = read_fields(body, MessagesRequest)
        intake.check_model(fields.model)
        chat = ChatOfMessages(fields, intake.model.syntax, intake.limits)
        chat.refuse_open_calls()
        try:
            read = await self._chats.read(chat.request)
            sequence = _bounded(read.sequence, fields.max_tokens, intake.model.vocab_size)
        except RequestError as error:
            raise _renamed(error, chat) from None
        unique = record_of(request.scope).unique_id
        begun = _begun(f"msg_{unique}", intake.model.name, len(sequence.prompt_token_ids))
        output = MessageOutput(
            (read.reading or Reading()).reader(begun.id, 0),
            fills_context=(sequence.sampling.max_tokens or 0) < fields.max_tokens,
        )

        def make_body(outcomes: list[TextDelta], usage: Usage) -> bytes:
            output.take(outcomes[0])
            counted = with_reasoning_tokens(usage, [output.reasoning_tokens])
            return encode(whole_answer(begun, output, counted))

        unused = chat.unused + [chat.names.of(name) for name in read.unused]
        headers = warning_headers(unknown_here(body, MessagesRequest), unused, chat.skipped)
        text = MessageText(begun, output) if fields.stream else None
        return self._responder.start(request, [sequence], headers, make_body, text)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens that a conversation would be as a prompt; nothing runs."""
        body = await self._intake.read(request)
        fields = read_fields(body, CountTokensRequest)
        self._intake.check_model(fields.model)
        chat = ChatOfMessages(fields, self._intake.model.syntax, self._intake.limits)
        try:
            prompt, unused = await self._chats.prompt(chat.request)
        except RequestError as error:
            raise _renamed(error, chat) from None
        names = chat.unused + [chat.names.of(name) for name in unused]
        headers = warning_headers(unknown_here(body, CountTokensRequest), names, chat.skipped)
        return json_response(msgspec.json.encode(TokenCount(input_tokens=len(prompt))), headers=headers)


def _bounded(sequence: Sequence, max_tokens: int, vocab_size: int) -> Sequence:
    """Return the sequence with the client's bound on the answer, which without it may fill the context."""
    if max_tokens < 0:
        raise InvalidRequestError(
            f"max_tokens must be at least 0, got {max_tokens}.", param="max_tokens", code="out_of_range"
        )
    room = sequence.sampling.max_tokens
    assert room is not None
    sampling = msgspec.structs.replace(sequence.sampling, max_tokens=min(max_tokens, room))
    sampling.validate(vocab_size)
    return Sequence(prompt_token_ids=sequence.prompt_token_ids, sampling=sampling)


def _renamed(error: RequestError, chat: ChatOfMessages) -> RequestError:
    renamed = chat.names.renamed(error)
    if renamed.code != "context_length_exceeded":
        return renamed
    return type(error)(
        _TOO_LONG + renamed.message, remedy=renamed.remedy, param=renamed.param, code=renamed.code
    )


def _begun(id_: str, model: str, prompt_tokens: int) -> MessageObject:
    """Return the message as it stands before any output, when the cached part of the prompt is not known."""
    usage = MessageUsage(input_tokens=prompt_tokens, cache_read_input_tokens=0, output_tokens=0)
    return MessageObject(id=id_, model=model, usage=usage)
