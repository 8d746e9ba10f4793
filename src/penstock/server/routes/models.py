"""The routes `GET /v1/models` and `GET /v1/models/{model_id}`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.engine_port import EngineLike, ServedModel
from penstock.server.http.errors import json_response
from penstock.server.openai.openai_types import ModelCard, ModelList


class ModelsRoute:
    def __init__(self, model: ServedModel, engine: EngineLike) -> None:
        self._model = model
        self._engine = engine

    async def list(self) -> Response:
        """Return the model that this server has, once for each of its names."""
        cards = [self._card(name) for name in self._model.names]
        return json_response(msgspec.json.encode(ModelList(data=cards)))

    async def get(self, request: Request) -> Response:
        """Return the model by one of its exact names; slashes in a name have no meaning."""
        model_id: str = request.path_params["model_id"]
        self._model.require_name(model_id)
        return json_response(msgspec.json.encode(self._card(model_id)))

    def _card(self, name: str) -> ModelCard:
        model = self._model
        return ModelCard(
            id=name,
            created=model.created,
            max_model_len=model.context_length(self._engine),
            vocab_size=model.vocab_size,
        )
