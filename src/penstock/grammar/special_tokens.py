"""Keeps special tokens apart from text of the same letters.

Where a grammar leaves only one text, llguidance splits that text into tokens as the tokenizer does. For a
literal with `<|end|>` it would return the special token of that name, which is not text. So special tokens
have other names in the tokenizer that llguidance gets, names that do not occur in texts. A grammar that means
a special token names its id.
"""

from __future__ import annotations

import json
import re
from typing import Any

from penstock.tokenizer.detokenizer import byte_level_alphabet

# The time to open a tokenizer grows with the square of their number: 3 s for so many, a minute for 150,000.
MOST_ADDED_TOKENS = 30_000
_MARK = "\ufdd0"  # a code point that Unicode keeps free of characters
# Literals, expressions and comments, in which `<...>` is text; elsewhere in a grammar it names a token.
_WORD = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?:#|//)[^\n]*|<[^<>\s]+>')


def set_apart(tokenizer: str) -> tuple[str, dict[str, int]]:
    """Return a `tokenizer.json` with other names for special tokens, and their ids by their usual names.

    The part that puts tokens around a prompt (`post_processor`) is left out: it has the usual names, too.

    Raises:
        ValueError: the text is not a tokenizer that can be read, or has too many added tokens.
    """
    document = json.loads(tokenizer)
    _require_few(document)
    try:
        special = [token for token in document.get("added_tokens") or [] if token["special"]]
        ids = {token["content"]: token["id"] for token in special}
        new_names = {name: f"{_MARK}{token_id}{_MARK}" for name, token_id in ids.items()}
        model = document["model"]
        vocab = model["vocab"]
        new_names |= _spelled(document, vocab)
        for token in document.get("added_tokens") or []:
            token["content"] = new_names.get(token["content"], token["content"])
        if isinstance(vocab, dict):
            model["vocab"] = {new_names.get(name, name): token_id for name, token_id in vocab.items()}
        else:  # names and their scores
            model["vocab"] = [[new_names.get(name, name), *rest] for name, *rest in vocab]
        if model.get("unk_token") in new_names:
            model["unk_token"] = new_names[model["unk_token"]]
        document["post_processor"] = None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError("its tokenizer.json cannot be read") from error
    return json.dumps(document), ids


def _require_few(document: Any) -> None:
    added = document.get("added_tokens") if isinstance(document, dict) else None
    if isinstance(added, list) and len(added) > MOST_ADDED_TOKENS:
        raise ValueError(f"its tokenizer has {len(added):,} added tokens, more than {MOST_ADDED_TOKENS:,}")


def _spelled(document: dict[str, Any], vocab: Any) -> dict[str, str]:
    """Return new names for added tokens whose text looks like the spelling of other bytes.

    In a byte-level vocabulary a name spells bytes, one letter for each: `ü` is the byte 0xFC. The name of an
    added token is its text itself, but llguidance takes it for a spelling if all letters could be in one. So
    such a token gets the name that spells the bytes of its text.
    """
    if (document.get("decoder") or {}).get("type") != "ByteLevel" or not isinstance(vocab, dict):
        return {}
    alphabet = byte_level_alphabet()
    letters = {byte: letter for letter, byte in alphabet.items()}
    texts = [token["content"] for token in document.get("added_tokens") or [] if not token["special"]]
    misread = [text for text in texts if not text.isascii() and alphabet.keys() >= set(text)]
    spellings = {text: text.encode().decode("latin-1").translate(letters) for text in misread}
    return {text: spelling for text, spelling in spellings.items() if spelling not in vocab}


def name_by_id(grammar: str, ids: dict[str, int]) -> str:
    """Return a grammar in llguidance's notation with ids in place of names of special tokens, as `<[5]>`."""

    def renamed(word: re.Match[str]) -> str:
        return f"<[{ids[word[0]]}]>" if word[0] in ids else word[0]

    return _WORD.sub(renamed, grammar)
