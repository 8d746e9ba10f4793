"""What the masks of a grammar allow, over the tokenizer of the embedded model."""

from __future__ import annotations

import random

from penstock.families.registry import resolve_model_directory
from penstock.grammar.matcher import Matcher
from penstock.tokenizer.tokenizer import load_tokenizer

DEMO = resolve_model_directory("demo")
EOS = 1
TOKENIZER = load_tokenizer(DEMO)


def allowed(matcher: Matcher) -> list[int]:
    mask = matcher.mask()
    assert not matcher.error
    return [token_id for token_id in range(8 * len(mask)) if mask[token_id // 8] >> (token_id % 8) & 1]


def walk(matcher: Matcher, chance: random.Random, most: int = 400) -> tuple[list[int], bool]:
    """Tokens drawn from the masks alone; whether the text came to its end."""
    tokens: list[int] = []
    while len(tokens) < most:
        token_id = chance.choice(allowed(matcher))
        if token_id == EOS:
            return tokens, True
        tokens.append(token_id)
        matcher.accept([token_id])
    return tokens, False


def text_of(tokens: list[int]) -> str:
    return b"".join(map(TOKENIZER.token_bytes, tokens)).decode()
