"""Speculation as it is configured: who guesses tokens, and how many at once."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from penstock.config.checks import between
from penstock.config.setting import Setting

SpeculativeMethod = Literal["off", "suffix"]
MOST_SPECULATIVE_TOKENS = 64


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Who guesses what requests say next, so that one step yields several tokens.

    Attributes:
        speculative_method: who guesses: `off`: nobody; `suffix`: the request's own text, where it repeats.
        num_speculative_tokens: guesses of a request in one step at most; fewer where more would cost time.
    """

    speculative_method: Annotated[
        SpeculativeMethod, Setting("speculation", "who guesses tokens: off, or suffix (the text itself)")
    ] = "off"
    num_speculative_tokens: Annotated[
        int, Setting("speculation", "guesses of a request in one step at most")
    ] = 8

    def __post_init__(self) -> None:
        between("num_speculative_tokens", self.num_speculative_tokens, 1, MOST_SPECULATIVE_TOKENS)

    @property
    def is_on(self) -> bool:
        return self.speculative_method != "off"

    @property
    def most_drafts(self) -> int:
        """Guessed tokens of a row in one step at most."""
        return self.num_speculative_tokens if self.is_on else 0
