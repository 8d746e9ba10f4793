"""From words that a text may not have to the ids that are not generated: vLLM's `bad_words`.

A word is looked for where a text begins and where it goes on, which in most vocabularies are other tokens:
without a space before it, and with one if that makes another first token. What is forbidden are these
sequences of tokens, not the characters: a model that writes the same letters by other tokens is not stopped.
vLLM leaves out a form with a space that is longer or shorter than the other; here it counts too.

Called by the fronts (`server.openai.sampling`, `llm.prompt_preparer`); the last stage keeps to it
(`sample.bad_words`).
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

    Raises:
        InvalidRequestError: a word is nothing but space or too many tokens, or the model has no tokenizer.
    """
    if not sampling.bad_words:
        return sampling
    word_ids = list(sampling.bad_word_ids)
    for word in sampling.bad_words:
        word_ids += [ids for ids in _forms(word, encode) if max(ids) < vocab_size]  # others are not generated
    unique = list(dict.fromkeys(map(tuple, word_ids)))
    return msgspec.structs.replace(sampling, bad_words=[], bad_word_ids=[list(ids) for ids in unique])


def _forms(word: str, encode: Encode) -> list[list[int]]:
    """The tokens of a word at the beginning of a text, and behind others if those are different there."""
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
