"""`GET /v1/models` and `GET /v1/models/{model_id}`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import NotFoundError
from penstock.server.engine_port import EngineLike, ServedModel
from penstock.server.http.errors import json_response
from penstock.server.openai.openai_types import ModelCard, ModelList


class ModelsRoute:
    def __init__(self, model: ServedModel, engine: EngineLike) -> None:
        self._model = model
        self._engine = engine

    async def list(self) -> Response:
        """The models that this server has: one."""
        return json_response(msgspec.json.encode(ModelList(data=[self._card()])))

    async def get(self, request: Request) -> Response:
        """One model by its exact name; the name has no meaning as a path."""
        model_id: str = request.path_params["model_id"]
        if model_id != self._model.name:
            raise NotFoundError(
                f"The model {model_id[:128]!r} does not exist here; this server has {self._model.name!r}.",
                param="model",
                code="model_not_found",
            )
        return json_response(msgspec.json.encode(self._card()))

    def _card(self) -> ModelCard:
        model = self._model
        return ModelCard(
            id=model.name,
            created=model.created,
            max_model_len=model.context_length(self._engine),
            vocab_size=model.vocab_size,
        )
