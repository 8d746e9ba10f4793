"""Bounds of what clients may ask: of one request, of structured output, and of connections.

`MAX_...` is what one request may ask of the engine at most; `Limits` may only lower it. `config.server` holds
the limits in force; `server.http.limits` and the readers of `server.openai` apply them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.config.checks import above_zero, at_least, between
from penstock.config.setting import Setting
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
        max_body_bytes: bytes of a request's body; None allows 2 MiB and 8 bytes a token of context.
        max_prompt_bytes: bytes of text in one prompt or conversation; None allows 16 a token of context.
        max_json_depth: brackets within brackets of a body.
        max_messages: messages of one conversation.
        max_prompts: prompts of one completions request.
        max_prompt_scores: log-probabilities of all prompts of one request, likeliest tokens included.
        max_event_streams: readers of `/debug/pipeline/events` at once; one more is answered 429.
        max_resumable_streams: answers kept at once for clients that come back for them; 0: none.
        max_profile_s: seconds after which a profile ends by itself.
        max_profile_bytes: bytes of one profile's file, after which the profile ends by itself.
        max_profiles: files in the directory for profiles.
        max_tools: tools that one request names.
        max_tool_bytes: bytes of all tools of one request, as JSON.
        max_template_kwargs: variables for the chat template that one request gives.
        max_choices: sequences of one request: prompts times `n`.
        max_n: sequences for each prompt; no more than `SamplingParams` takes.
        max_embedding_inputs: inputs of one embeddings request.
        max_embedding_tokens: tokens of all inputs of one embeddings request.
        session_idle_s: seconds without use after which a session is closed, where its opener names no time.
        max_session_idle_s: longest idle time that the opener of a session may name, in seconds.
        max_logprobs: likeliest tokens at each position; no more than `SamplingParams` takes, like all below.
        max_stop_strings: stop strings of one request.
        max_stop_string_bytes: bytes of one stop string.
        max_stop_token_ids: stop tokens of one request.
        max_logit_bias: entries of one request's `logit_bias`.
        max_allowed_token_ids: entries of one request's `allowed_token_ids`.
        max_bad_words: bad words of one request.
        max_bad_word_bytes: bytes of one bad word.
    """

    max_body_bytes: Annotated[
        int | None, Setting("limits", "of a request; else 2 MiB + 8 per token of context")
    ] = None
    max_prompt_bytes: Annotated[
        int | None, Setting("limits", "of text in a prompt; else 16 per token of context")
    ] = None
    max_json_depth: Annotated[int, Setting("limits", "brackets within brackets")] = 64
    max_messages: Annotated[int, Setting("limits", "of a conversation")] = 4096
    max_prompts: Annotated[int, Setting("limits", "of one completions request")] = 256
    max_prompt_scores: Annotated[int, Setting("limits", "log-probabilities of the prompts of a request")] = (
        1 << 19
    )
    max_event_streams: Annotated[int, Setting("limits", "readers of /debug/pipeline/events at once")] = 16
    max_resumable_streams: Annotated[
        int, Setting("limits", "answers kept for clients that come back; 0: none")
    ] = 64
    max_profile_s: Annotated[
        float, Setting("limits", "after which a profile ends by itself", flag="--max-profile-seconds")
    ] = 60.0
    max_profile_bytes: Annotated[int, Setting("limits", "of the file of a profile")] = 256 << 20
    max_profiles: Annotated[int, Setting("limits", "files in --profile-dir")] = 16
    max_tools: Annotated[int, Setting("limits", "of a request")] = 128
    max_tool_bytes: Annotated[int, Setting("limits", "of all tools of a request, as JSON")] = 256 << 10
    max_template_kwargs: Annotated[int, Setting("limits", "variables for the chat template")] = 16
    max_choices: Annotated[int, Setting("limits", "of a request: prompts times n")] = 256
    max_n: Annotated[int, Setting("limits", "sequences for each prompt")] = MAX_N
    max_embedding_inputs: Annotated[int, Setting("limits", "of one embeddings request")] = 2048
    max_embedding_tokens: Annotated[int, Setting("limits", "of all its inputs together")] = 300_000
    session_idle_s: Annotated[
        float,
        Setting(
            "limits", "seconds without use after which a session is closed", flag="--session-idle-seconds"
        ),
    ] = 600.0
    max_session_idle_s: Annotated[
        float,
        Setting("limits", "that whoever opens a session may ask for", flag="--max-session-idle-seconds"),
    ] = 86_400.0
    max_logprobs: Annotated[int, Setting("limits", "likeliest tokens told at a position")] = MAX_LOGPROBS
    max_stop_strings: Annotated[int, Setting("limits", "of a request")] = MAX_STOP_STRINGS
    max_stop_string_bytes: Annotated[int, Setting("limits", "of each of them")] = MAX_STOP_STRING_BYTES
    max_stop_token_ids: Annotated[int, Setting("limits", "of a request")] = MAX_STOP_TOKEN_IDS
    max_logit_bias: Annotated[int, Setting("limits", "entries of a request")] = MAX_LOGIT_BIAS
    max_allowed_token_ids: Annotated[int, Setting("limits", "of a request")] = MAX_ALLOWED_TOKEN_IDS
    max_bad_words: Annotated[int, Setting("limits", "of a request")] = MAX_BAD_WORDS
    max_bad_word_bytes: Annotated[int, Setting("limits", "of each of them")] = MAX_BAD_WORD_BYTES

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
        at_least("max_resumable_streams", self.max_resumable_streams, 0)
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
        max_schema_bytes: bytes of a JSON schema, regular expression or grammar, or of all choices together.
        max_schema_depth: schemas within schemas.
        max_enum_items: entries of all `enum`s of a schema together, or choices.
        max_pattern_bytes: bytes of one pattern in a schema.
        max_repeats: minItems, maxItems, minLength and their like in a schema.
        max_compiling: grammars that are built at the same time; each takes a thread.
        max_compile_waiting: grammars that wait to be built; one more is answered 429.
        compile_timeout_s: seconds to build one grammar; what takes longer is answered 400.
        grammar_cache_bytes: bytes of what is known of grammars that were asked for lately.
    """

    max_schema_bytes: Annotated[int, Setting("limits", "of a schema, regex or grammar")] = 64 << 10
    max_schema_depth: Annotated[int, Setting("limits", "schemas within schemas")] = 32
    max_enum_items: Annotated[int, Setting("limits", "of a schema, or choices")] = 4096
    max_pattern_bytes: Annotated[int, Setting("limits", "of a pattern in a schema")] = 512
    max_repeats: Annotated[int, Setting("limits", "maxItems and the like in a schema")] = 10_000
    max_compiling: Annotated[int, Setting("limits", "grammars built at the same time")] = 2
    max_compile_waiting: Annotated[int, Setting("limits", "grammars that wait for it")] = 64
    compile_timeout_s: Annotated[float, Setting("limits", "seconds to build a grammar")] = 1.0
    grammar_cache_bytes: Annotated[int, Setting("limits", "of what is known of grammars")] = 64 << 20

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if name == "compile_timeout_s":
                above_zero(name, value)
            else:
                at_least(name, value, 0 if name == "grammar_cache_bytes" else 1)


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of connections, and of one of them; times in seconds.

    Attributes:
        max_connections: connections that are open at once; one more is answered 503.
        max_request_line: bytes of method, path and version; a longer line is answered 414.
        max_header_bytes: bytes of all headers of one request; more are answered 431.
        max_headers: headers of one request; more are answered 431.
        header_timeout_s: seconds from the first byte of a head (or the connect) to its end.
        body_timeout_s: seconds without a byte of a body that is not complete.
        keep_alive_timeout_s: seconds between two requests.
        write_timeout_s: seconds in which the client takes nothing of what is written.
        min_body_rate: bytes a second that a body must come at, once it has taken `body_timeout_s`.
        max_discarded_bytes: bytes that are read of a body whose request was already answered.
        max_pipelined: requests that wait behind one another.
    """

    max_connections: Annotated[int, Setting("limits", "open connections")] = 4096
    max_request_line: Annotated[int, Setting("limits", "bytes of method, path and version")] = 8 << 10
    max_header_bytes: Annotated[int, Setting("limits", "of all headers of a request")] = 16 << 10
    max_headers: Annotated[int, Setting("limits", "of a request")] = 64
    header_timeout_s: Annotated[float, Setting("limits", "seconds for a whole head")] = 10.0
    body_timeout_s: Annotated[float, Setting("limits", "seconds without a byte of a body")] = 75.0
    keep_alive_timeout_s: Annotated[float, Setting("limits", "seconds between two requests")] = 75.0
    write_timeout_s: Annotated[float, Setting("limits", "seconds in which a client takes nothing")] = 60.0
    min_body_rate: Annotated[int, Setting("limits", "bytes a second of a long body")] = 1024
    max_discarded_bytes: int = 64 << 20
    max_pipelined: int = 16

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if not name.endswith("_s"):
                at_least(name, value, 1)
            else:
                above_zero(name, value)
