"""The request of a client and the answer to it, as plain values.

`SamplingParams` or `PoolingParams` say what is wanted. A `GenerationRequest` travels from the front (`LLM`,
`AsyncLLM`, the API process) to the engine core. A `RequestUpdate` travels back for each step that brings the
request tokens or scores. Field names are vLLM's where the meaning is the same. The state of a request in the
scheduler is in `scheduler.queues`, and its text is in `engine.client.outputs`.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from penstock.config.engine import Pooling
from penstock.config.limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_BYTES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from penstock.errors import ErrorInfo, InvalidRequestError
from penstock.operations import check_session_id

FinishReason = Literal["stop", "length", "abort", "error"]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The constraint on the text that a request generates; exactly one of the first five fields is given.

    Attributes:
        json: the text is JSON that is valid by this JSON schema.
        json_object: the text is any JSON object.
        regex: the whole text matches this regular expression, which has no look-around or back-references.
        choice: the text is one of these.
        grammar: the text is derived from this grammar in Lark's notation, as llguidance reads it.
        whitespace: JSON may have white space between its parts; if false, it has none.
        open_objects: an object may have undeclared fields if its JSON schema does not forbid them. If false,
            an object whose schema does not mention them gets none, or a bounded number of them
            (`grammar.open_objects`).
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    whitespace: bool = False
    open_objects: bool = False

    def validate(self) -> None:
        """Raise `InvalidRequestError` unless exactly one constraint is given, or if `choice` is empty."""
        given = [name for name in self.__struct_fields__[:5] if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            complaint = f"{' and '.join(given)} are given" if given else "none is given"
            raise InvalidRequestError(
                f"structured_outputs takes one of json, json_object, regex, choice and grammar; {complaint}.",
                param="structured_outputs",
            )
        if self.choice == []:
            raise InvalidRequestError("structured_outputs.choice is empty.", param="structured_outputs")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parameters of a request: how tokens are chosen, when the text ends, and what KV blocks it shares.

    Attributes:
        n: sequences to generate, which share the prompt (`engine.client.siblings`).
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches p.
        min_p: drop tokens whose probability is less than `min_p` times that of the likeliest.
        presence_penalty: subtracted from the logit of each token that was generated before.
        frequency_penalty: subtracted from a token's logit once for each time that it was generated.
        repetition_penalty: a positive logit of a token of the prompt or the output is divided by it, any
            other logit of such a token is multiplied by it (`sample.logit_changes` has the whole formula).
        logit_bias: token id -> the number that is added to its logit.
        allowed_token_ids: the only ids that may be sampled; None allows all.
        bad_words: texts whose sequence of tokens is not generated, with or without a space before the text;
            the front makes `bad_word_ids` of them (`tokenizer.bad_words`).
        bad_word_ids: sequences of ids. The last id of a sequence is not sampled right after its other ids,
            if these were generated; tokens of the prompt do not count.
        seed: the i-th token is a pure function of (seed, i, logits); None lets the engine choose.
        max_tokens: tokens to generate at most; None fills the model's context. With 0 the prompt is computed
            up to, but not including, its last token, and nothing is generated.
        min_tokens: end-of-sequence and stop ids are not sampled before this many tokens are generated.
        ignore_eos: go on past the model's own end-of-sequence ids.
        stop: strings that end the text. The front finds them, and cuts the text before them.
        stop_token_ids: ids that end the request, beside the model's end-of-sequence ids.
        logprobs: for each position, give the log-probability of the chosen token, and those of so many
            likeliest tokens; None gives none.
        prompt_logprobs: the same for each token of the prompt except the first, given the tokens before it.
        include_stop_str_in_output: leave the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        shown_special_tokens: names of special tokens that stay in the text all the same, because the front
            recognises tool calls by them.
        detokenize: make text of the tokens; False leaves the text empty.
        cache_salt: the request shares KV blocks only with requests that have the same salt.
        priority: the value of the request's KV blocks to a prefix cache whose policy is `priority`.
        session_id: the open session that keeps the request's KV blocks; "": the request has no session.
        structured_outputs: the constraint on the generated text; None allows every text.
        speculative: a drafter of the engine may guess tokens of this request; guesses change no token.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    bad_word_ids: list[list[int]] = []
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_tokens: list[str] = []
    detokenize: bool = True
    cache_salt: str = ""
    priority: int = 0
    session_id: str = ""
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    speculative: bool = True

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def validate(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError` if a field is out of range; the error names the first such field."""
        _check_range("n", self.n, 1, MAX_N)
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("top_k", self.top_k, -1, vocab_size)
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 0, 2**31 - 1)
            _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, min(MAX_LOGPROBS, vocab_size))
        if self.prompt_logprobs is not None:
            _check_range("prompt_logprobs", self.prompt_logprobs, 0, min(MAX_LOGPROBS, vocab_size))
        _check_range("priority", self.priority, -(2**31), 2**31 - 1)
        salt_bytes = len(self.cache_salt.encode("utf-8", "surrogatepass"))
        _check_range("cache_salt", salt_bytes, 0, MAX_CACHE_SALT_BYTES, what="length of cache_salt in bytes")
        if self.session_id:
            check_session_id(self.session_id)
        self._validate_stops(vocab_size)
        self._validate_logit_changes(vocab_size)
        if self.structured_outputs is not None:
            self.structured_outputs.validate()
            self._validate_end()

    def _validate_logit_changes(self, vocab_size: int) -> None:
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        _check_range(
            "logit_bias", len(self.logit_bias), 0, MAX_LOGIT_BIAS, what="number of logit_bias entries"
        )
        for token_id, value in self.logit_bias.items():
            _check_range("logit_bias", token_id, 0, vocab_size - 1, what="a token id of logit_bias")
            _check_range("logit_bias", value, -100.0, 100.0, what="a value of logit_bias")
        self._validate_bad_words(vocab_size)
        if self.allowed_token_ids is None:
            return
        count = len(self.allowed_token_ids)
        _check_range("allowed_token_ids", count, 1, MAX_ALLOWED_TOKEN_IDS, what="number of allowed_token_ids")
        for token_id in self.allowed_token_ids:
            _check_range("allowed_token_ids", token_id, 0, vocab_size - 1, what="an allowed token id")

    def _validate_bad_words(self, vocab_size: int) -> None:
        _check_range("bad_words", len(self.bad_words), 0, MAX_BAD_WORDS, what="number of bad_words")
        for word in self.bad_words:
            size = len(word.encode("utf-8", "surrogatepass"))
            _check_range("bad_words", size, 1, MAX_BAD_WORD_BYTES, what="length of a bad word in bytes")
        most = 2 * MAX_BAD_WORDS  # a word has two sequences: with a space before it, and without
        _check_range("bad_word_ids", len(self.bad_word_ids), 0, most, what="number of bad_word_ids")
        for ids in self.bad_word_ids:
            _check_range(
                "bad_word_ids", len(ids), 1, MAX_BAD_WORD_TOKENS, what="number of tokens of a bad word"
            )
            for token_id in ids:
                _check_range("bad_word_ids", token_id, 0, vocab_size - 1, what="a token id of a bad word")

    def _validate_stops(self, vocab_size: int) -> None:
        _check_range("stop", len(self.stop_strings), 0, MAX_STOP_STRINGS, what="number of stop strings")
        for text in self.stop_strings:
            size = len(text.encode("utf-8", "surrogatepass"))
            _check_range("stop", size, 1, MAX_STOP_STRING_BYTES, what="length of a stop string in bytes")
        count = len(self.stop_token_ids)
        _check_range("stop_token_ids", count, 0, MAX_STOP_TOKEN_IDS, what="number of stop_token_ids")
        for token_id in self.stop_token_ids:
            _check_range("stop_token_ids", token_id, 0, vocab_size - 1, what="a stop token id")

    def _validate_end(self) -> None:
        """Raise `InvalidRequestError` if `ignore_eos` or `min_tokens` is set beside a grammar.

        They make a text longer, but the grammar says where it ends.
        """
        for param, value in (("ignore_eos", self.ignore_eos), ("min_tokens", self.min_tokens)):
            if value:
                raise InvalidRequestError(
                    f"{param} is {value}, together with structured output, whose grammar says when it ends.",
                    remedy=f"Leave {param} out; ask for a longer text in the schema (minLength, minItems).",
                    param=param,
                    code="invalid_combination",
                )


