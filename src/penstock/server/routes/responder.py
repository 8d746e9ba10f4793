"""The last step of a generating request: from its sequences to the response that will run them.

Used by the generating routes, when `intake` and `grammar_checks` have let the request pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import Request

from penstock.config.limits import Limits
from penstock.engine.client.outputs import TextDelta
from penstock.errors import InvalidRequestError
from penstock.server.answers.generation import (
    EventText,
    GenerationContext,
    GenerationJob,
    GenerationResponse,
    Sequence,
    StreamedResponse,
    WholeResponse,
    choices_of,
)
from penstock.server.answers.message_stream import ChunkText
from penstock.server.answers.resumable import ResumableStreams
from penstock.server.answers.sse import Dialect, ShownPrompt, StreamForm
from penstock.server.engine_port import ServedModel
from penstock.server.http.request_record import record_of
from penstock.server.http.text_workers import TextWorkers
from penstock.server.openai.fields import warning_headers
from penstock.server.openai.logprobs import prompt_logprobs
from penstock.server.openai.message_reader import MessageReader, Reading
from penstock.server.openai.openai_types import GenerateRequest, PromptLogprobs, RenderedPrompt, Usage
from penstock.server.routes.intake import ReadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """The shape of the body of an answer, and what its choices go on from."""

    form: StreamForm
    choices: list[Sequence]  # what each goes on from
    num_prompt_logprobs: int | None = None  # likeliest tokens to show at each position of a prompt

    def reader(self, index: int) -> MessageReader:
        """Return the reader of the text of one choice."""
        return (self.form.reading or Reading()).reader(self.form.response_id, index)

    def shown_ids(self, index: int, outcome: TextDelta) -> dict[str, list[int]]:
        """Return the fields that carry ids in a choice, where the client asked for them."""
        if not self.form.return_token_ids:
            return {}
        prompt = self.choices[index].prompt_token_ids
        return {"prompt_token_ids": prompt, "token_ids": outcome.token_ids}

    def prompt_logprobs(self, index: int, outcome: TextDelta) -> PromptLogprobs | msgspec.UnsetType:
        """Return those of the prompt of a choice, where the client asked for them."""
        if self.num_prompt_logprobs is None:
            return msgspec.UNSET
        prompt = self.choices[index].prompt_token_ids
        count, token_bytes = self.num_prompt_logprobs, self.form.token_bytes
        return prompt_logprobs(prompt, outcome.prompt_logprobs, count, token_bytes)

    @property
    def prompt_bytes(self) -> int:
        """Estimate how many bytes of prompts the body shows."""
        id_bytes = _ID_BYTES if self.form.return_token_ids else 0
        return sum(
            id_bytes * len(choice.prompt_token_ids) + (0 if choice.echo is None else len(choice.echo.text))
            for choice in self.choices
        )


_SCORE_BYTES = 64  # in an answer, about, of each number
_ID_BYTES = 6


def check_scores(sequences: list[Sequence], limits: Limits, param: str) -> None:
    """Raise `InvalidRequestError` if the prompts have more log-probabilities than an answer may show."""
    wanted = sum(
        len(choice.prompt_token_ids) * (1 + choice.sampling.prompt_logprobs)
        for choice in choices_of(sequences)
        if choice.sampling.prompt_logprobs is not None
    )
    if wanted > limits.max_prompt_scores:
        raise InvalidRequestError(
            f"the request needs {wanted} log-probabilities of prompts (tokens times 1 + {param}); the limit "
            f"is {limits.max_prompt_scores}.",
            remedy="Send the prompts in several requests, or ask for fewer likeliest tokens.",
            param=param,
            code="out_of_range",
        )


def _shown_prompts(form: StreamForm, sequences: Iterable[Sequence]) -> list[ShownPrompt]:
    """Return the shown prompt of each choice; the choices of a prompt share it."""
    shown = [
        (ShownPrompt(form, sequence.prompt_token_ids, sequence.echo), sequence.sampling.n)
        for sequence in sequences
    ]
    return [prompt for prompt, n in shown for _ in range(n)]


def _outcome_bytes(outcomes: list[TextDelta]) -> int:
    """Return about how many bytes the outcomes take in an answer."""
    numbers, characters = 0, 0
    for outcome in outcomes:
        characters += len(outcome.text)
        numbers += len(outcome.token_ids)
        for scores in (outcome.prompt_logprobs, outcome.logprobs or []):
            numbers += len(scores) * (1 + len(scores[0].top_ids)) if scores else 0
    return characters + _SCORE_BYTES * numbers


BodyMaker = Callable[[AnswerShape, list[TextDelta], Usage], bytes]


class Responder:
    """Makes the responses of the generating routes; one for the server."""

    def __init__(
        self,
        model: ServedModel,
        context: GenerationContext,
        limits: Limits,
        workers: TextWorkers,
        streams: ResumableStreams,
    ) -> None:
        self._model = model
        self._context = context
        self._limits = limits
        self._workers = workers
        self._streams = streams

    def rendered(self, text: str | None, ids: list[int]) -> RenderedPrompt:
        """Return what is shown of a prompt that does not run."""
        context_length = self._model.context_length(self._context.engine)
        return RenderedPrompt(prompt=text, token_ids=ids, count=len(ids), max_model_len=context_length)

    def respond(
        self,
        read: ReadRequest[GenerateRequest],
        sequences: list[Sequence],
        dialect: Dialect,
        make_body: BodyMaker,
        reading: Reading | None = None,
        unused: Iterable[str] = (),
    ) -> GenerationResponse:
        """Return the response that will run these sequences, as chunks or as one body.

        Args:
            reading: how a chat's answers are read; None: all of their text is content.
            unused: fields that have no effect on this model.
        """
        fields = read.fields
        check_scores(
            sequences, self._limits, "logprobs" if fields.prompt_logprobs is None else "prompt_logprobs"
        )
        form = StreamForm(
            response_id=dialect.id_prefix + record_of(read.http.scope).unique_id,
            created=int(time.time()),
            model=self._model.name,
            dialect=dialect,
            include_usage=fields.include_usage,
            counts_tokens=fields.counts_tokens,
            return_token_ids=bool(fields.return_token_ids),
            with_logprobs=sequences[0].sampling.logprobs is not None,
            codec=self._model.codec,
            skips_special_tokens=sequences[0].sampling.skip_special_tokens,
            reading=reading,
        )
        shape = AnswerShape(
            form=form, choices=choices_of(sequences), num_prompt_logprobs=fields.prompt_logprobs
        )
        headers = warning_headers(read.ignored, list(unused))
        text = ChunkText(form, _shown_prompts(form, sequences)) if fields.stream else None
        make_whole = partial(make_body, shape)
        return self.start(read.http, sequences, headers, make_whole, text, prompt_bytes=shape.prompt_bytes)

    def start(
        self,
        request: Request,
        sequences: list[Sequence],
        headers: Mapping[str, str],
        make_body: Callable[[list[TextDelta], Usage], bytes],
        text: EventText | None,
        *,
        prompt_bytes: int = 0,
    ) -> GenerationResponse:
        """Return the response that will run these sequences, in the shape of its route.

        Args:
            make_body: makes a whole answer of the outcomes.
            text: of the stream; None: the answer is whole.
            prompt_bytes: that a whole answer shows of prompts, about.
        """
        job = GenerationJob(
            sequences=sequences,
            record=record_of(request.scope),
            headers=headers,
            make_body=lambda outcomes, usage: self._workers.answer(
                prompt_bytes + _outcome_bytes(outcomes), make_body, outcomes, usage
            ),
        )
        if text is None:
            return WholeResponse(job, self._context)
        return StreamedResponse(job, self._context, text, self._streams.outlet(request))
