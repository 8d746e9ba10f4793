"""The routes `/tokenize` and `/detokenize`: from text to ids and back, without the engine.

The shapes are vLLM's. Texts and ids have the same bounds as prompts, and long ones are handled by the same
threads (`http.limits`, `openai.prompts`).
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import InvalidRequestError
from penstock.server.http.errors import json_response
from penstock.server.openai.fields import convert, unknown_fields, warning_headers
from penstock.server.openai.openai_types import ChatMessage
from penstock.server.routes.intake import Intake


class TokenizeTextRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`add_special_tokens` may only be false, since the template writes the special tokens."""

    model: str | None = None
    messages: list[ChatMessage]
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


class TextRoute:
    """Turns texts and messages into token ids, and token ids into text.

    Args:
        intake: reads bodies and prompts as the generating routes do.
    """

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text, or of what the chat template makes of messages."""
        body = await self._intake.read(request)
        if body.get("messages") is None:
            fields = convert(body, TokenizeTextRequest)
            self._intake.check_model(fields.model)
            special = fields.add_special_tokens is not False
            tokens = await self._intake.prompts.text(fields.prompt, add_special_tokens=special)
            return await self._tokenized(body, fields, tokens)
        _refuse(body.get("prompt") is not None, "prompt", "without messages")
        chat = convert(body, TokenizeChatRequest)
        self._intake.check_model(chat.model)
        _refuse(chat.add_special_tokens is True, "add_special_tokens", "with a prompt")
        options = {"add_generation_prompt": chat.add_generation_prompt is not False}
        tokens = await self._intake.prompts.chat(chat.messages, options=options)
        return await self._tokenized(body, chat, tokens)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, with the names of special tokens in it."""
        body = await self._intake.read(request)
        fields = convert(body, DetokenizeRequest)
        self._intake.check_model(fields.model)
        text = await self._intake.prompts.detokenized(fields.tokens)
        return _respond(DetokenizeResponse(prompt=text), body, DetokenizeRequest)

    async def _tokenized(
        self, body: dict[str, Any], fields: TokenizeTextRequest | TokenizeChatRequest, tokens: list[int]
    ) -> Response:
        names = await self._intake.prompts.token_names(tokens) if fields.return_token_strs else None
        answer = TokenizeResponse(
            tokens=tokens, count=len(tokens), max_model_len=self._intake.max_model_len, token_strs=names
        )
        return _respond(answer, body, type(fields))


def _respond(answer: msgspec.Struct, body: dict[str, Any], kind: type[msgspec.Struct]) -> Response:
    """Return the answer, with a header that names fields of the body that were ignored."""
    return json_response(msgspec.json.encode(answer), headers=warning_headers(unknown_fields(body, kind)))


def _refuse(is_given: bool, name: str, where: str) -> None:
    if is_given:
        raise InvalidRequestError(f"{name} may only be set {where}.", remedy="Leave it out.", param=name)
