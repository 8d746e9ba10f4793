"""What the two generating routes have in common, from the body to the response object."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from penstock.config import Limits
from penstock.engine.outputs import TextDelta
from penstock.errors import InvalidRequestError, NotFoundError
from penstock.server.engine_port import ServedModel
from penstock.server.fields import unknown_fields, warning_headers
from penstock.server.generation import (
    GenerationContext,
    GenerationJob,
    GenerationResponse,
    Sequence,
    StreamedResponse,
    WholeResponse,
    require_ready,
)
from penstock.server.lifecycle import Interruptible
from penstock.server.limits import ByteLimits, read_json
from penstock.server.openai_types import GenerateRequest, Usage
from penstock.server.prompts import PromptReader
from penstock.server.request_record import record_of
from penstock.server.sse import Dialect, StreamForm
from penstock.server.text_workers import TextWorkers


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the chunks or the body of one answer are made of."""

    form: StreamForm
    sequences: list[Sequence]

    def shown_ids(self, index: int, outcome: TextDelta) -> dict[str, list[int]]:
        """The fields that carry ids in a choice, where the client asked for them."""
        if not self.form.return_token_ids:
            return {}
        prompt = self.sequences[index].prompt_token_ids
        return {"prompt_token_ids": prompt, "token_ids": outcome.token_ids}


BodyMaker = Callable[[Answer, list[TextDelta], Usage], bytes]


class GenerationRoute:
    """Collaborators of both routes and the steps that they share; one for the server."""

    def __init__(
        self, model: ServedModel, context: GenerationContext, limits: Limits, workers: TextWorkers
    ) -> None:
        self.model = model
        self.limits = limits
        self._bytes = ByteLimits.resolve(limits, model.max_model_len)
        self.prompts = PromptReader(model, limits, self._bytes.max_prompt, workers)
        self._context = context
        self._workers = workers

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

    def check_common(self, asked: GenerateRequest) -> None:
        """Raise `NotFoundError` for a model that is not served here, before any work on the prompt."""
        if asked.model and asked.model != self.model.name:
            raise NotFoundError(
                f"The model {asked.model[:128]!r} does not exist here; this server has {self.model.name!r}.",
                param="model",
                code="model_not_found",
            )
        if asked.stream_options is not None and not asked.stream:
            raise InvalidRequestError(
                "stream_options may only be set together with stream: true.", param="stream_options"
            )

    def respond(
        self,
        request: Request,
        body: dict[str, Any],
        asked: GenerateRequest,
        sequences: list[Sequence],
        dialect: Dialect,
        make_body: BodyMaker,
    ) -> GenerationResponse:
        """The response that will run these sequences."""
        record = record_of(request.scope)
        form = StreamForm(
            response_id=dialect.id_prefix + record.unique_id,
            created=int(time.time()),
            model=self.model.name,
            dialect=dialect,
            include_usage=asked.include_usage,
            return_token_ids=bool(asked.return_token_ids),
            with_logprobs=sequences[0].sampling.logprobs is not None,
            token_bytes=self.model.codec.token_bytes,
        )
        answer = Answer(form=form, sequences=sequences)
        job = GenerationJob(
            sequences=sequences,
            record=record,
            headers=warning_headers(unknown_fields(body, type(asked))),
            make_body=lambda outcomes, usage: make_body(answer, outcomes, usage),
        )
        if asked.stream:
            return StreamedResponse(job, self._context, form)
        return WholeResponse(job, self._context)
