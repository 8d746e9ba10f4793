"""The route `POST /v1/embeddings`: a vector for each input.

Inputs are texts or token ids in any of the four forms of a completions prompt. They go to the engine a few at
a time, so that a request with thousands of inputs leaves room in the queue. If one input fails, the whole
request does.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from penstock.engine.client.outputs import TextDelta
from penstock.errors import InvalidRequestError
from penstock.request import PoolingParams
from penstock.server.answers.encoding import encode_in_slices
from penstock.server.answers.generation import (
    GenerationContext,
    GenerationJob,
    GenerationResponse,
    Sequence,
    all_of,
)
from penstock.server.http.request_record import record_of
from penstock.server.http.text_workers import TextWorkers
from penstock.server.openai.fields import convert, unknown_fields, warning_headers
from penstock.server.openai.openai_types import (
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    EmbeddingUsage,
    Usage,
)
from penstock.server.routes.intake import Intake

AT_ONCE = 64  # inputs of one request in the engine
_BYTES_PER_NUMBER = 20  # about the bytes of a number in JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingJob(GenerationJob):
    """The work that one embeddings request asks for; sampling parameters of its sequences mean nothing."""

    params: PoolingParams


class EmbeddingsResponse(GenerationResponse):
    """A response that pools all inputs, then answers with one JSON body."""

    _job: EmbeddingJob

    async def _generate(self, send: Send) -> None:
        sequences = self._job.sequences
        self._job.record.prompt_tokens = sum(len(sequence.prompt_token_ids) for sequence in sequences)
        deltas: list[TextDelta | None] = [None] * len(sequences)
        waiting = iter(enumerate(sequences))
        await all_of([self._work_off(waiting, deltas) for _ in sequences[:AT_ONCE]])
        self._job.record.finish_reason = "stop"
        vectors = [delta for delta in deltas if delta is not None]
        await self._send_whole(send, vectors)

    async def _work_off(
        self, waiting: Iterator[tuple[int, Sequence]], deltas: list[TextDelta | None]
    ) -> TextDelta | None:
        """Pool one waiting input after another, until none waits; return the delta of the last one pooled."""
        delta = None
        for index, sequence in waiting:
            stream = self._context.engine.embed(
                f"{self._job.record.unique_id}-{index}", sequence.prompt_token_ids, self._job.params
            )
            self._streams.append(stream)
            delta = deltas[index] = await self._next(stream)
        return delta


class EmbeddingsRoute:
    """Reads an embeddings request and has its inputs pooled."""

    def __init__(self, intake: Intake, context: GenerationContext, workers: TextWorkers) -> None:
        self._intake = intake
        self._context = context
        self._workers = workers

    async def create(self, request: Request) -> Response:
        """Return a vector for each input, in order."""
        return await self._intake.accept(request, self._prepare)

    async def _prepare(self, request: Request) -> GenerationResponse:
        body = await self._intake.read(request)
        fields = convert(body, EmbeddingRequest)
        self._intake.check_model(fields.model)
        params = self._params(fields)
        prompts = await self._intake.prompts.embeddings(fields.input)
        self._refuse_long(prompts)
        write = vector_in_base64 if fields.encoding_format == "base64" else vector_as_numbers
        job = EmbeddingJob(
            sequences=[Sequence(prompt_token_ids=prompt) for prompt in prompts],
            record=record_of(request.scope),
            headers=warning_headers(unknown_fields(body, EmbeddingRequest)),
            make_body=lambda vectors, usage: self._workers.answer(
                _num_bytes(vectors), embedding_body, self._intake.model.name, write, vectors, usage
            ),
            params=params,
        )
        return EmbeddingsResponse(job, self._context)

    def _params(self, fields: EmbeddingRequest) -> PoolingParams:
        self._intake.model.vector.check(fields.dimensions)
        return PoolingParams(
            pooling=fields.pooling,
            normalize=fields.normalize is not False,
            dimensions=fields.dimensions,
        )

    def _refuse_long(self, prompts: list[list[int]]) -> None:
        limit = self._intake.max_model_len
        for index, prompt in enumerate(prompts):
            if len(prompt) > limit:
                raise InvalidRequestError(
                    f"input {index} has {len(prompt)} tokens, more than the model's context of {limit}.",
                    remedy="Split the input into pieces.",
                    param="input",
                    code="context_length_exceeded",
                )


def _num_bytes(outcomes: list[TextDelta]) -> int:
    """Return about how many bytes an answer with these vectors has."""
    return sum(len(outcome.vector) for outcome in outcomes) // 4 * _BYTES_PER_NUMBER


def embedding_body(
    model: str, write: Callable[[bytes], list[float] | str], outcomes: list[TextDelta], usage: Usage
) -> bytes:
    """Return the body of an answer.

    Args:
        write: turns the bytes of a vector, which are float32, into the form that the client wants.
    """
    response = EmbeddingResponse(
        data=[
            Embedding(index=index, embedding=write(outcome.vector)) for index, outcome in enumerate(outcomes)
        ],
        model=model,
        usage=EmbeddingUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.prompt_tokens),
    )
    return encode_in_slices(response)


def vector_as_numbers(vector: bytes) -> list[float]:
    numbers: list[float] = np.frombuffer(vector, dtype=np.float32).tolist()
    return numbers


def vector_in_base64(vector: bytes) -> str:
    return base64.b64encode(np.frombuffer(vector, dtype=np.float32).astype("<f4").tobytes()).decode("ascii")
