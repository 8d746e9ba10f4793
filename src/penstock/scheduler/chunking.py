"""Sizes the parts of a plan by plain rules, without knowledge of times.

With costs of the stages known, `scheduler.pacing` sizes chunks instead. Here prompts are cut at multiples of
the chunk size, counted from the start of the prompt, whatever else is in the plan: a chunk that does not fit
the rest of the budget waits for the next plan instead of being cut. So the chunks of a request do not depend
on load, stages or depth: what runs with them may change the last bits of a matrix product, but never where
the prompt is cut. (What the prefix cache has does, and a grammar that is being built does: the last token is
held back for it, `scheduler.grammars`.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.config.engine import SchedulerConfig


class PromptBudget(Protocol):
    """The room for prompt chunks that is left in a plan."""

    def take(self, start: int, remaining: int) -> int:
        """Return the tokens of a chunk from position `start`, with `remaining` left; 0 for lack of room."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """The token limits of a plan.

    Attributes:
        max_tokens: tokens of the whole plan.
        chunk: most prompt tokens of one request.
        max_decodes_beside_prefill: most decode rows while any request has prompt tokens to run, so that a
            chunk still fits. Felt only where `max_num_batched_tokens` is scarcely above `max_num_seqs`.
        num_stages: P.
    """

    max_tokens: int
    chunk: int
    max_decodes_beside_prefill: int
    num_stages: int

    @classmethod
    def from_config(cls, config: SchedulerConfig, num_stages: int) -> TokenBudget:
        """Return a budget that keeps room beside a chunk of a prompt.

        The room is for all decode rows, or for half of the plan where that is less.
        """
        max_tokens = config.max_num_batched_tokens
        kept_for_decodes = min(config.max_num_seqs, max_tokens // 2)
        chunk = min(config.prefill_chunk, max_tokens - kept_for_decodes)
        return cls(
            max_tokens=max_tokens,
            chunk=chunk,
            max_decodes_beside_prefill=max(1, max_tokens - chunk),
            num_stages=num_stages,
        )

    def decode_quota(self, num_decoding: int, prefill_tokens: int, micro_batches: int | None = None) -> int:
        """Return the decode rows of one plan: an equal part for each micro-batch, rounded up."""
        share = -(-num_decoding // (micro_batches or self.num_stages))
        return min(share, self.max_decodes_beside_prefill if prefill_tokens else self.max_tokens)

    def for_prompts(self, num_decodes: int, backlog: int) -> FixedBudget:
        """Return the prompt budget of one plan that has `num_decodes` decodes.

        Once it has 1/P of the `backlog`, the prompt tokens that wait or are in flight, a plan takes no
        further chunk, so that a burst of prompts fills the pipe instead of one plan. But never less than a
        chunk, since below some size a plan costs the same.
        """
        share = max(self.chunk, -(-backlog // self.num_stages))
        return FixedBudget(num_tokens=self.max_tokens - num_decodes, share=share, chunk=self.chunk)


class FixedBudget:
    """A prompt budget that gives out chunks of one size.

    Args:
        num_tokens: tokens that the plan has room for.
        share: prompt tokens after which the plan takes no further chunk.
        chunk: tokens of a chunk, unless the prompt ends before.
    """

    def __init__(self, *, num_tokens: int, share: int, chunk: int) -> None:
        self._num_tokens, self._share, self._chunk = num_tokens, share, chunk

    def take(self, start: int, remaining: int) -> int:
        """See `PromptBudget`. A chunk is not cut to what is left of the plan."""
        num_tokens = min(self._chunk, remaining)
        if self._share <= 0 or num_tokens > self._num_tokens:
            return 0
        self._num_tokens -= num_tokens
        self._share -= num_tokens
        return num_tokens


def yields_sample(end: int, known_len: int, max_len: int) -> bool:
    """Return whether a chunk that ends before position `end` samples a token (row E3).

    It does when it reaches all `known_len` known tokens, unless the request may hold no further token.
    """
    return end >= known_len and known_len < max_len
