"""The first steps of a request for text: it is accepted, its body is read, and its common fields are checked.

Used by every route that reads a body. A generating request is then read by `chat_reader` or its own route,
checked by `grammar_checks`, and given to `responder`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from penstock.config.server import ServerConfig
from penstock.errors import InvalidRequestError
from penstock.server.answers.generation import GenerationContext, GenerationResponse, require_ready
from penstock.server.engine_port import ServedModel
from penstock.server.http.lifecycle import Interruptible
from penstock.server.http.limits import ByteLimits, read_json
from penstock.server.http.text_workers import TextWorkers
from penstock.server.openai.fields import convert, unknown_fields
from penstock.server.openai.openai_types import GenerateRequest
from penstock.server.openai.prompts import PromptReader

G = TypeVar("G", bound=GenerateRequest)
G_co = TypeVar("G_co", bound=GenerateRequest, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest(Generic[G_co]):
    """A generating request whose body was read and checked.

    Attributes:
        http: the request itself.
        fields: the fields of its body.
        ignored: names of fields in its body that are unknown.
    """

    http: Request
    fields: G_co
    ignored: list[str]


class Intake:
    """Accepts requests, reads their bodies and checks the fields that all have; the server has one intake.

    Attributes:
        prompts: reads the prompts in a body.
        open_objects: whether an object of a JSON schema may have further keys, if neither the schema nor the
            request says so.
        workers: threads for work that would hold up the event loop.
    """

    def __init__(
        self, model: ServedModel, context: GenerationContext, config: ServerConfig, workers: TextWorkers
    ) -> None:
        self.model = model
        self.limits = limits = config.limits
        self.open_objects = config.json_open_objects
        self._bytes = ByteLimits.resolve(limits, model.max_model_len)
        self.prompts = PromptReader(model, limits, self._bytes.max_prompt, workers)
        self._context = context
        self.workers = workers

    @property
    def max_model_len(self) -> int:
        """The most tokens that a prompt and its output may have together, as far as is known now."""
        return self.model.context_length(self._context.engine)

    async def accept(
        self, request: Request, prepare: Callable[[Request], Coroutine[Any, Any, GenerationResponse]]
    ) -> GenerationResponse:
        """Return the response that `prepare` makes for the request, if this server takes work now.

        From here to the end of its response the request counts as running: a drain waits for it, also while
        its body is read and its prompt tokenised.

        Raises:
            UnavailableError: this server takes no work now.
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
        """Return the body as a JSON object. Raises errors of `http.limits.read_json`."""
        return await read_json(request, self._bytes.max_body, self.limits.max_json_depth, self.workers)

    async def read_generation(self, request: Request, kind: type[G]) -> ReadRequest[G]:
        """Return the body as a generating request whose common fields are checked.

        Raises:
            NotFoundError: the model is not served here. This is checked before any work on the prompt.
            InvalidRequestError: a field has a wrong type, or fields do not go together.
        """
        body = await self.read(request)
        fields = convert(body, kind)
        self._check_common(fields)
        return ReadRequest(http=request, fields=fields, ignored=unknown_fields(body, kind))

    def check_model(self, name: str | None) -> None:
        """Raise `NotFoundError` if a request names another model; it need not name any."""
        if name:
            self.model.require_name(name)

    def _check_common(self, fields: GenerateRequest) -> None:
        self.check_model(fields.model)
        if fields.stream_options is not None and not fields.stream:
            raise InvalidRequestError(
                "stream_options may only be set together with stream: true.", param="stream_options"
            )
        if fields.counts_tokens and not fields.include_usage:
            raise InvalidRequestError(
                "stream_options.continuous_usage_stats may only be set together with include_usage: true.",
                remedy="Set both, or leave it out.",
                param="stream_options.continuous_usage_stats",
            )
        if fields.prompt_logprobs is not None and fields.stream:
            raise InvalidRequestError(
                "prompt_logprobs cannot be streamed.",
                remedy="Leave out stream; a completion streams them with echo and logprobs.",
                param="prompt_logprobs",
            )
