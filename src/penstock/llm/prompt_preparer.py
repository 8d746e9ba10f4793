"""The text side of `LLM` and `AsyncLLM`: prompts and conversations as token ids, and the model's defaults.

`LLM` and `AsyncLLM` make a `PromptPreparer` of the `LaunchPlan`, before an engine runs. Prompts come from the
program's author, so the text of a special token in a prompt becomes that token. In the messages of a
conversation it is ordinary text; only special tokens that the chat template writes become tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar

import msgspec

from penstock.config.engine import ModelConfig, Pooling
from penstock.engine.client.request_check import RequestLimits
from penstock.engine.supervisor.launch import LaunchPlan
from penstock.errors import InvalidRequestError
from penstock.families.registry import load_vector_shape
from penstock.grammar.proving import GrammarModel
from penstock.request import PoolingParams, SamplingParams, VectorShape
from penstock.tokenizer.bad_words import with_bad_words
from penstock.tokenizer.chat_template import ChatTemplate
from penstock.tokenizer.template_files import load_chat_template
from penstock.tokenizer.tokenizer import Tokenizer, load_tokenizer

G = TypeVar("G")


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids; its text, if any, is only handed on."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


Prompt = str | TextPrompt | TokensPrompt | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]

_OF_THE_PROMPT = (None, "prompt", "prompts", "prompt_token_ids", "messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """A prompt as token ids.

    Attributes:
        text: None where the prompt was given as ids alone.
    """

    text: str | None
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPreparer:
    """Makes token ids of prompts and conversations, and knows the model's defaults.

    Attributes:
        default_sampling: the sampling that the checkpoint asks for.
        vector: the lengths of vectors that the model can give.
        pooling: token states that a vector is made of, if a request does not say it.
        grammar_model: the vocabulary by which grammars are proved (`grammar.proving`).
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate
    default_sampling: SamplingParams
    vocab_size: int
    vector: VectorShape
    pooling: Pooling
    grammar_model: GrammarModel

    def sampling_for(
        self, given: SamplingParams | None, limits: RequestLimits, num_prompt_tokens: int
    ) -> SamplingParams:
        """Return the sampling of a request.

        Args:
            given: the caller's parameters, whose bad words become token ids. None: the model's defaults, with
                no more tokens than fit behind the prompt.

        Raises:
            InvalidRequestError: a parameter of the caller is out of range; the error names it.
        """
        if given is None:
            return limits.shortened(normalised_sampling(self.default_sampling), num_prompt_tokens)
        sampling = normalised_sampling(given)
        sampling.validate(self.vocab_size)
        return with_bad_words(sampling, self.tokenizer.encode_trusted, self.vocab_size)

    @classmethod
    def of(cls, plan: LaunchPlan, model: ModelConfig) -> PromptPreparer:
        """Return the preparer of a model. Raises `ModelConfigError` if a file of the model is bad."""
        directory = Path(plan.model_path)
        tokenizer = load_tokenizer(directory)
        return cls(
            tokenizer=tokenizer,
            chat_template=load_chat_template(directory, tokenizer, model.chat_template),
            default_sampling=default_sampling(plan.spec.generation_defaults),
            vocab_size=plan.spec.vocab_size,
            vector=load_vector_shape(directory, plan.spec.hidden_size),
            pooling=model.pooling,
            grammar_model=GrammarModel(directory=directory, eos_token_ids=plan.spec.eos_token_ids),
        )

    def limits(self, max_model_len: int) -> RequestLimits:
        """Return the limits of requests, given the length that the engine serves."""
        return RequestLimits(max_model_len=max_model_len, vocab_size=self.vocab_size, vector=self.vector)

    def prompt(self, prompt: Prompt) -> PreparedPrompt:
        """Return the prompt as token ids. Raises `InvalidRequestError` for a value that is not a prompt."""
        if isinstance(prompt, str):
            return PreparedPrompt(text=prompt, token_ids=self.tokenizer.encode_trusted(prompt))
        given: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
        text = given.get("prompt")
        if "prompt_token_ids" in given:
            token_ids = [token_id(value) for value in given["prompt_token_ids"]]
            return PreparedPrompt(text=text, token_ids=token_ids)
        if isinstance(text, str):
            return PreparedPrompt(text=text, token_ids=self.tokenizer.encode_trusted(text))
        raise InvalidRequestError(
            f"a prompt must be a text or a mapping with prompt_token_ids, got {type(prompt).__name__}.",
            remedy='Write {"prompt_token_ids": [...]} for token ids.',
            param="prompts",
        )

    def prompts(self, given: Prompt | Sequence[Prompt]) -> list[PreparedPrompt]:
        """Return one prompt, or several, as token ids; an error names the prompt at fault."""
        if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
            return [self.prompt(given)]
        return [self._placed("prompts", index, self.prompt, prompt) for index, prompt in enumerate(given)]

    def conversation(self, messages: Conversation, options: Mapping[str, Any]) -> PreparedPrompt:
        """Return a list of messages as token ids, by the model's chat template.

        Args:
            options: `add_generation_prompt`, `continue_final_message`, and variables of the template, `tools`
                among them.
        """
        if options.get("continue_final_message"):
            _check_continued(messages)
        if options.get("tools") and "tools" not in self.chat_template.reads:
            raise InvalidRequestError(
                "the chat template of this model does not support tools.",
                remedy="Describe the tools in a message instead.",
                param="tools",
                code="unsupported_parameter",
            )
        text = self.chat_template.render(messages, **options)
        return PreparedPrompt(text=text, token_ids=self.chat_template.encode(messages, **options))

    def conversations(
        self, given: Conversation | Sequence[Conversation], options: Mapping[str, Any]
    ) -> list[PreparedPrompt]:
        """Return one conversation, or several, as token ids; an error names the conversation at fault."""
        if given and isinstance(given[0], Mapping):
            return [self.conversation(given, options)]  # type: ignore[arg-type]
        return [
            self._placed("messages", index, self.conversation, conversation, options)
            for index, conversation in enumerate(given)
        ]

    @staticmethod
    def _placed(name: str, index: int, prepare: Any, *arguments: Any) -> PreparedPrompt:
        with at_place(f"{name}[{index}]"):
            prepared: PreparedPrompt = prepare(*arguments)
        return prepared