def _check_range(
    param: str, value: float, low: float, high: float, *, low_open: bool = False, what: str = ""
) -> None:
    inside = (low < value if low_open else low <= value) and value <= high
    if inside and math.isfinite(value):
        return
    bound = f"above {low} and at most {high}" if low_open else f"between {low} and {high}"
    raise InvalidRequestError(
        f"{what or param} must be {bound}, got {value}.", param=param, code="out_of_range"
    )


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The way in which the hidden states of a prompt, after the final norm, become one vector.

    Attributes:
        pooling: the vector is the hidden state of the `last` token, that of the first token (`cls`), or the
            `mean` over all tokens. None takes the engine's setting.
        normalize: divide the vector by its Euclidean length, after `dimensions` has cut it.
        dimensions: keep only so many numbers from the beginning of the vector. The model must have been
            trained for that (`VectorShape`). None keeps all.
    """

    pooling: Pooling | None = None
    normalize: bool = True
    dimensions: int | None = None


class VectorShape(msgspec.Struct, frozen=True, kw_only=True):
    """The lengths of the vectors that a model can give.

    Attributes:
        size: how many numbers a whole vector has.
        cuts: shorter lengths that the model was trained for, to which a vector may be cut.
        any_cut: a vector may be cut to any length.
    """

    size: int
    cuts: tuple[int, ...] = ()
    any_cut: bool = False

    def check(self, dimensions: int | None) -> None:
        """Raise `InvalidRequestError` for a length that no vector of this model can have."""
        if dimensions is None or dimensions == self.size or dimensions in self.cuts:
            return
        if self.any_cut and 1 <= dimensions <= self.size:
            return
        if self.any_cut:
            allowed = f"it may be between 1 and {self.size}"
        elif self.cuts:
            allowed = f"it may be one of {', '.join(map(str, sorted({*self.cuts, self.size})))}"
        else:
            allowed = (
                f"this model gives {self.size} numbers and was not trained to have them cut "
                "(config.json has no matryoshka_dimensions)"
            )
        raise InvalidRequestError(
            f"dimensions is {dimensions}; {allowed}.",
            remedy="Leave dimensions out.",
            param="dimensions",
            code="out_of_range" if self.any_cut or self.cuts else "unsupported_parameter",
        )


class Follower(msgspec.Struct, frozen=True, array_like=True):
    """A further sequence of the same prompt, which differs from the first only in its seed."""

    request_id: str
    seed: int | None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request: one sequence to generate, or several of one prompt, or a prompt to make a vector of.

    The front validates it before the core gets it.

    Attributes:
        pooling: how the vector is made of the prompt's hidden states. Nothing is generated then, and
            `sampling` has no effect. None: tokens are generated.
        followers: the further sequences; the core accepts all sequences of a request, or none.
        follows: "" for most requests. If this request was a follower of another request, and is now sent as
            a request by itself (`alone`), it is the id of that other request.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = SamplingParams()
    pooling: Pooling | None = None
    followers: list[Follower] = []
    follows: str = ""

    def alone(self) -> list[GenerationRequest]:
        """Return each sequence as a request without followers, the first sequence first."""
        if not self.followers:
            return [self]
        replace = msgspec.structs.replace
        others = [
            replace(
                self,
                request_id=follower.request_id,
                sampling=replace(self.sampling, seed=follower.seed),
                followers=[],
                follows=self.request_id,
            )
            for follower in self.followers
        ]
        return [replace(self, followers=[]), *others]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log-probabilities at one position: natural logarithms, of the model's unchanged distribution.

    The chosen token is the token that was sampled at this position; in a prompt, the prompt's token.
    """

    logprob: float  # of the chosen token
    rank: int  # 1 = the chosen token was the likeliest
    top_ids: list[int]  # [num_logprobs], likeliest first
    top_logprobs: list[float]  # [num_logprobs]


class RequestUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The news that one step brings of one request. No update follows one that has a `finish_reason`.

    Scores of the prompt come in separate updates, in the order of its tokens, before all other updates.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None  # one per token id
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the id that ended the request, if an id did
    error: ErrorInfo | None = None  # set if and only if finish_reason == "error"
    queue_seconds: float | None = None  # time spent waiting; set up to the update with the first tokens
    num_cached_tokens: int = 0  # prompt tokens found in the cache; set as `queue_seconds`, but not in errors
    num_accepted_drafts: int = 0  # how many of `token_ids` were guessed before (`speculation.drafter`)
    num_rejected_drafts: int = 0  # how many guesses of this step were wrong
    prompt_logprobs: list[TokenLogprobs] = []  # of the next tokens of the prompt; they begin with its second
    vector: bytes = b""  # float32 [hidden_size], before cut and norm; in the last update of a pooled request
