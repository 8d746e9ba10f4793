"""Sizes the parts of a plan by plain rules, as long as the costs of the stages are not known.

Once they are known, `scheduler.pacing` sizes chunks instead. Here a prompt is cut into
chunks of one size, counted from its start, whatever else is in the plan. A chunk that does not fit the rest
of the plan's budget waits for the next plan instead of being cut. So the chunks of a request do not depend
on load, on the number of stages or on the plans in flight. (What is computed beside a chunk may still
change the last bits of a matrix product.) Two things alone move a cut: a prefix that the cache has, and a
grammar that is still being built, for which the last token is held back (`scheduler.grammars`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.config.engine import SchedulerConfig


class PromptBudget(Protocol):
    """The room that is left in a plan for chunks (parts) of prompts."""

    def take(self, start: int, remaining: int) -> int:
        """Return how many tokens the next chunk of a prompt gets, and take them from the budget.

        Args:
            start: the position of the chunk's first token.
            remaining: the tokens to prefill from there on.

        Returns:
            At most `remaining`; 0 if the plan has no room.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """The limits on the tokens of one plan (what the stages compute in one step).

    Attributes:
        max_tokens: most tokens of the whole plan.
        chunk: most prompt tokens of one request in it.
        max_decodes_beside_prefill: most decoding requests in it while any request has prompt tokens to run,
            so that a chunk still fits. It matters only where `max_num_batched_tokens` is scarcely above
            `max_num_seqs`.
        num_stages: the stages of the pipeline.
    """

    max_tokens: int
    chunk: int
    max_decodes_beside_prefill: int
    num_stages: int

    @classmethod
    def from_config(cls, config: SchedulerConfig, num_stages: int) -> TokenBudget:
        """Return the budget for a config, with chunks so small that decodes fit beside one.

        The room kept for decodes is one token for each of `max_num_seqs` requests, or half of the plan where
        that is less.
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
        """Return how many decoding requests one plan may take: an equal share of them, rounded up.

        Args:
            num_decoding: all requests that decode, each with one token at a time.
            prefill_tokens: prompt tokens that could run now; if there are any, room for a chunk is kept.
            micro_batches: the plans that the decoding requests are split into; None: one for each stage.
        """
        share = -(-num_decoding // (micro_batches or self.num_stages))
        return min(share, self.max_decodes_beside_prefill if prefill_tokens else self.max_tokens)

    def for_prompts(self, num_decodes: int, backlog: int) -> FixedBudget:
        """Return the room for prompt chunks in one plan that has `num_decodes` decode tokens already.

        A plan takes no further chunk once it has its share of the `backlog`, which are the prompt tokens that
        wait or are in flight. The share is one part for each stage, so that a burst of prompts fills the pipe
        instead of one plan. It is at least one chunk, since below some size a plan costs the same.
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
        """Return how many tokens the next chunk of a prompt gets, and take them from the budget.

        That is the chunk size, or `remaining` if the prompt ends before. It is 0, and nothing is taken, if
        the plan has its share or has no room for that many: a chunk is not cut to what is left. Implements
        `PromptBudget.take`.
        """
        num_tokens = min(self._chunk, remaining)
        if self._share <= 0 or num_tokens > self._num_tokens:
            return 0
        self._num_tokens -= num_tokens
        self._share -= num_tokens
        return num_tokens


def yields_sample(end: int, known_len: int, max_len: int) -> bool:
    """Return whether a chunk that ends before position `end` samples a token [E3].

    It does if it covers the last of the request's `known_len` known tokens, unless the request has reached
    its `max_len` tokens already.
    """
    return end >= known_len and known_len < max_len
