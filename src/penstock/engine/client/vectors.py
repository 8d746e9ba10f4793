"""Turns the pooled vector of a request into the client's vector: cut, then scaled to length 1 if wanted.

The last stage does the pooling: it makes one vector of the hidden states of a prompt (`sample.pooling`).
This module is used where outputs are made (`engine.client.async_engine`, `llm`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.engine.client.outputs import TextDelta
from penstock.request import PoolingParams, RequestUpdate

Vector = NDArray[np.float32]  # [dimensions]
Output = TypeVar("Output")


def finished_vector(pooled: bytes, params: PoolingParams) -> Vector:
    """Return the first `dimensions` numbers of a pooled vector, scaled to Euclidean length 1 if wanted.

    Args:
        pooled: float32 bytes, as in `RequestUpdate.vector`. A vector of zeros cannot be scaled, and is
            returned as it is.
        params: has `dimensions` (None: all numbers), and `normalize` if the vector is to be scaled.
    """
    wide = np.frombuffer(pooled, dtype="<f4").astype(np.float64)[: params.dimensions]
    length = float(np.sqrt(wide @ wide))
    if params.normalize and length > 0.0:
        wide = wide / length
    return wide.astype(np.float32)


class VectorAssembler:
    """Makes the output of a request for a vector: one delta. Implements `outputs.Assembler`."""

    num_tokens = 0  # a vector has no generated tokens

    def __init__(self, params: PoolingParams) -> None:
        self._params = params

    def append(self, update: RequestUpdate) -> TextDelta:
        """Return the only delta of a request that has not failed, with its finished vector."""
        vector = finished_vector(update.vector, self._params)
        return TextDelta("", [], None, update.finish_reason, vector=vector.tobytes())


@dataclass(slots=True, kw_only=True)
class PoolingOutput:
    """A vector as a numpy array of float32, the field `data` (vLLM has a torch tensor there)."""

    data: Vector


@dataclass(slots=True, kw_only=True)
class EmbeddingOutput:
    """A vector as a list of numbers (fields as in vLLM)."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The length of the vector, after any cut."""
        return len(self.embedding)


@dataclass(slots=True, kw_only=True)
class PoolingRequestOutput(Generic[Output]):
    """The result of pooling one prompt into a vector (fields as in vLLM).

    Attributes:
        outputs: the vector, as `PoolingOutput` or `EmbeddingOutput`.
        num_cached_tokens: always 0: all hidden states of the prompt are computed.
    """

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The result of one prompt of `LLM.embed` (fields as in vLLM)."""


def pooling_output(
    request_id: str, prompt_token_ids: list[int], vector: bytes
) -> PoolingRequestOutput[PoolingOutput]:
    """Return the result of `LLM.encode` for one prompt.

    Args:
        vector: float32 bytes of the finished vector (`TextDelta.vector`).
    """
    data = np.frombuffer(vector, dtype=np.float32).copy()
    return PoolingRequestOutput(
        request_id=request_id, outputs=PoolingOutput(data=data), prompt_token_ids=prompt_token_ids
    )


def embedding_output(request_id: str, prompt_token_ids: list[int], vector: bytes) -> EmbeddingRequestOutput:
    """Return the result of `LLM.embed` for one prompt.

    Args:
        vector: float32 bytes of the finished vector (`TextDelta.vector`).
    """
    numbers = np.frombuffer(vector, dtype=np.float32).tolist()
    return EmbeddingRequestOutput(
        request_id=request_id, outputs=EmbeddingOutput(embedding=numbers), prompt_token_ids=prompt_token_ids
    )
