"""A matcher says which tokens may come next in a text that must follow a grammar; it wraps llguidance.

This is the only module that imports llguidance. Matchers are built in three places:

- in a child of the API process or of `LLM`, to see whether a grammar can be used (`grammar.proving_process`),
- on the last stage, which samples only tokens that the grammar allows (`sample.grammar_rows`),
- in the core, to make and cut drafts as the grammar wants them (`speculation.grammar_guides`).

All have the same limits. The limits count work and not time, so a grammar that one process can build can be
built by the others too, however fast or slow they are.

What a matcher allows depends on its grammar and on the tokens that it was given, and on nothing else. So a
matcher that is built again and gets the same tokens allows the same next tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.errors import InvalidRequestError, ModelError
from penstock.grammar.schema_text import json_schema, lark_grammar
from penstock.grammar.special_tokens import name_by_id, set_apart
from penstock.request import StructuredOutputs
from penstock.tokenizer.sources.model_files import tokenizer_content

WORD_BITS = 32
_QUIET = 0  # log level: the library must write nothing of a request to standard error

# Limits on the work of a build and of each mask, and on the lexer's states (1 to 2 kB each). The units are
# llguidance's own.
_LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=16_384,
    max_grammar_size=200_000,
    verbose_errors=False,
)
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
# What users read in place of the names that the library gives to its ends.
_STOPS = {
    "NoExtension": "no text can match it",
    "NoExtensionBias": "no text can match it",
    "ParserTooComplex": "it is too complex: too many ways to read the text",
    "LexerTooComplex": "it is too complex: a pattern in it grows too large",
}
_COMPACT: dict[str, object] = {"whitespace_flexible": False}
# At most 32 characters in one place: a model must not be able to write white space without end.
_SPACED: dict[str, object] = {"whitespace_flexible": True, "whitespace_pattern": r"[ \t\n\r]{1,32}"}


class Vocabulary:
    """The texts of a model's tokens, and which of the tokens end a sequence.

    Args:
        tokenizer: content of `tokenizer.json`.
        eos_token_ids: the model's end-of-sequence ids. Each of them that the tokenizer has may follow a
            complete text.

    Attributes:
        inner: the vocabulary as llguidance has it.
        special_ids: id of each special token, by its name.
        ends: all of `eos_token_ids`.
        num_words: number of 32-bit words of a mask.

    Raises:
        InvalidRequestError: llguidance cannot use this tokenizer, or `eos_token_ids` is empty.
    """

    def __init__(self, tokenizer: str, eos_token_ids: Sequence[int]) -> None:
        if not eos_token_ids:
            raise _unusable("it has no end-of-sequence id, so a text could not end")
        ends = list(eos_token_ids)
        try:
            apart, self.special_ids = set_apart(tokenizer)
            inner = _opened(apart, ends)
        except Exception as error:  # the library has no exception class of its own
            raise _unusable(_reason(str(error))) from error
        self.inner = inner
        self.ends = frozenset(ends)
        self.num_words = -(-inner.vocab_size // WORD_BITS)


def _opened(tokenizer: str, ends: list[int]) -> LLTokenizer:
    """Open a tokenizer with those of the end-of-sequence ids that it has.

    A model may name an id behind the tokenizer's last one, which llguidance refuses. So the largest id is
    left out until llguidance takes the rest.
    """
    known = sorted(ends)
    while True:
        try:
            return LLTokenizer(tokenizer, eos_token=known)
        except ValueError:
            if len(known) == 1:
                raise
            known.pop()


def load_vocabulary(directory: Path, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Return the vocabulary of a model directory or GGUF file.

    Raises `InvalidRequestError` if this model cannot give structured output.
    """
    try:
        content = tokenizer_content(directory)
    except ModelError as error:
        raise _unusable(f"its tokenizer cannot be read ({error.message.rstrip('.')})") from error
    if content is None:
        raise _unusable("it has no tokenizer")
    return Vocabulary(content.decode(errors="replace"), eos_token_ids)


class Matcher:
    """A grammar, and the state of one text that follows it. Only one thread at a time may use a matcher.

    Args:
        vocabulary: the tokens in which the text is written.
        structured: the grammar, or the schema, pattern or choices of which one is made.
    """

    def __init__(self, vocabulary: Vocabulary, structured: StructuredOutputs) -> None:
        grammar = _grammar(structured, vocabulary.special_ids)
        self._inner = LLMatcher(vocabulary.inner, grammar, log_level=_QUIET, limits=_LIMITS)

    def copy(self) -> Matcher:
        """Return another matcher in the same state; that costs less than to build one.

        The two share the lexer states that they find, and the limit on the number of these states.
        """
        other = object.__new__(Matcher)
        other._inner = self._inner.deep_copy()
        return other

    @property
    def error(self) -> str:
        """The reason why nothing can be said of what may come next; empty while all is well."""
        return _reason(self._inner.get_error()) if self._inner.is_error() else ""

    def accept(self, token_ids: Iterable[int]) -> None:
        """Take tokens that have been sampled. One that is not allowed, or follows the end, sets `error`."""
        self._inner.consume_tokens(list(token_ids))

    def forced(self) -> list[int]:
        """Return the tokens that must come next, in order; none where there is a choice."""
        return list(self._inner.compute_ff_tokens())

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, may come next; take none of them."""
        return int(self._inner.validate_tokens(list(token_ids)))

    def fill(self, address: int, num_bytes: int) -> None:
        """Write the mask of the tokens that may come next: bit i of word w allows id 32 w + i.

        Once there is an `error`, the mask means nothing.

        Args:
            address: address of `Vocabulary.num_words` words of 32 bits, which are `num_bytes` bytes.
        """
        self._inner.unsafe_compute_mask_ptr(address, num_bytes)

    def mask(self) -> bytes:
        """Return the mask that `fill` writes, as a value."""
        mask: bytes = self._inner.compute_bitmask()
        return mask


def _grammar(structured: StructuredOutputs, special_ids: dict[str, int]) -> str:
    """Return the grammar as llguidance reads it."""
    if structured.json is not None or structured.json_object:
        text = '{"type":"object"}' if structured.json is None else structured.json
        schema = json_schema(text, open_objects=structured.open_objects)
        options = _SPACED if structured.whitespace else _COMPACT
        if schema.is_lenient:
            options = options | {"lenient": True}
        return str(LLMatcher.grammar_from_json_schema(schema.text, overrides=options))  # type: ignore[arg-type]
    if structured.regex is not None:
        return str(LLMatcher.grammar_from_regex(structured.regex))
    if structured.choice is not None:
        alternatives = [msgspec.json.encode(text).decode() for text in structured.choice]
        return str(LLMatcher.grammar_from_lark("start: " + " | ".join(alternatives)))
    grammar = lark_grammar(structured.grammar or "", open_objects=structured.open_objects)
    return str(LLMatcher.grammar_from_lark(name_by_id(grammar.text, special_ids)))


def _reason(text: str) -> str:
    """Return the library's error message, without traces and positions in grammars that it made itself."""
    lines = [line.strip() for line in text.strip().splitlines()] or [""]
    first = _PLACE.sub("", lines[0]).rstrip(" .:")
    detail = next((line for line in lines[1:] if line.startswith("error: ")), "")  # about a pattern
    return _STOPS.get(first, f"{first}: {detail.removeprefix('error: ')}" if detail else first)


def _unusable(why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"this model cannot give structured output: {why}.",
        remedy="Leave response_format and structured_outputs out.",
        param="structured_outputs",
        code="unsupported_by_model",
    )
