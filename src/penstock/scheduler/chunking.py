"""How many tokens of whom go into one plan: the arithmetic, as pure functions of numbers.

Prompts are cut at multiples of the chunk size, counted from the start of the prompt, whatever else is in the
plan: a chunk that does not fit the rest of the budget waits for the next plan instead of being cut. So the
chunks of a request do not depend on load, stages or depth: what runs with them may change the last bits of a
matrix product, but never where the prompt is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """The limits of a plan.

    Attributes:
        max_tokens: of the whole plan.
        chunk: prompt tokens of one request at most.
        max_decodes_beside_prefill: decode rows at most when somebody has prompt tokens to run, so that a
            chunk still fits. Felt only where `max_num_batched_tokens` is scarcely above `max_num_seqs`.
        num_stages: P.
    """

    max_tokens: int
    chunk: int
    max_decodes_beside_prefill: int
    num_stages: int

    @classmethod
    def from_config(cls, config: SchedulerConfig, num_stages: int) -> TokenBudget:
        """Prefill keeps room for one chunk, decode for all rows that there can be or half of the plan."""
        max_tokens = config.max_num_batched_tokens
        kept_for_decodes = min(config.max_num_seqs, max_tokens // 2)
        chunk = min(config.prefill_chunk, max_tokens - kept_for_decodes)
        return cls(
            max_tokens=max_tokens,
            chunk=chunk,
            max_decodes_beside_prefill=max(1, max_tokens - chunk),
            num_stages=num_stages,
        )

    def decode_quota(self, num_decoding: int, prefill_tokens: int) -> int:
        """Decode rows of one plan: 1/P of the decoding requests, rounded up, so that P plans are alike."""
        share = -(-num_decoding // self.num_stages)
        return min(share, self.max_decodes_beside_prefill if prefill_tokens else self.max_tokens)

    def prefill_share(self, prefill_tokens: int) -> int:
        """Prompt tokens after which a plan takes no further chunk; the argument counts those in flight too.

        1/P of them all, so that a burst of prompts fills the pipe instead of one plan; but never less than a
        chunk, since below some size a plan costs the same.
        """
        return max(self.chunk, -(-prefill_tokens // self.num_stages))

    def next_chunk(self, start: int, prefill_len: int) -> int:
        """Tokens of the chunk that starts at position `start` of `prefill_len` known tokens."""
        return min(self.chunk, prefill_len - start)


def yields_sample(end: int, known_len: int, max_len: int) -> bool:
    """Whether a chunk that ends before position `end` samples a token (row E3).

    It does when it reaches all `known_len` known tokens, unless the request may hold no further token.
    """
    return end >= known_len and known_len < max_len
