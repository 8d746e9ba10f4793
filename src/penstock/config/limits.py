"""Limits for clients: for one request, for structured output, and for connections.

The constants `MAX_...` bound what one request may ask of the engine; a user can set a field of `Limits` no
higher. `config.server` has the limits in force; `server.http.limits` and the readers of `server.openai` apply
them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.config.checks import MAX_AGE_S, above_zero, at_least, between
from penstock.config.setting import Setting
from penstock.errors import UsageError

# The most that one request may ask of the engine; fields of `Limits` may only be lower.
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
        max_json_depth: nesting depth of a body.
        max_messages: messages of one conversation.
        max_prompts: prompts of one completions request.
        max_prompt_scores: log-probabilities of all prompts of one request, likeliest tokens included.
        max_event_streams: readers of `/debug/pipeline/events` at once; further readers get 429.
        max_resumable_streams: answers kept at once for clients that reconnect; 0: none.
        max_profile_s: seconds after which a profile stops.
        max_profile_bytes: bytes of a profile's file after which the profile stops.
        max_profiles: files in the directory for profiles.
        max_tools: tools that one request names.
        max_tool_bytes: bytes of all tools of one request, as JSON.
        max_template_kwargs: variables for the chat template that one request gives.
        max_choices: sequences of one request: prompts times `n`.
        max_n: sequences for each prompt; at most the limit of `SamplingParams`.
        max_embedding_inputs: inputs of one embeddings request.
        max_embedding_tokens: tokens of all inputs of one embeddings request.
        session_idle_s: idle seconds after which a session is closed, unless the client set its own time.
        max_session_idle_s: longest idle time that a client may set for a session, in seconds.
        max_logprobs: most likely tokens per position; `SamplingParams` bounds this and all limits below.
        max_stop_strings: stop strings of one request.
        max_stop_string_bytes: bytes of one stop string.
        max_stop_token_ids: stop tokens of one request.
        max_logit_bias: entries of one request's `logit_bias`.
        max_allowed_token_ids: entries of one request's `allowed_token_ids`.
        max_bad_words: bad words of one request.
        max_bad_word_bytes: bytes of one bad word.
    """

    max_body_bytes: Annotated[
        int | None, Setting("limits", "bytes of a request; default: 2 MiB + 8 per context token")
    ] = None
    max_prompt_bytes: Annotated[
        int | None, Setting("limits", "bytes of prompt text; default: 16 per context token")
    ] = None
    max_json_depth: Annotated[int, Setting("limits", "nesting depth of a request's JSON")] = 64
    max_messages: Annotated[int, Setting("limits", "messages of a conversation")] = 4096
    max_prompts: Annotated[int, Setting("limits", "prompts of a completions request")] = 256
    max_prompt_scores: Annotated[int, Setting("limits", "log-probabilities of the prompts of a request")] = (
        1 << 19
    )
    max_event_streams: Annotated[int, Setting("limits", "readers of /debug/pipeline/events at once")] = 16
    max_resumable_streams: Annotated[
        int, Setting("limits", "answers kept for clients that reconnect; 0: none")
    ] = 64
    max_profile_s: Annotated[
        float, Setting("limits", "seconds after which a profile stops", flag="--max-profile-seconds")
    ] = 60.0
    max_profile_bytes: Annotated[int, Setting("limits", "bytes of a profile's file")] = 256 << 20
    max_profiles: Annotated[int, Setting("limits", "files in --profile-dir")] = 16
    max_tools: Annotated[int, Setting("limits", "tools of a request")] = 128
    max_tool_bytes: Annotated[int, Setting("limits", "bytes of a request's tools, as JSON")] = 256 << 10
    max_template_kwargs: Annotated[int, Setting("limits", "variables for the chat template")] = 16
    max_choices: Annotated[int, Setting("limits", "sequences of a request: prompts times n")] = 256
    max_n: Annotated[int, Setting("limits", "sequences for each prompt")] = MAX_N
    max_embedding_inputs: Annotated[int, Setting("limits", "inputs of an embeddings request")] = 2048
    max_embedding_tokens: Annotated[int, Setting("limits", "tokens of all its inputs together")] = 300_000
    session_idle_s: Annotated[
        float,
        Setting("limits", "idle seconds after which a session is closed", flag="--session-idle-seconds"),
    ] = 600.0
    max_session_idle_s: Annotated[
        float,
        Setting(
            "limits", "longest idle time that a client may set, seconds", flag="--max-session-idle-seconds"
        ),
    ] = 86_400.0
    max_logprobs: Annotated[int, Setting("limits", "most likely tokens reported per position")] = MAX_LOGPROBS
    max_stop_strings: Annotated[int, Setting("limits", "stop strings of a request")] = MAX_STOP_STRINGS
    max_stop_string_bytes: Annotated[int, Setting("limits", "bytes of a stop string")] = MAX_STOP_STRING_BYTES
    max_stop_token_ids: Annotated[int, Setting("limits", "stop token ids of a request")] = MAX_STOP_TOKEN_IDS
    max_logit_bias: Annotated[int, Setting("limits", "logit_bias entries of a request")] = MAX_LOGIT_BIAS
    max_allowed_token_ids: Annotated[int, Setting("limits", "allowed token ids of a request")] = (
        MAX_ALLOWED_TOKEN_IDS
    )
    max_bad_words: Annotated[int, Setting("limits", "bad words of a request")] = MAX_BAD_WORDS
    max_bad_word_bytes: Annotated[int, Setting("limits", "bytes of a bad word")] = MAX_BAD_WORD_BYTES

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
        above_zero("session_idle_s", self.session_idle_s, MAX_AGE_S)
        above_zero("max_session_idle_s", self.max_session_idle_s, MAX_AGE_S)
        if self.session_idle_s > self.max_session_idle_s:
            raise UsageError(
                f"session_idle_s is {self.session_idle_s:g}; max_session_idle_s allows "
                f"{self.max_session_idle_s:g}.",
                remedy="Lower session_idle_s, or raise max_session_idle_s.",
                param="session_idle_s",
                code="out_of_range",
            )


class GrammarLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of structured output: of one request, and of the work of all before they run.

    Attributes:
        max_schema_bytes: bytes of a JSON schema, regular expression or grammar, or of all choices together.
        max_schema_depth: nesting depth of a schema.
        max_enum_items: entries of all `enum`s of a schema together, or choices.
        max_pattern_bytes: bytes of one pattern in a schema.
        max_repeats: largest minItems, maxItems, minLength or similar number in a schema.
        max_compiling: grammars that are built at the same time; each takes a thread.
        max_compile_waiting: grammars that wait to be built; further requests get 429.
        compile_timeout_s: seconds to build one grammar; a request that needs longer gets 400.
        grammar_cache_bytes: bytes of cached check results of recent grammars.
    """

    max_schema_bytes: Annotated[int, Setting("limits", "bytes of a schema, regex or grammar")] = 64 << 10
    max_schema_depth: Annotated[int, Setting("limits", "nesting depth of a schema")] = 32
    max_enum_items: Annotated[int, Setting("limits", "enum values of a schema, or choices")] = 4096
    max_pattern_bytes: Annotated[int, Setting("limits", "bytes of a pattern in a schema")] = 512
    max_repeats: Annotated[int, Setting("limits", "maxItems and the like in a schema")] = 10_000
    max_compiling: Annotated[int, Setting("limits", "grammars built at the same time")] = 2
    max_compile_waiting: Annotated[int, Setting("limits", "grammars waiting to be built")] = 64
    compile_timeout_s: Annotated[float, Setting("limits", "seconds to build a grammar")] = 1.0
    grammar_cache_bytes: Annotated[int, Setting("limits", "bytes of cached grammar checks")] = 64 << 20

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if name == "compile_timeout_s":
                above_zero(name, value)
            else:
                at_least(name, value, 0 if name == "grammar_cache_bytes" else 1)


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of all connections, and of each one; times in seconds.

    Attributes:
        max_connections: open connections; further connections get 503.
        max_request_line: bytes of method, path and version; a longer line gets 414.
        max_header_bytes: bytes of all headers of one request; more get 431.
        max_headers: headers of one request; more get 431.
        header_timeout_s: seconds from connecting, or the first byte of a request, to the end of its headers.
        body_timeout_s: seconds of silence within an incomplete body.
        keep_alive_timeout_s: idle seconds between two requests on a connection.
        write_timeout_s: seconds for which the client reads nothing of its answer.
        min_body_rate: least bytes a second of a body that has taken `body_timeout_s`.
        max_discarded_bytes: bytes that are read of a body whose request was already answered.
        max_pipelined: requests that wait behind one another.
    """

    max_connections: Annotated[int, Setting("limits", "open connections")] = 4096
    max_request_line: Annotated[int, Setting("limits", "bytes of method, path and version")] = 8 << 10
    max_header_bytes: Annotated[int, Setting("limits", "bytes of a request's headers")] = 16 << 10
    max_headers: Annotated[int, Setting("limits", "headers of a request")] = 64
    header_timeout_s: Annotated[float, Setting("limits", "seconds to receive the headers")] = 10.0
    body_timeout_s: Annotated[float, Setting("limits", "seconds of silence within a body")] = 75.0
    keep_alive_timeout_s: Annotated[float, Setting("limits", "idle seconds between two requests")] = 75.0
    write_timeout_s: Annotated[float, Setting("limits", "seconds for which a client reads nothing")] = 60.0
    min_body_rate: Annotated[int, Setting("limits", "least bytes a second of a long body")] = 1024
    max_discarded_bytes: int = 64 << 20
    max_pipelined: int = 16

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if not name.endswith("_s"):
                at_least(name, value, 1)
            else:
                above_zero(name, value)
