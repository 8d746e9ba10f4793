"""Turns the fields of a request into `SamplingParams`, and checks them against the model."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.config.limits import Limits
from penstock.errors import InvalidRequestError
from penstock.request import SamplingParams
from penstock.server.engine_port import ServedModel
from penstock.server.openai.openai_types import ChatRequest, CompletionRequest, GenerateRequest
from penstock.server.openai.structured import structured_outputs
from penstock.tokenizer.bad_words import with_bad_words

DEFAULT_COMPLETION_TOKENS = 16
NO_LIMIT = -1  # as `max_tokens`: as many as fit into the context after the prompt
_FROM_MODEL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def chat_sampling(
    request: ChatRequest, model: ServedModel, limits: Limits, *, open_objects: bool
) -> SamplingParams:
    """Return the sampling parameters of a chat request; with `max_tokens` None the answer fills the context.

    Args:
        open_objects: whether an object of a JSON schema may have further keys, if neither the schema nor the
            request says so.

    Raises:
        InvalidRequestError: a field is out of bounds, or does not fit the model; the error names it.
    """
    most, name = min(limits.max_logprobs, model.vocab_size), output_field(request)
    limit, logprobs = getattr(request, name), _chat_logprobs(request, most)
    try:
        sampling = _validated(request, model, max_tokens=limit, logprobs=logprobs, open_objects=open_objects)
    except InvalidRequestError as error:
        if error.param != "max_tokens":
            raise
        message = error.message.replace("max_tokens", name)
        raise InvalidRequestError(message, remedy=error.remedy, param=name, code=error.code) from None
    return _settled(sampling, model, limits)


def output_field(request: ChatRequest) -> str:
    """Return the name of the field that bounds a chat's answer: the newer name if the request uses it."""
    return "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"


def completion_sampling(
    request: CompletionRequest, model: ServedModel, limits: Limits, *, open_objects: bool
) -> SamplingParams:
    """Return the sampling parameters of a completions request; arguments and errors as in `chat_sampling`."""
    sampling = _validated(
        request,
        model,
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
        open_objects=open_objects,
    )
    if request.echo and sampling.logprobs is not None:
        most = max(sampling.logprobs, sampling.prompt_logprobs or 0)
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=most)
    return _settled(sampling, model, limits)


def default_completion_tokens(request: CompletionRequest) -> int | None:
    """Return how many tokens a completions request generates if it gives no number; None: as many as fit."""
    return None if request.max_tokens == NO_LIMIT else DEFAULT_COMPLETION_TOKENS


def _settled(sampling: SamplingParams, model: ServedModel, limits: Limits) -> SamplingParams:
    """Return the sampling parameters, checked against the limits, with token ids for the bad words.

    The words are tokenised on the event loop, since all of them together are a short text.
    """
    return with_bad_words(_within(sampling, limits), model.codec.encode_trusted, model.vocab_size)


def _within(sampling: SamplingParams, limits: Limits) -> SamplingParams:
    """Return the sampling parameters as they are. Raises `InvalidRequestError` if they exceed the limits."""
    stops = sampling.stop_strings
    longest = max((len(text.encode()) for text in stops), default=0)
    longest_word = max((len(text.encode("utf-8", "surrogatepass")) for text in sampling.bad_words), default=0)
    for param, what, value, most in (
        ("n", "n", sampling.n, limits.max_n),
        ("logprobs", "logprobs", sampling.logprobs or 0, limits.max_logprobs),
        ("prompt_logprobs", "prompt_logprobs", sampling.prompt_logprobs or 0, limits.max_logprobs),
        ("stop", "the number of stop strings", len(stops), limits.max_stop_strings),
        ("stop", "the length of a stop string in bytes", longest, limits.max_stop_string_bytes),
        (
            "stop_token_ids",
            "the number of stop_token_ids",
            len(sampling.stop_token_ids),
            limits.max_stop_token_ids,
        ),
        (
            "logit_bias",
            "the number of logit_bias entries",
            len(sampling.logit_bias),
            limits.max_logit_bias,
        ),
        (
            "allowed_token_ids",
            "the number of allowed_token_ids",
            len(sampling.allowed_token_ids or ()),
            limits.max_allowed_token_ids,
        ),
        ("bad_words", "the number of bad_words", len(sampling.bad_words), limits.max_bad_words),
        ("bad_words", "the length of a bad word in bytes", longest_word, limits.max_bad_word_bytes),
    ):
        if value > most:
            raise InvalidRequestError(
                f"{what} is {value}; this server allows {most}.",
                remedy="Ask for fewer.",
                param=param,
                code="out_of_range",
            )
    return sampling


