"""Makes the response of a generating request; the sequences run while the response is sent.

Used by the generating routes, after `intake` and `grammar_checks` have let the request pass.
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
    """The shape of the body of an answer, and the prompts that its choices continue."""

    form: StreamForm
    choices: list[Sequence]  # the prompt and sampling parameters of each choice
    num_prompt_logprobs: int | None = None  # likeliest tokens at each position of a prompt; None: none wanted

    def reader(self, index: int) -> MessageReader:
        """Return the reader of the text of one choice."""
        return (self.form.reading or Reading()).reader(self.form.response_id, index)

    def shown_ids(self, index: int, outcome: TextDelta) -> dict[str, list[int]]:
        """Return the fields of a choice that have token ids; none if the client does not ask for them."""
        if not self.form.return_token_ids:
            return {}
        prompt = self.choices[index].prompt_token_ids
        return {"prompt_token_ids": prompt, "token_ids": outcome.token_ids}

    def prompt_logprobs(self, index: int, outcome: TextDelta) -> PromptLogprobs | msgspec.UnsetType:
        """Return the log-probabilities of a choice's prompt; UNSET if the client does not ask for them."""
        if self.num_prompt_logprobs is None:
            return msgspec.UNSET
        prompt = self.choices[index].prompt_token_ids
        count, token_bytes = self.num_prompt_logprobs, self.form.token_bytes
        return prompt_logprobs(prompt, outcome.prompt_logprobs, count, token_bytes)

    @property
    def prompt_bytes(self) -> int:
        """The estimated number of bytes of prompts that the body shows."""
        id_bytes = _ID_BYTES if self.form.return_token_ids else 0
        return sum(
            id_bytes * len(choice.prompt_token_ids) + (0 if choice.echo is None else len(choice.echo.text))
            for choice in self.choices
        )


_SCORE_BYTES = 64  # about the bytes of a log-probability, or of an id beside it, in an answer
_ID_BYTES = 6  # about the bytes of an id of a prompt in an answer


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
    """Makes the responses of the generating routes; the server has one responder."""

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
        """Return a prompt as it is shown to a client that only wants to see it.

        Args:
            text: the text of the prompt; None: the client gave ids.
        """
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
        """Return the response that will run these sequences, and answer with chunks or with one body.

        Args:
            read: the request.
            dialect: how the route writes a choice in a chunk.
            make_body: makes the body of an answer that is not streamed.
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
        """Return the response that will run these sequences, and answer in the shape of its route.

        Args:
            headers: headers of the answer besides the usual ones.
            make_body: makes the body of an answer that is not streamed.
            text: writes the events of the stream; None: the answer is not streamed.
            prompt_bytes: about how many bytes of prompts such a body shows.
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
