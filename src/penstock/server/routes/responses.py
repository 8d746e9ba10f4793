"""`POST /v1/responses`: the Responses API, with the whole conversation in each request: nothing is stored."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.client.outputs import TextDelta
from penstock.errors import RequestError
from penstock.request import SamplingParams
from penstock.server.answers.generation import GenerationResponse, Sequence, with_reasoning_tokens
from penstock.server.answers.responses_output import Output, ResponseText, finished
from penstock.server.answers.text_logprobs import NoTextLogprobs, PlacedLogprobs, TextLogprobs
from penstock.server.engine_port import TextCodec
from penstock.server.http.request_record import record_of
from penstock.server.openai.fields import convert, warning_headers
from penstock.server.openai.message_reader import Reading
from penstock.server.openai.openai_types import Usage
from penstock.server.openai.responses_input import (
    ChatOfResponse,
    is_hosted,
    refuse_fields_of_chats,
    unknown_here,
)
from penstock.server.openai.responses_types import (
    ReasoningOptions,
    ResponseObject,
    ResponsesRequest,
    TextFormat,
    TextOptions,
)
from penstock.server.openai.sampling import NO_LIMIT
from penstock.server.routes.chat_reader import ChatReader
from penstock.server.routes.intake import Intake
from penstock.server.routes.responder import Responder


class ResponsesRoute:
    """Reads a response request as a chat, and answers it with items."""

    def __init__(self, intake: Intake, chats: ChatReader, responder: Responder) -> None:
        self._intake = intake
        self._chats = chats
        self._responder = responder

    async def create(self, request: Request) -> Response:
        """Answer a conversation with items, streamed or as a whole."""
        return await self._intake.accept(request, self._prepare)

    async def _prepare(self, request: Request) -> GenerationResponse:
        intake = self._intake
        body = await intake.read(request)
        refuse_fields_of_chats(body)
        fields = convert(body, ResponsesRequest)
        intake.check_model(fields.model)
        chat = ChatOfResponse(fields, intake.limits)
        try:
            read = await self._chats.read(chat.request, chat.inputs)
        except RequestError as error:
            raise chat.names.renamed(error) from None
        unique = record_of(request.scope).unique_id
        response = _begun(fields, f"resp_{unique}", intake.model.name, read.sequence.sampling)
        logprobs = _logprobs_of(read.sequence, intake.model.codec)
        reader = (read.reading or Reading()).reader(response.id, 0)
        output = Output(unique, reader, logprobs, chat.customs)

        def make_body(outcomes: list[TextDelta], usage: Usage) -> bytes:
            output.take(outcomes[0])
            counted = with_reasoning_tokens(usage, [output.reasoning_tokens])
            return output.lists.encode(finished(response, output, counted))

        unused = chat.unused + [chat.names.of(name) for name in read.unused]
        headers = warning_headers(unknown_here(body), unused, chat.skipped)
        text = ResponseText(response, output) if fields.stream else None
        return self._responder.start(request, [read.sequence], headers, make_body, text)


def _logprobs_of(sequence: Sequence, codec: TextCodec) -> TextLogprobs:
    """Return the object that gives the answer's tokens their characters; it makes text as the engine does."""
    sampling = sequence.sampling
    if sampling.logprobs is None:
        return NoTextLogprobs()
    detokenizer = codec.detokenizer(
        sequence.prompt_token_ids,
        skip_special_tokens=sampling.skip_special_tokens,
        shown=sampling.shown_special_tokens,
    )
    return PlacedLogprobs(codec.token_bytes, detokenizer)


def _begun(fields: ResponsesRequest, id_: str, model: str, sampling: SamplingParams) -> ResponseObject:
    """Return the response as it stands before any output."""
    text, limit = fields.text or TextOptions(), fields.max_output_tokens
    return ResponseObject(
        id=id_,
        created_at=int(time.time()),
        model=model,
        instructions=fields.instructions,
        max_output_tokens=None if limit == NO_LIMIT else limit,
        max_tool_calls=fields.max_tool_calls,
        metadata=fields.metadata or {},
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        prompt_cache_key=fields.prompt_cache_key,
        reasoning=fields.reasoning or ReasoningOptions(),
        safety_identifier=fields.safety_identifier,
        temperature=sampling.temperature,
        text=TextOptions(format=text.format or TextFormat(type="text"), verbosity=text.verbosity or "medium"),
        tool_choice=fields.tool_choice or "auto",
        tools=[tool for tool in fields.tools or [] if not is_hosted(tool)],
        top_logprobs=fields.top_logprobs or 0,
        top_p=sampling.top_p,
        user=fields.user,
    )