def check_choices(sampling: SamplingParams, num_prompts: int, limits: Limits) -> None:
    """Raise `InvalidRequestError` for more choices than one request may have."""
    if sampling.n * num_prompts > limits.max_choices:
        raise InvalidRequestError(
            f"n is {sampling.n} and there are {num_prompts} prompts, together {sampling.n * num_prompts} "
            f"choices; this server allows {limits.max_choices}.",
            remedy="Send them in several requests.",
            param="n",
            code="out_of_range",
        )


def _validated(
    request: GenerateRequest,
    model: ServedModel,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    open_objects: bool,
) -> SamplingParams:
    given = {
        name: value
        for name in SamplingParams.__struct_fields__
        if (value := getattr(request, name, None)) is not None
    }
    silent = {
        name: value
        for name, value in model.sampling_defaults.items()
        if name in _FROM_MODEL and name not in given
    }
    fields: dict[str, Any] = (
        silent
        | given
        | {
            "max_tokens": None if max_tokens == NO_LIMIT else max_tokens,
            "logprobs": logprobs,
        }
    )
    fields["structured_outputs"] = structured_outputs(request, open_objects=open_objects)
    sampling = SamplingParams(**fields)
    sampling.validate(model.vocab_size)
    return sampling


def _chat_logprobs(request: ChatRequest, most: int) -> int | None:
    count = request.top_logprobs or 0
    if not 0 <= count <= most:
        raise InvalidRequestError(
            f"top_logprobs must be between 0 and {most}, got {count}.",
            param="top_logprobs",
            code="out_of_range",
        )
    if count and not request.logprobs:
        raise InvalidRequestError(
            "top_logprobs needs logprobs: true.",
            remedy="Set it, or leave top_logprobs out.",
            param="top_logprobs",
        )
    return count if request.logprobs else None


def fit_to_context(
    sampling: SamplingParams,
    num_prompt_tokens: int,
    max_model_len: int,
    *,
    default: int | None,
    prompt_field: str = "prompt",
    output_field: str = "max_tokens",
) -> SamplingParams:
    """Return the sampling parameters with a `max_tokens` that fits into the context after this prompt.

    Args:
        default: tokens to generate if the request gives no number; None: as many as fit. The default is
            lowered until it fits, but not below `min_tokens`; a number that the client gave is not lowered.
        prompt_field, output_field: the client's names of the prompt and of the bound on the output.

    Raises:
        InvalidRequestError: prompt and output do not fit into the context. If the request gives no number of
            tokens, `min_tokens` and at least one are counted for the output.
    """
    room, least = max_model_len - num_prompt_tokens, 0 if sampling.max_tokens == 0 else 1
    name, wanted = output_field, sampling.max_tokens
    if wanted is None:
        name, wanted = "min_tokens", sampling.min_tokens
    if room >= least and wanted <= room:
        if sampling.max_tokens is not None:
            return sampling
        most = room if default is None else max(min(default, room), wanted)
        return msgspec.structs.replace(sampling, max_tokens=most)
    if wanted:
        whole = (
            f"The prompt has {num_prompt_tokens} tokens and {name} {wanted}, together more than the model's"
        )
        remedy = f"Shorten the prompt or lower {name}."
    else:
        beside = "which with room for an answer is more" if least else "more"
        whole = f"The prompt has {num_prompt_tokens} tokens, {beside} than the model's"
        remedy = "Shorten the prompt."
    raise InvalidRequestError(
        f"{whole} context of {max_model_len} tokens.",
        remedy=remedy,
        param=prompt_field if room < least else name,
        code="context_length_exceeded",
    )
