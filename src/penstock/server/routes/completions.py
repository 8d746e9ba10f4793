"""`POST /v1/completions`: a prompt as text, texts, token ids, or lists of token ids."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.client.outputs import TextDelta
from penstock.server.answers.echo import Echo
from penstock.server.answers.generation import GenerationResponse, Sequence
from penstock.server.answers.sse import TEXT
from penstock.server.http.errors import json_response
from penstock.server.openai.fields import convert, unknown_fields, warning_headers
from penstock.server.openai.openai_types import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    Usage,
)
from penstock.server.openai.prompts import prompt_list
from penstock.server.openai.sampling import (
    DEFAULT_COMPLETION_TOKENS,
    check_choices,
    completion_sampling,
    fit_to_context,
)
from penstock.server.openai.structured import structured_field
from penstock.server.routes.generation_route import Answer, GenerationRoute


class CompletionsRoute:
    def __init__(self, route: GenerationRoute) -> None:
        self._route = route

    async def create(self, request: Request) -> Response:
        """Continue each prompt, streamed or as a whole; choice i belongs to prompt i // n."""
        return await self._route.accept(request, self._prepare)

    async def _prepare(self, request: Request) -> GenerationResponse:
        route = self._route
        body = await route.read(request)
        asked = convert(body, CompletionRequest)
        route.check_common(asked)
        sequences = await self._sequences(asked)
        await route.prove(sequences[0].sampling, structured_field(asked))
        return route.respond(request, body, asked, sequences, TEXT, completion_body)

    async def render(self, request: Request) -> Response:
        """What a completion with this body would give the model, for each of its prompts; nothing runs."""
        body = await self._route.read(request)
        asked = convert(body, CompletionRequest)
        self._route.check_common(asked)
        sequences = await self._sequences(asked)
        rendered = [
            self._route.rendered(prompt if isinstance(prompt, str) else None, sequence.prompt_token_ids)
            for prompt, sequence in zip(prompt_list(asked.prompt), sequences, strict=True)
        ]
        return json_response(
            msgspec.json.encode(rendered), headers=warning_headers(unknown_fields(body, CompletionRequest))
        )

    async def _sequences(self, asked: CompletionRequest) -> list[Sequence]:
        """One for each prompt."""
        route = self._route
        sampling = completion_sampling(asked, route.model, route.limits)
        limit, codec = route.max_model_len, route.model.codec
        all_ids = await route.prompts.completions(asked.prompt)
        check_choices(sampling, len(all_ids), route.limits)
        return [
            Sequence(
                prompt_token_ids=token_ids,
                sampling=fit_to_context(sampling, len(token_ids), limit, default=DEFAULT_COMPLETION_TOKENS),
                echo=Echo.of(prompt, token_ids, sampling, codec) if asked.echo else None,
            )
            for prompt, token_ids in zip(prompt_list(asked.prompt), all_ids, strict=True)
        ]


def completion_body(answer: Answer, outcomes: list[TextDelta], usage: Usage) -> bytes:
    """A whole answer."""
    response = CompletionResponse(
        id=answer.form.response_id,
        object="text_completion",
        created=answer.form.created,
        model=answer.form.model,
        choices=[_choice(answer, index, outcome) for index, outcome in enumerate(outcomes)],
        usage=usage,
    )
    return msgspec.json.encode(response)


def _choice(answer: Answer, index: int, outcome: TextDelta) -> CompletionChoice:
    echo = answer.choices[index].echo
    return CompletionChoice(
        index=index,
        text=outcome.text if echo is None else echo.text + outcome.text,
        logprobs=_logprobs(answer, index, outcome),
        finish_reason=outcome.finish_reason or "stop",
        stop_reason=outcome.stop_reason,
        prompt_logprobs=answer.prompt_logprobs(index, outcome),
        **answer.shown_ids(index, outcome),
    )


def _logprobs(answer: Answer, index: int, outcome: TextDelta) -> CompletionLogprobs | None:
    if outcome.logprobs is None:
        return None
    choice = answer.choices[index]
    echo, writer = choice.echo, answer.form.completion_logprobs(choice.prompt_token_ids, choice.echo)
    logprobs = writer.write(outcome.token_ids, outcome.logprobs)
    return logprobs if echo is None else echo.before(logprobs, outcome.prompt_logprobs)