@contextlib.contextmanager
def at_place(field: str) -> Iterator[None]:
    """Put the place of a request among the arguments, such as `prompts[3]`, into errors that refuse it."""
    try:
        yield
    except InvalidRequestError as error:
        param = field if error.param in _OF_THE_PROMPT else error.param
        raise InvalidRequestError(
            f"{field}: {error.message}", remedy=error.remedy, param=param, code=error.code
        ) from error


def chat_options(
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the options with which a conversation is rendered.

    Raises:
        InvalidRequestError: two options exclude each other.
    """
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "continue_final_message continues the last message, but add_generation_prompt begins a new one.",
            remedy="Set add_generation_prompt to False.",
            param="continue_final_message",
        )
    options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, **(kwargs or {})}
    options |= {"continue_final_message": True} if continue_final_message else {}
    return options | ({"tools": list(tools)} if tools else {})


def _check_continued(messages: Conversation) -> None:
    if not messages or messages[-1].get("role") != "assistant" or messages[-1].get("tool_calls"):
        raise InvalidRequestError(
            "continue_final_message needs a last message of the assistant, with text and without tool_calls.",
            param="continue_final_message",
        )


def default_sampling(defaults: Mapping[str, float]) -> SamplingParams:
    """Return `SamplingParams` with the values that a checkpoint asks for."""
    values: dict[str, Any] = dict(defaults)
    if "top_k" in values:
        values["top_k"] = int(values["top_k"])
    return SamplingParams(**values)


def normalised_sampling(sampling: SamplingParams) -> SamplingParams:
    """Return the same values with the types that a wire would give them: a temperature of 0 becomes 0.0."""
    try:
        return msgspec.convert(msgspec.to_builtins(sampling), SamplingParams)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequestError(f"sampling_params: {error}.", param="sampling_params") from error


def raw_pooling(given: G | None, pooling: Pooling | None) -> G | PoolingParams:
    """Return the parameters of `encode`: the caller's, or parameters that do not scale to length 1.

    Args:
        given: the caller's parameters; None if there are none.
        pooling: the token states to pool, if `given` is None.
    """
    if given is None:
        return PoolingParams(pooling=pooling, normalize=False)
    if pooling is not None:
        raise InvalidRequestError(
            "pooling and pooling_params mean the same; give one of them.", param="pooling"
        )
    return given


def normalised_pooling(params: PoolingParams) -> PoolingParams:
    """Return the same values with the types that a wire would give them."""
    try:
        return msgspec.convert(msgspec.to_builtins(params), PoolingParams)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequestError(f"pooling_params: {error}.", param="pooling_params") from error


def token_id(value: Any) -> int:
    """Return an integer of any library as an `int`. Raises `InvalidRequestError` for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return int(value.__index__())  # numpy and torch scalars
    except (AttributeError, TypeError) as error:
        raise InvalidRequestError(
            f"prompt_token_ids must be integers, got {type(value).__name__}.", param="prompt_token_ids"
        ) from error
