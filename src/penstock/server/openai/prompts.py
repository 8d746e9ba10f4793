"""Turns the prompt or the messages of a request into token ids, and checks them against the model.

Text that cannot fit is refused by its length in bytes, before the tokenizer sees it. If all prompts of a
request together are long, a thread beside the event loop tokenises them, as one piece of work. Ids that the
client gave are checked against the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import msgspec

from penstock.config.limits import Limits
from penstock.errors import InvalidRequestError
from penstock.server.engine_port import ServedModel
from penstock.server.http.text_workers import TextWorkers
from penstock.server.openai.logprobs import token_name
from penstock.server.openai.openai_types import ChatMessage, ContentPart
from penstock.server.openai.tools import NO_TOOLS, ToolUse, with_own_text

_TOKEN_BYTES = 4  # about how many bytes of text a token has
_MESSAGE_BYTES = 64  # a template takes about as long for so many bytes of text as for one more message

ROLES = ("system", "developer", "user", "assistant", "tool")

Prompt = str | list[str | int | list[int]]


class _Typed(Protocol):
    @property
    def type(self) -> str: ...


Part = TypeVar("Part", bound=_Typed)
PartText = Callable[[Part], str | None]


class PromptReader:
    """The reader of prompts for the routes; one for the whole server."""

    def __init__(
        self, model: ServedModel, limits: Limits, max_prompt_bytes: int, workers: TextWorkers
    ) -> None:
        self._model = model
        self._limits = limits
        self._max_bytes = max_prompt_bytes
        self._workers = workers

    async def completions(self, prompt: Prompt) -> list[list[int]]:
        """Return the token ids of each prompt of a completions request, in order."""
        return await self._all(prompt, "prompt", self._limits.max_prompts)

    async def embeddings(self, inputs: Prompt) -> list[list[int]]:
        """Return the token ids of each input of an embeddings request, in order."""
        input_ids = await self._all(inputs, "input", self._limits.max_embedding_inputs)
        count, limit = sum(map(len, input_ids)), self._limits.max_embedding_tokens
        if count > limit:
            raise InvalidRequestError(
                f"input has {count} tokens in all; this server accepts {limit} in one request.",
                remedy="Send the inputs in several requests.",
                param="input",
                code="out_of_range",
            )
        return input_ids

    async def _all(self, prompt: Prompt, param: str, most: int) -> list[list[int]]:
        prompts = prompt_list(prompt, param)
        if not 1 <= len(prompts) <= most:
            raise InvalidRequestError(
                f"{param} must hold 1 to {most} prompts, got {len(prompts)}.",
                remedy="Send the prompts in several requests." if prompts else "Give a text or token ids.",
                param=param,
                code="out_of_range",
            )
        sizes = [
            _num_bytes(text_or_ids) if isinstance(text_or_ids, str) else len(text_or_ids)
            for text_or_ids in prompts
        ]
        for size, text_or_ids in zip(sizes, prompts, strict=True):
            if isinstance(text_or_ids, str):
                self._refuse_long(size, param)
        return await self._workers.run(sum(sizes), self._all_token_ids, prompts, param)

    async def chat(
        self, messages: list[ChatMessage], use: ToolUse = NO_TOOLS, options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the token ids of a conversation.

        Args:
            use: the tools that the prompt describes.
            options: options of the chat template, and its variables.
        """
        plain, extra, work = self._conversation(messages, use, options or {})
        ids = await self._workers.run(work, self._model.codec.encode_chat, plain, **extra)
        return _not_empty(ids, "messages")

    async def chat_text(
        self, messages: list[ChatMessage], use: ToolUse = NO_TOOLS, options: Mapping[str, Any] | None = None
    ) -> str:
        """Return the text that the template makes of a conversation; arguments as `chat`."""
        plain, extra, work = self._conversation(messages, use, options or {})
        return await self._workers.run(work, self._model.codec.render_chat, plain, **extra)

    async def text(self, prompt: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of one text; there may be none."""
        size = _num_bytes(prompt)
        self._refuse_long(size, "prompt")
        encode = self._model.codec.encode
        return await self._workers.run(size, encode, prompt, add_special_tokens=add_special_tokens)

    async def detokenized(self, tokens: list[int]) -> str:
        """Return the text of these ids; there may be as many ids as a prompt may have bytes."""
        if len(tokens) > self._max_bytes:
            raise InvalidRequestError(
                f"tokens holds {len(tokens)} ids; the limit is {self._max_bytes}.",
                remedy="Send fewer ids, or raise --max-prompt-bytes.",
                param="tokens",
                code="out_of_range",
            )
        self._check_ids(tokens, "tokens")
        return await self._workers.run(_TOKEN_BYTES * len(tokens), self._model.codec.decode, tokens)

    async def token_names(self, tokens: list[int]) -> list[str]:
        """Return the name of each id, as in log-probabilities."""
        token_bytes = self._model.codec.token_bytes
        return await self._workers.run(
            _TOKEN_BYTES * len(tokens), lambda: [token_name(token_bytes(token)) for token in tokens]
        )

    def _conversation(
        self, messages: list[ChatMessage], use: ToolUse, options: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
        """Return messages and options as a template takes them, and about the bytes of text they cost."""
        if not 1 <= len(messages) <= self._limits.max_messages:
            raise InvalidRequestError(
                f"messages must hold 1 to {self._limits.max_messages} messages, got {len(messages)}.",
                remedy="Leave out the oldest." if messages else "Give at least one.",
                param="messages",
                code="out_of_range",
            )
        plain = [_plain_message(index, message) for index, message in enumerate(messages)]
        self._refuse_long(sum(map(_message_bytes, plain)), "messages")
        plain, tools = self._for_template(plain, use)
        extra = tools | dict(options)
        size = sum(map(_message_bytes, plain)) + (len(msgspec.json.encode(extra)) if extra else 0)
        self._refuse_long(size, "messages")
        return plain, extra, size + _MESSAGE_BYTES * len(plain)

    def _for_template(
        self, plain: list[dict[str, Any]], use: ToolUse
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return messages and tools as the model's template takes them.

        If the template takes no tools, and `--tool-parser json` is set, tools and calls become text of ours.
        """
        syntax = self._model.syntax
        if syntax.template_knows_tools:
            return plain, {"tools": use.tools} if use.tools else {}
        if syntax.tools is not None and syntax.tools.name == "json":
            return with_own_text(plain, use), {}
        called = next((i for i, message in enumerate(plain) if message.get("tool_calls")), None)
        if called is not None and not syntax.template_knows_calls:
            raise InvalidRequestError(
                f"messages[{called}] has tool_calls, but the model's chat template does not support tools.",
                remedy="Leave them out, or start the server with --tool-parser json.",
                param=f"messages[{called}].tool_calls",
                code="unsupported_parameter",
            )
        return plain, {}

    def _all_token_ids(self, prompts: list[str | list[int]], param: str) -> list[list[int]]:
        return [self._token_ids(text_or_ids, param) for text_or_ids in prompts]

    def _token_ids(self, prompt: str | list[int], param: str) -> list[int]:
        if isinstance(prompt, str):
            return _not_empty(self._model.codec.encode(prompt), param)
        if len(_not_empty(prompt, param)) <= self._model.max_model_len:  # else refused for its length
            self._check_ids(prompt, param)
        return prompt

    def _refuse_long(self, size: int, param: str) -> None:
        if size > self._max_bytes:
            raise InvalidRequestError(
                f"{param} has {size} bytes of text, more than the limit of {self._max_bytes} for the "
                f"model's {self._model.max_model_len} tokens of context.",
                remedy="Shorten it, or raise --max-prompt-bytes.",
                param=param,
                code="context_length_exceeded",
            )

    def _check_ids(self, ids: list[int], param: str) -> None:
        if not ids or (min(ids) >= 0 and max(ids) < self._model.vocab_size):
            return
        at, bad = next((i, id_) for i, id_ in enumerate(ids) if not 0 <= id_ < self._model.vocab_size)
        raise InvalidRequestError(
            f"{param}: id {bad} at position {at} is outside the vocabulary of {self._model.vocab_size}.",
            param=param,
            code="token_id_out_of_range",
        )


def prompt_list(prompt: Prompt, param: str = "prompt") -> list[str | list[int]]:
    """Return a prompt, in any of its four forms, as a list of texts or of lists of ids.

    Args:
        param: name of the field in errors.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if int in kinds and len(kinds) > 1:
        raise InvalidRequestError(
            f"{param} mixes token ids with texts or lists.",
            remedy="Give a text, a list of texts, a list of token ids, or a list of lists of token ids.",
            param=param,
            code="invalid_type",
        )
    return [cast("list[int]", prompt)] if int in kinds else cast("list[str | list[int]]", prompt)


def _plain_message(index: int, message: ChatMessage) -> dict[str, Any]:
    """Return a message as a template sees it: role, text, and the other fields that it has."""
    where = f"messages[{index}]"
    if message.role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(ROLES)}, got {message.role[:64]!r}.",
            param=f"{where}.role",
        )
    for name, remedy, is_wrong in (
        ("function_call", "Use tool_calls.", True),
        ("tool_calls", "Only assistant messages can have calls.", message.role != "assistant"),
    ):
        if getattr(message, name) and is_wrong:
            raise InvalidRequestError(
                f"{where}.{name} is not supported.",
                remedy=remedy,
                param=f"{where}.{name}",
                code="unsupported_parameter",
            )
    calls = [msgspec.to_builtins(call) for call in message.tool_calls or []]
    others = {
        "name": message.name,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id if message.role == "tool" else None,
        "reasoning_content": message.reasoning_content if message.role == "assistant" else None,
    }
    content = joined_text(message.content, f"{where}.content", _part_text)
    plain = {"role": message.role, "content": content}
    return plain | {name: value for name, value in others.items() if value is not None}


def _message_bytes(message: dict[str, Any]) -> int:
    """Return the number of bytes of all text in a message."""
    names = ("content", "name", "reasoning_content", "tool_call_id")
    texts = [message.get(name, "") for name in names]
    calls = message.get("tool_calls")
    return sum(map(_num_bytes, texts)) + (len(msgspec.json.encode(calls)) if calls else 0)


def text_of(message: ChatMessage) -> str:
    """Return the text of a message whose content was checked before."""
    return joined_text(message.content, "messages.content", _part_text)


def joined_text(content: str | Sequence[Part] | None, where: str, part_text: PartText[Part]) -> str:
    """Return the text of a content; the texts of its parts are joined by line ends.

    Args:
        where: the content's name in errors.
        part_text: returns the text of a part; None for a part that is not text.

    Raises:
        InvalidRequestError: a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        text = part_text(part)
        if text is None:
            raise InvalidRequestError(
                f"{where}[{index}] has no text; its type is {part.type[:64]!r}.",
                remedy="This server accepts text only.",
                param=f"{where}[{index}]",
                code="unsupported_content",
            )
        texts.append(text)
    return "\n".join(texts)


def _part_text(part: ContentPart) -> str | None:
    return part.text if part.type == "text" else None


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _not_empty(ids: list[int], param: str) -> list[int]:
    if not ids:
        raise InvalidRequestError(
            f"{param} has no tokens.",
            remedy="Give a text that is not empty, or at least one token id.",
            param=param,
            code="empty_prompt",
        )
    return ids
