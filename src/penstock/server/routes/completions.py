"""The route `POST /v1/completions`: a prompt as text, texts, token ids, or lists of token ids."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.client.outputs import TextDelta
from penstock.server.answers.echo import Echo
from penstock.server.answers.encoding import encode_in_slices
from penstock.server.answers.generation import GenerationResponse, Sequence
from penstock.server.answers.sse import TEXT
from penstock.server.http.errors import json_response
from penstock.server.openai.fields import warning_headers
from penstock.server.openai.openai_types import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    Usage,
)
from penstock.server.openai.prompts import prompt_list
from penstock.server.openai.sampling import (
    check_choices,
    completion_sampling,
    default_completion_tokens,
    fit_to_context,
)
from penstock.server.openai.structured import structured_field
from penstock.server.routes.grammar_checks import GrammarChecks
from penstock.server.routes.intake import Intake
from penstock.server.routes.responder import AnswerShape, Responder


class CompletionsRoute:
    """Reads a completions request, and answers it or shows what it would give the model."""

    def __init__(self, intake: Intake, grammars: GrammarChecks, responder: Responder) -> None:
        self._intake = intake
        self._grammars = grammars
        self._responder = responder

    async def create(self, request: Request) -> Response:
        """Continue each prompt, streamed or as a whole; choice i belongs to prompt i // n."""
        return await self._intake.accept(request, self._prepare)

    async def _prepare(self, request: Request) -> GenerationResponse:
        read = await self._intake.read_generation(request, CompletionRequest)
        sequences = await self._sequences(read.fields)
        await self._grammars.check_sampling(sequences[0].sampling, structured_field(read.fields))
        return self._responder.respond(read, sequences, TEXT, completion_body)

    async def render(self, request: Request) -> Response:
        """Return what a completion with this body would give the model, per prompt; nothing runs."""
        read = await self._intake.read_generation(request, CompletionRequest)
        sequences = await self._sequences(read.fields)
        rendered = [
            self._responder.rendered(prompt if isinstance(prompt, str) else None, sequence.prompt_token_ids)
            for prompt, sequence in zip(prompt_list(read.fields.prompt), sequences, strict=True)
        ]
        return json_response(msgspec.json.encode(rendered), headers=warning_headers(read.ignored))

    async def _sequences(self, request: CompletionRequest) -> list[Sequence]:
        """Return a `Sequence` for each prompt: its ids, sampling parameters and echo."""
        intake = self._intake
        sampling = completion_sampling(request, intake.model, intake.limits, open_objects=intake.open_objects)
        limit, codec = intake.max_model_len, intake.model.codec
        all_ids = await intake.prompts.completions(request.prompt)
        check_choices(sampling, len(all_ids), intake.limits)
        default = default_completion_tokens(request)
        return [
            Sequence(
                prompt_token_ids=token_ids,
                sampling=fit_to_context(sampling, len(token_ids), limit, default=default),
                echo=Echo.of(prompt, token_ids, sampling, codec) if request.echo else None,
            )
            for prompt, token_ids in zip(prompt_list(request.prompt), all_ids, strict=True)
        ]


def completion_body(shape: AnswerShape, outcomes: list[TextDelta], usage: Usage) -> bytes:
    """Return the body of a whole reply."""
    response = CompletionResponse(
        id=shape.form.response_id,
        object="text_completion",
        created=shape.form.created,
        model=shape.form.model,
        choices=[_choice(shape, index, outcome) for index, outcome in enumerate(outcomes)],
        usage=usage,
    )
    return encode_in_slices(response)


def _choice(shape: AnswerShape, index: int, outcome: TextDelta) -> CompletionChoice:
    echo = shape.choices[index].echo
    return CompletionChoice(
        index=index,
        text=outcome.text if echo is None else echo.text + outcome.text,
        logprobs=_logprobs(shape, index, outcome),
        finish_reason=outcome.finish_reason or "stop",
        stop_reason=outcome.stop_reason,
        prompt_logprobs=shape.prompt_logprobs(index, outcome),
        **shape.shown_ids(index, outcome),
    )


def _logprobs(shape: AnswerShape, index: int, outcome: TextDelta) -> CompletionLogprobs | None:
    if outcome.logprobs is None:
        return None
    choice = shape.choices[index]
    echo, writer = choice.echo, shape.form.completion_logprobs(choice.prompt_token_ids, choice.echo)
    logprobs = writer.write(outcome.token_ids, outcome.logprobs)
    return logprobs if echo is None else echo.before(logprobs, outcome.prompt_logprobs)
