"""Turns forbidden words into sequences of ids that must not be generated: vLLM's `bad_words`.

In most vocabularies a word has other tokens at the beginning of a text than behind other words. So two
sequences are forbidden: the tokens of the word, and those of the word with a space before it, if their first
tokens differ. Only these sequences are forbidden, not the characters: a model that writes the same letters
with other tokens is not stopped. vLLM leaves out the sequence with a space if it is longer or shorter than
the other; here it counts too.

Called where prompts are made into ids (`server.openai.sampling`, `llm.prompt_preparer`). The last stage keeps
the sequences from being sampled (`sample.bad_words`).
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from penstock.config.limits import MAX_BAD_WORD_TOKENS
from penstock.errors import InvalidRequestError
from penstock.request import SamplingParams

_SHOWN = 40  # characters of a word that is refused


class Encode(Protocol):
    """`Tokenizer.encode_trusted`."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def with_bad_words(sampling: SamplingParams, encode: Encode, vocab_size: int) -> SamplingParams:
    """Return `sampling` with `bad_word_ids` in place of `bad_words`, which were validated.

    Args:
        encode: turns text into ids.
        vocab_size: number of ids that the model can generate; a sequence with a higher id is left out.

    Raises:
        InvalidRequestError: a word has only white space or too many tokens, or the model has no tokenizer.
    """
    if not sampling.bad_words:
        return sampling
    word_ids = list(sampling.bad_word_ids)
    for word in sampling.bad_words:
        word_ids += [ids for ids in _forms(word, encode) if max(ids) < vocab_size]
    unique = list(dict.fromkeys(map(tuple, word_ids)))
    return msgspec.structs.replace(sampling, bad_words=[], bad_word_ids=[list(ids) for ids in unique])


def _forms(word: str, encode: Encode) -> list[list[int]]:
    """Return the tokens of a word, and of the word with a space before it if their first one differs."""
    word = word.lstrip()
    try:
        forms = [encode(before + word, add_special_tokens=False) if word else [] for before in ("", " ")]
    except InvalidRequestError as error:  # no tokenizer, or no text
        raise _refused(f"bad_words: {error.message}") from error
    first, behind = forms
    if not first:
        raise _refused("a bad word consists only of whitespace.")
    num_tokens = max(map(len, forms))
    if num_tokens > MAX_BAD_WORD_TOKENS:
        named = repr(word[:_SHOWN] + "…" * (len(word) > _SHOWN))
        raise _refused(f"the bad word {named} has {num_tokens} tokens, more than {MAX_BAD_WORD_TOKENS}.")
    return [first, behind] if behind and behind[0] != first[0] else [first]


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, remedy="Leave it out.", param="bad_words", code="out_of_range")
