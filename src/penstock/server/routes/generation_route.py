"""What the two generating routes have in common, from the body to the response object."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request

from penstock.config.limits import Limits
from penstock.engine.client.outputs import TextDelta
from penstock.errors import InvalidRequestError, NotFoundError
from penstock.grammar.proving import GrammarProver
from penstock.request import SamplingParams
from penstock.server.answers.generation import (
    EventText,
    GenerationContext,
    GenerationJob,
    GenerationResponse,
    Sequence,
    StreamedResponse,
    WholeResponse,
    choices_of,
    require_ready,
)
from penstock.server.answers.message_stream import ChunkText
from penstock.server.answers.sse import Dialect, ShownPrompt, StreamForm
from penstock.server.engine_port import ServedModel
from penstock.server.http.lifecycle import Interruptible
from penstock.server.http.limits import ByteLimits, read_json
from penstock.server.http.request_record import record_of
from penstock.server.http.text_workers import TextWorkers
from penstock.server.openai.fields import unknown_fields, warning_headers
from penstock.server.openai.logprobs import prompt_logprobs
from penstock.server.openai.message_reader import MessageReader, Reading
from penstock.server.openai.openai_types import GenerateRequest, PromptLogprobs, RenderedPrompt, Usage
from penstock.server.openai.prompts import PromptReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the chunks or the body of one answer are made of."""

    form: StreamForm
    choices: list[Sequence]  # what each goes on from
    num_prompt_logprobs: int | None = None  # likeliest to tell at each position of a prompt

    def reader(self, index: int) -> MessageReader:
        """Of the text of one choice."""
        return (self.form.reading or Reading()).reader(self.form.response_id, index)

    def shown_ids(self, index: int, outcome: TextDelta) -> dict[str, list[int]]:
        """The fields that carry ids in a choice, where the client asked for them."""
        if not self.form.return_token_ids:
            return {}
        prompt = self.choices[index].prompt_token_ids
        return {"prompt_token_ids": prompt, "token_ids": outcome.token_ids}

    def prompt_logprobs(self, index: int, outcome: TextDelta) -> PromptLogprobs | msgspec.UnsetType:
        """Of the prompt of a choice, where the client asked for them."""
        if self.num_prompt_logprobs is None:
            return msgspec.UNSET
        prompt = self.choices[index].prompt_token_ids
        count, token_bytes = self.num_prompt_logprobs, self.form.token_bytes
        return prompt_logprobs(prompt, outcome.prompt_logprobs, count, token_bytes)

    @property
    def prompt_bytes(self) -> int:
        """What it shows of prompts, about."""
        id_bytes = _ID_BYTES if self.form.return_token_ids else 0
        return sum(
            id_bytes * len(one.prompt_token_ids) + (0 if one.echo is None else len(one.echo.text))
            for one in self.choices
        )


_SCORE_BYTES = 64  # in an answer, about, of each number
_ID_BYTES = 6


def check_scores(sequences: list[Sequence], limits: Limits, param: str) -> None:
    """Raise `InvalidRequestError` where more numbers of all prompts are wanted than one answer may have."""
    wanted = sum(
        len(one.prompt_token_ids) * (1 + one.sampling.prompt_logprobs)
        for one in choices_of(sequences)
        if one.sampling.prompt_logprobs is not None
    )
    if wanted > limits.max_prompt_scores:
        raise InvalidRequestError(
            f"{wanted} log-probabilities of prompts are asked for (tokens times 1 + {param}); this server "
            f"gives {limits.max_prompt_scores} in one answer.",
            remedy="Send the prompts in several requests, or ask for fewer likeliest tokens.",
            param=param,
            code="out_of_range",
        )


def _shown_prompts(form: StreamForm, sequences: Iterable[Sequence]) -> list[ShownPrompt]:
    """One for each choice; those of a prompt have the same."""
    shown = [(ShownPrompt(form, one.prompt_token_ids, one.echo), one.sampling.n) for one in sequences]
    return [prompt for prompt, n in shown for _ in range(n)]


def _outcome_bytes(outcomes: list[TextDelta]) -> int:
    """What they take in an answer, about."""
    numbers, characters = 0, 0
    for outcome in outcomes:
        characters += len(outcome.text)
        numbers += len(outcome.token_ids)
        for scores in (outcome.prompt_logprobs, outcome.logprobs or []):
            numbers += len(scores) * (1 + len(scores[0].top_ids)) if scores else 0
    return characters + _SCORE_BYTES * numbers


