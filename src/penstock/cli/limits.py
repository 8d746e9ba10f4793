"""The settings of `penstock serve` that bound what clients may do: sizes, counts and times.

Read by `cli_help` and `cli_sources` as `cli_settings` is; `cli_serve` turns them into the limits of a
`ServerConfig`, which check the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from penstock.cli.settings import flag
from penstock.config.limits import ConnectionLimits, GrammarLimits, Limits

_REQUEST, _CONNECTION, _GRAMMAR = Limits(), ConnectionLimits(), GrammarLimits()


def _limit(name: str, help_text: str) -> Parameter:
    return flag(help_text, name, group="limits")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    """What clients may do at most."""

    max_body_bytes: Annotated[
        int | None, _limit("--max-body-bytes", "of a request; else 2 MiB + 8 per token of context")
    ] = None
    max_prompt_bytes: Annotated[
        int | None, _limit("--max-prompt-bytes", "of text in a prompt; else 16 per token of context")
    ] = None
    max_json_depth: Annotated[int, _limit("--max-json-depth", "brackets within brackets")] = (
        _REQUEST.max_json_depth
    )
    max_messages: Annotated[int, _limit("--max-messages", "of a conversation")] = _REQUEST.max_messages
    max_prompts: Annotated[int, _limit("--max-prompts", "of one completions request")] = _REQUEST.max_prompts
    max_prompt_scores: Annotated[
        int, _limit("--max-prompt-scores", "log-probabilities of the prompts of a request")
    ] = _REQUEST.max_prompt_scores
    max_event_streams: Annotated[
        int, _limit("--max-event-streams", "readers of /debug/pipeline/events at once")
    ] = _REQUEST.max_event_streams
    max_profile_seconds: Annotated[
        float, _limit("--max-profile-seconds", "after which a profile ends by itself")
    ] = _REQUEST.max_profile_s
    max_profile_bytes: Annotated[int, _limit("--max-profile-bytes", "of the file of a profile")] = (
        _REQUEST.max_profile_bytes
    )
    max_profiles: Annotated[int, _limit("--max-profiles", "files in --profile-dir")] = _REQUEST.max_profiles
    max_tools: Annotated[int, _limit("--max-tools", "of a request")] = _REQUEST.max_tools
    max_tool_bytes: Annotated[int, _limit("--max-tool-bytes", "of all tools of a request, as JSON")] = (
        _REQUEST.max_tool_bytes
    )
    max_template_kwargs: Annotated[
        int, _limit("--max-template-kwargs", "variables for the chat template")
    ] = _REQUEST.max_template_kwargs
    max_choices: Annotated[int, _limit("--max-choices", "of a request: prompts times n")] = (
        _REQUEST.max_choices
    )
    max_n: Annotated[int, _limit("--max-n", "sequences for each prompt")] = _REQUEST.max_n
    max_embedding_inputs: Annotated[int, _limit("--max-embedding-inputs", "of one embeddings request")] = (
        _REQUEST.max_embedding_inputs
    )
    max_embedding_tokens: Annotated[int, _limit("--max-embedding-tokens", "of all its inputs together")] = (
        _REQUEST.max_embedding_tokens
    )
    session_idle_seconds: Annotated[
        float, _limit("--session-idle-seconds", "seconds without use after which a session is closed")
    ] = _REQUEST.session_idle_s
    max_session_idle_seconds: Annotated[
        float, _limit("--max-session-idle-seconds", "that whoever opens a session may ask for")
    ] = _REQUEST.max_session_idle_s
    max_logprobs: Annotated[int, _limit("--max-logprobs", "likeliest tokens told at a position")] = (
        _REQUEST.max_logprobs
    )
    max_stop_strings: Annotated[int, _limit("--max-stop-strings", "of a request")] = _REQUEST.max_stop_strings
    max_stop_string_bytes: Annotated[int, _limit("--max-stop-string-bytes", "of each of them")] = (
        _REQUEST.max_stop_string_bytes
    )
    max_stop_token_ids: Annotated[int, _limit("--max-stop-token-ids", "of a request")] = (
        _REQUEST.max_stop_token_ids
    )
    max_logit_bias: Annotated[int, _limit("--max-logit-bias", "entries of a request")] = (
        _REQUEST.max_logit_bias
    )
    max_allowed_token_ids: Annotated[int, _limit("--max-allowed-token-ids", "of a request")] = (
        _REQUEST.max_allowed_token_ids
    )
    max_bad_words: Annotated[int, _limit("--max-bad-words", "of a request")] = _REQUEST.max_bad_words
    max_bad_word_bytes: Annotated[int, _limit("--max-bad-word-bytes", "of each of them")] = (
        _REQUEST.max_bad_word_bytes
    )

    max_schema_bytes: Annotated[int, _limit("--max-schema-bytes", "of a schema, regex or grammar")] = (
        _GRAMMAR.max_schema_bytes
    )
    max_schema_depth: Annotated[int, _limit("--max-schema-depth", "schemas within schemas")] = (
        _GRAMMAR.max_schema_depth
    )
    max_enum_items: Annotated[int, _limit("--max-enum-items", "of a schema, or choices")] = (
        _GRAMMAR.max_enum_items
    )
    max_pattern_bytes: Annotated[int, _limit("--max-pattern-bytes", "of a pattern in a schema")] = (
        _GRAMMAR.max_pattern_bytes
    )
    max_repeats: Annotated[int, _limit("--max-repeats", "maxItems and the like in a schema")] = (
        _GRAMMAR.max_repeats
    )
    max_compiling: Annotated[int, _limit("--max-compiling", "grammars built at the same time")] = (
        _GRAMMAR.max_compiling
    )
    max_compile_waiting: Annotated[int, _limit("--max-compile-waiting", "grammars that wait for it")] = (
        _GRAMMAR.max_compile_waiting
    )
    compile_timeout: Annotated[float, _limit("--compile-timeout", "seconds to build a grammar")] = (
        _GRAMMAR.compile_timeout_s
    )
    grammar_cache_bytes: Annotated[int, _limit("--grammar-cache-bytes", "of what is known of grammars")] = (
        _GRAMMAR.grammar_cache_bytes
    )

    max_connections: Annotated[int, _limit("--max-connections", "open connections")] = (
        _CONNECTION.max_connections
    )
    max_request_line: Annotated[int, _limit("--max-request-line", "bytes of method, path and version")] = (
        _CONNECTION.max_request_line
    )
    max_header_bytes: Annotated[int, _limit("--max-header-bytes", "of all headers of a request")] = (
        _CONNECTION.max_header_bytes
    )
    max_headers: Annotated[int, _limit("--max-headers", "of a request")] = _CONNECTION.max_headers
    header_timeout: Annotated[float, _limit("--header-timeout", "seconds for a whole head")] = (
        _CONNECTION.header_timeout_s
    )
    body_timeout: Annotated[float, _limit("--body-timeout", "seconds without a byte of a body")] = (
        _CONNECTION.body_timeout_s
    )
    keep_alive_timeout: Annotated[float, _limit("--keep-alive-timeout", "seconds between two requests")] = (
        _CONNECTION.keep_alive_timeout_s
    )
    write_timeout: Annotated[float, _limit("--write-timeout", "seconds in which a client takes nothing")] = (
        _CONNECTION.write_timeout_s
    )
    min_body_rate: Annotated[int, _limit("--min-body-rate", "bytes a second of a long body")] = (
        _CONNECTION.min_body_rate
    )

    def request_limits(self) -> Limits:
        """For the routes. Raises `UsageError` naming a setting that is out of range."""
        return Limits(
            max_body_bytes=self.max_body_bytes,
            max_prompt_bytes=self.max_prompt_bytes,
            max_json_depth=self.max_json_depth,
            max_messages=self.max_messages,
            max_prompts=self.max_prompts,
            max_prompt_scores=self.max_prompt_scores,
            max_event_streams=self.max_event_streams,
            max_profile_s=self.max_profile_seconds,
            max_profile_bytes=self.max_profile_bytes,
            max_profiles=self.max_profiles,
            max_tools=self.max_tools,
            max_tool_bytes=self.max_tool_bytes,
            max_template_kwargs=self.max_template_kwargs,
            max_choices=self.max_choices,
            max_n=self.max_n,
            max_embedding_inputs=self.max_embedding_inputs,
            max_embedding_tokens=self.max_embedding_tokens,
            session_idle_s=self.session_idle_seconds,
            max_session_idle_s=self.max_session_idle_seconds,
            max_logprobs=self.max_logprobs,
            max_stop_strings=self.max_stop_strings,
            max_stop_string_bytes=self.max_stop_string_bytes,
            max_stop_token_ids=self.max_stop_token_ids,
            max_logit_bias=self.max_logit_bias,
            max_allowed_token_ids=self.max_allowed_token_ids,
            max_bad_words=self.max_bad_words,
            max_bad_word_bytes=self.max_bad_word_bytes,
        )

    def grammar_limits(self) -> GrammarLimits:
        """For structured output. Raises `UsageError` naming a setting that is out of range."""
        return GrammarLimits(
            max_schema_bytes=self.max_schema_bytes,
            max_schema_depth=self.max_schema_depth,
            max_enum_items=self.max_enum_items,
            max_pattern_bytes=self.max_pattern_bytes,
            max_repeats=self.max_repeats,
            max_compiling=self.max_compiling,
            max_compile_waiting=self.max_compile_waiting,
            compile_timeout_s=self.compile_timeout,
            grammar_cache_bytes=self.grammar_cache_bytes,
        )

    def connection_limits(self) -> ConnectionLimits:
        """For the connections. Raises `UsageError` naming a setting that is out of range."""
        return ConnectionLimits(
            max_connections=self.max_connections,
            max_request_line=self.max_request_line,
            max_header_bytes=self.max_header_bytes,
            max_headers=self.max_headers,
            header_timeout_s=self.header_timeout,
            body_timeout_s=self.body_timeout,
            keep_alive_timeout_s=self.keep_alive_timeout,
            write_timeout_s=self.write_timeout,
            min_body_rate=self.min_body_rate,
        )
