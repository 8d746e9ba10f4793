"""Bounds of what clients may ask: of one request, of structured output, and of connections.

`MAX_...` is what one request may ask of the engine at most; `Limits` may only lower it. `config.server` holds
the limits in force; `server.http.limits` and the readers of `server.openai` apply them.
"""

from __future__ import annotations

import msgspec

from penstock.config.checks import above_zero, at_least, between
from penstock.errors import UsageError

# What one request may ask of the engine; `Limits` may only lower them.
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_CACHE_SALT_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_N = 128
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_SESSION_ID_CHARACTERS = 64
MAX_BAD_WORDS = 128
MAX_BAD_WORD_BYTES = 128
MAX_BAD_WORD_TOKENS = 256


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of what one request may carry; what is beyond them is answered 413 (the body) or 400.

    Attributes:
        max_body_bytes: None allows 2 MiB and 8 bytes for each token of context.
        max_prompt_bytes: of text in one prompt or conversation; None allows 16 for each token of context.
        max_json_depth: brackets within brackets.
        max_messages: of a conversation.
        max_prompts: of one completions request.
        max_prompt_scores: log-probabilities of all prompts of one request, likeliest tokens included.
        max_embedding_inputs, max_embedding_tokens: of one embeddings request, all inputs together.
        max_tools: that a request names.
        max_tool_bytes: of all of them, as JSON.
        max_template_kwargs: variables for the chat template.
        max_profile_s, max_profile_bytes: of one profile, which then ends by itself.
        max_profiles: in the directory for them.
        max_event_streams: readers of `/debug/pipeline/events` at once; one more is answered 429.
        max_choices: of one request: prompts times `n`.
        session_idle_s, max_session_idle_s: after which a session that nobody uses is closed: where
            whoever opens it does not say, and at most.
        max_logprobs, max_stop_strings, max_stop_string_bytes, max_stop_token_ids, max_logit_bias,
        max_allowed_token_ids, max_bad_words, max_bad_word_bytes, max_n: no more than what `SamplingParams`
        takes, which is the default.
    """

    max_body_bytes: int | None = None
    max_prompt_bytes: int | None = None
    max_json_depth: int = 64
    max_messages: int = 4096
    max_prompts: int = 256
    max_prompt_scores: int = 1 << 19
    max_event_streams: int = 16
    max_profile_s: float = 60.0
    max_profile_bytes: int = 256 << 20
    max_profiles: int = 16
    max_tools: int = 128
    max_tool_bytes: int = 256 << 10
    max_template_kwargs: int = 16
    max_choices: int = 256
    max_embedding_inputs: int = 2048
    max_embedding_tokens: int = 300_000
    session_idle_s: float = 600.0
    max_session_idle_s: float = 86_400.0
    max_logprobs: int = MAX_LOGPROBS
    max_stop_strings: int = MAX_STOP_STRINGS
    max_stop_string_bytes: int = MAX_STOP_STRING_BYTES
    max_stop_token_ids: int = MAX_STOP_TOKEN_IDS
    max_logit_bias: int = MAX_LOGIT_BIAS
    max_allowed_token_ids: int = MAX_ALLOWED_TOKEN_IDS
    max_bad_words: int = MAX_BAD_WORDS
    max_bad_word_bytes: int = MAX_BAD_WORD_BYTES
    max_n: int = MAX_N

    def __post_init__(self) -> None:
        for name in (
            "max_body_bytes",
            "max_prompt_bytes",
            "max_json_depth",
            "max_messages",
            "max_prompts",
            "max_choices",
            "max_event_streams",
            "max_profiles",
            "max_embedding_inputs",
            "max_embedding_tokens",
        ):
            value = getattr(self, name)
            if value is not None:
                at_least(name, value, 1)
        at_least("max_prompt_scores", self.max_prompt_scores, 0)
        above_zero("max_profile_s", self.max_profile_s)
        self._check_session_times()
        at_least("max_profile_bytes", self.max_profile_bytes, 1 << 20)
        for name in ("max_tools", "max_tool_bytes", "max_template_kwargs"):
            at_least(name, getattr(self, name), 0)
        between("max_logprobs", self.max_logprobs, 0, MAX_LOGPROBS)
        between("max_stop_strings", self.max_stop_strings, 0, MAX_STOP_STRINGS)
        between("max_stop_string_bytes", self.max_stop_string_bytes, 1, MAX_STOP_STRING_BYTES)
        between("max_stop_token_ids", self.max_stop_token_ids, 0, MAX_STOP_TOKEN_IDS)
        between("max_n", self.max_n, 1, MAX_N)
        between("max_logit_bias", self.max_logit_bias, 0, MAX_LOGIT_BIAS)
        between("max_allowed_token_ids", self.max_allowed_token_ids, 0, MAX_ALLOWED_TOKEN_IDS)
        between("max_bad_words", self.max_bad_words, 0, MAX_BAD_WORDS)
        between("max_bad_word_bytes", self.max_bad_word_bytes, 1, MAX_BAD_WORD_BYTES)

    def _check_session_times(self) -> None:
        above_zero("session_idle_s", self.session_idle_s)
        above_zero("max_session_idle_s", self.max_session_idle_s)
        if self.session_idle_s > self.max_session_idle_s:
            raise UsageError(
                f"session_idle_s is {self.session_idle_s:g}; max_session_idle_s allows "
                f"{self.max_session_idle_s:g}.",
                remedy="Lower the one, or raise the other.",
                param="session_idle_s",
                code="out_of_range",
            )


class GrammarLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of structured output, of one request and of the work that all of them make before they run.

    Attributes:
        max_schema_bytes: of a JSON schema, regular expression or grammar, or of all choices together.
        max_schema_depth: schemas within schemas.
        max_enum_items: of all `enum`s of a schema together, or choices.
        max_pattern_bytes: of one pattern in a schema.
        max_repeats: minItems, maxItems, minLength and their like in a schema.
        max_compiling: that are built at the same time; each takes a thread.
        max_compile_waiting: that wait to be built; one more is answered 429.
        compile_timeout_s: what takes longer to build is answered 400.
        grammar_cache_bytes: of what is known of grammars that were asked for lately.
    """

    max_schema_bytes: int = 64 << 10
    max_schema_depth: int = 32
    max_enum_items: int = 4096
    max_pattern_bytes: int = 512
    max_repeats: int = 10_000
    max_compiling: int = 2
    max_compile_waiting: int = 64
    compile_timeout_s: float = 1.0
    grammar_cache_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if name == "compile_timeout_s":
                above_zero(name, value)
            else:
                at_least(name, value, 0 if name == "grammar_cache_bytes" else 1)


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of connections, and of one of them; times in seconds.

    Attributes:
        max_connections: open at once; one more is answered 503.
        max_request_line: bytes, else 414.
        max_header_bytes, max_headers: else 431.
        header_timeout_s: from the first byte of a head (or the connect) to its end.
        body_timeout_s: without a byte of a body that is not complete.
        keep_alive_timeout_s: between two requests.
        write_timeout_s: in which the client takes nothing of what is written, or gives no sign of life.
        min_body_rate: bytes a second that a body must come at from its `body_timeout_s`-th second on.
        max_discarded_bytes: of a body whose request was already answered.
        max_pipelined: requests that wait behind one another.
    """

    max_connections: int = 4096
    max_request_line: int = 8 << 10
    max_header_bytes: int = 16 << 10
    max_headers: int = 64
    header_timeout_s: float = 10.0
    body_timeout_s: float = 75.0
    keep_alive_timeout_s: float = 75.0
    write_timeout_s: float = 60.0
    min_body_rate: int = 1024
    max_discarded_bytes: int = 64 << 20
    max_pipelined: int = 16

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if not name.endswith("_s"):
                at_least(name, value, 1)
            else:
                above_zero(name, value)