@contextlib.contextmanager
def asked_by(param: str) -> Iterator[None]:
    """Let a refusal name the field by which it was asked for."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = param
        raise


BodyMaker = Callable[[Answer, list[TextDelta], Usage], bytes]


class GenerationRoute:
    """Collaborators of both routes and the steps that they share; one for the server."""

    def __init__(
        self,
        model: ServedModel,
        context: GenerationContext,
        limits: Limits,
        workers: TextWorkers,
        grammars: GrammarProver,
    ) -> None:
        self.model = model
        self.limits = limits
        self._bytes = ByteLimits.resolve(limits, model.max_model_len)
        self.prompts = PromptReader(model, limits, self._bytes.max_prompt, workers)
        self._context = context
        self._workers = workers
        self._grammars = grammars

    @property
    def max_model_len(self) -> int:
        return min(self.model.max_model_len, self._context.engine.max_model_len)

    async def accept(
        self, request: Request, prepare: Callable[[Request], Coroutine[Any, Any, GenerationResponse]]
    ) -> GenerationResponse:
        """What `prepare` makes of the request, if this server takes work now.

        The request counts as running from here, through body, template and tokenizing, to the end of its
        response: a drain waits for it.
        """
        require_ready(self._context)
        lifecycle = self._context.lifecycle
        preparation = Interruptible()
        lifecycle.enter(preparation)
        try:
            response = await preparation.run(prepare(request))
            lifecycle.enter(response)
            return response
        finally:
            lifecycle.leave(preparation)

    async def read(self, request: Request) -> dict[str, Any]:
        """The body of an accepted request."""
        return await read_json(request, self._bytes.max_body, self.limits.max_json_depth, self._workers)

    async def prove(self, sampling: SamplingParams, param: str = "structured_outputs") -> None:
        """Return if the structured output that is asked for can be had.

        Args:
            param: the field by which it was asked for.

        Raises:
            InvalidRequestError: it cannot; names the field.
            OverloadedError: too many grammars are being built.
        """
        if sampling.structured_outputs is not None:
            with asked_by(param):
                await self._grammars.prove(sampling.structured_outputs)

    async def prove_made(self, grammar: str, param: str) -> None:
        """The same of a grammar that was made of parts, each of which is within its bounds."""
        with asked_by(param):
            await self._grammars.prove_made(grammar)

    def check_schema(self, schema: str, param: str) -> None:
        """Raise `InvalidRequestError` naming the field where a JSON schema is out of bounds (of its length
        nothing is said), or would not be obeyed in all."""
        with asked_by(param):
            self._grammars.check_schema(schema)

    def check_common(self, asked: GenerateRequest) -> None:
        """Raise `NotFoundError` for a model that is not served here, before any work on the prompt."""
        self.check_model(asked.model)
        if asked.stream_options is not None and not asked.stream:
            raise InvalidRequestError(
                "stream_options may only be set together with stream: true.", param="stream_options"
            )
        if asked.counts_tokens and not asked.include_usage:
            raise InvalidRequestError(
                "stream_options.continuous_usage_stats may only be set together with include_usage: true.",
                remedy="Set both, or leave it out.",
                param="stream_options.continuous_usage_stats",
            )
        if asked.prompt_logprobs is not None and asked.stream:
            raise InvalidRequestError(
                "prompt_logprobs are not told in a stream.",
                remedy="Leave out stream; a completion streams them with echo and logprobs.",
                param="prompt_logprobs",
            )

    def check_model(self, name: str | None) -> None:
        """Raise `NotFoundError` for a name that is not the served model's; none at all is."""
        if name and name != self.model.name:
            raise NotFoundError(
                f"The model {name[:128]!r} does not exist here; this server has {self.model.name!r}.",
                param="model",
                code="model_not_found",
            )

    def rendered(self, text: str | None, ids: list[int]) -> RenderedPrompt:
        """What is shown of a prompt that does not run."""
        return RenderedPrompt(prompt=text, token_ids=ids, count=len(ids), max_model_len=self.max_model_len)

    def respond(
        self,
        request: Request,
        body: dict[str, Any],
        asked: GenerateRequest,
        sequences: list[Sequence],
        dialect: Dialect,
        make_body: BodyMaker,
        reading: Reading | None = None,
        unused: Iterable[str] = (),
    ) -> GenerationResponse:
        """The response that will run these sequences.

        Args:
            reading: how a chat's answers are read; None: all of their text is content.
            unused: fields that have no effect on this model.
        """
        check_scores(
            sequences, self.limits, "logprobs" if asked.prompt_logprobs is None else "prompt_logprobs"
        )
        form = StreamForm(
            response_id=dialect.id_prefix + record_of(request.scope).unique_id,
            created=int(time.time()),
            model=self.model.name,
            dialect=dialect,
            include_usage=asked.include_usage,
            counts_tokens=asked.counts_tokens,
            return_token_ids=bool(asked.return_token_ids),
            with_logprobs=sequences[0].sampling.logprobs is not None,
            codec=self.model.codec,
            skips_special_tokens=sequences[0].sampling.skip_special_tokens,
            reading=reading,
        )
        answer = Answer(form=form, choices=choices_of(sequences), num_prompt_logprobs=asked.prompt_logprobs)
        headers = warning_headers(unknown_fields(body, type(asked)), list(unused))
        text = ChunkText(form, _shown_prompts(form, sequences)) if asked.stream else None
        make_whole = partial(make_body, answer)
        return self.start(request, sequences, headers, make_whole, text, prompt_bytes=answer.prompt_bytes)

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
        """The response that will run these sequences, in the shape of its route.

        Args:
            make_body: makes a whole answer of them.
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
        return StreamedResponse(job, self._context, text)
