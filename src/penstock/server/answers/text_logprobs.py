"""Log-probabilities of the tokens that a part of an answer's text is made of.

Reasoning, calls of tools and their markers are parts of the text too, so each token is given its characters:

    tokens      <think>  Hm  .</  think  >W   ell  <tool_call>  …  end of sequence
    text        <think>  Hm  .</  think  >W   ell  <tool_call>  …
    content                                W   ell
    told                                  >W   ell

The tokens of the last line are those whose log-probabilities are reported with the content. A token that has
characters of the content is one of them, whatever other characters it has. A token that completes no
character, such as the first bytes of one, belongs to the first character of the next token that does. Called
by `responses_output`.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.request import TokenLogprobs
from penstock.server.openai.logprobs import TokenBytes, chat_logprobs
from penstock.server.openai.openai_types import ChatTokenLogprob
from penstock.tokenizer.detokenizer import Detokenizer


class TextLogprobs(Protocol):
    """The tokens of one answer, until their log-probabilities are reported."""

    def add(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> None:
        """Add the next tokens."""

    def take(self, begin: int, end: int) -> list[ChatTokenLogprob]:
        """Return the log-probabilities of the tokens with characters from `begin` up to `end` of the text.

        All tokens that begin before `end` are then forgotten.
        """

    def take_rest(self, end: int) -> list[ChatTokenLogprob]:
        """Return the log-probabilities of tokens without a character before `end`, the end of the text."""


class NoTextLogprobs:
    """The object for an answer without log-probabilities: it keeps no token."""

    def add(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> None:
        pass

    def take(self, begin: int, end: int) -> list[ChatTokenLogprob]:
        return []

    def take_rest(self, end: int) -> list[ChatTokenLogprob]:
        return []


class _Token(NamedTuple):
    """A token, and where its characters begin and end in the text."""

    token_id: int
    entry: TokenLogprobs
    begin: int
    end: int


class PlacedLogprobs:
    """Log-probabilities of tokens that are given their characters as they come.

    Args:
        token_bytes: returns the bytes of a token.
        detokenizer: turns the tokens into text once more, exactly as the text of the answer is made.
    """

    def __init__(self, token_bytes: TokenBytes, detokenizer: Detokenizer) -> None:
        self._token_bytes = token_bytes
        self._detokenizer = detokenizer
        self._length = 0  # characters of the tokens so far
        self._placed: deque[_Token] = deque()
        self._without_text: list[tuple[int, TokenLogprobs]] = []  # later tokens, which completed no character

    def add(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> None:
        """Add the next tokens."""
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = self._detokenizer.feed((token_id,))
            if not text:
                self._without_text.append((token_id, entry))
                continue
            begin = self._length
            self._length += len(text)
            self._placed += (_Token(*before, begin, begin + 1) for before in self._without_text)
            self._without_text.clear()
            end = self._length + _begins_character(self._token_bytes(token_id))
            self._placed.append(_Token(token_id, entry, begin, end))

    def take(self, begin: int, end: int) -> list[ChatTokenLogprob]:
        """Return the log-probabilities of the tokens with characters from `begin` up to `end` of the text.

        All tokens that begin before `end` are then forgotten.
        """
        found = []
        while self._placed and self._placed[0].begin < end:
            token = self._placed.popleft()
            if token.end > begin:
                found.append((token.token_id, token.entry))
        return self._told(found)

    def take_rest(self, end: int) -> list[ChatTokenLogprob]:
        """Return the log-probabilities of tokens without a character before `end`, the end of the text."""
        behind = [(token.token_id, token.entry) for token in self._placed if token.begin >= end]
        rest = [*behind, *self._without_text]
        self._placed.clear()
        self._without_text.clear()
        return self._told(rest)

    def _told(self, tokens: list[tuple[int, TokenLogprobs]]) -> list[ChatTokenLogprob]:
        ids, entries = [token_id for token_id, _ in tokens], [entry for _, entry in tokens]
        return chat_logprobs(ids, entries, self._token_bytes).content


def _begins_character(raw: bytes) -> bool:
    """Return whether the last bytes of a token begin a character that they do not complete."""
    _, num_read = codecs.utf_8_decode(raw, "ignore", False)
    return num_read < len(raw)
