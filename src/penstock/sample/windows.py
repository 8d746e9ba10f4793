"""Accepts or rejects drafts: each is compared with the token that was sampled in its place.

    row's tokens    known  d1     d2     d3        d1 to d3 are drafts (guessed tokens)
    sampled         s1     s2     s3     s4        each as if all drafts before it were right
    accepted        d1 is s1, d2 is s2, d3 is not s3: the row gets s1 s2 s3, and one draft is rejected

A draft is accepted if and only if it is the token that would have been sampled in its place (cf. arXiv
2211.17192, whose rule accepts more and gives the same distribution, but not the same tokens). A sample is a
function of the tokens before it, the seed and the position. So the row gets the same ids as if they had been
sampled one by one. Samples behind the first rejected draft mean nothing.

A row with its drafts is a window; a row without drafts is a window of one sample. Called by
`runner.model_runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.request import TokenLogprobs
from penstock.sample.sampler import NO_TOKEN, SampleOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedTokens:
    """The tokens that the sampled rows of a step get. Lists run over these rows."""

    token_ids: list[list[int]]  # at least one; the last is NO_TOKEN where nothing could be sampled
    num_rejected: list[int]
    logprobs: list[list[TokenLogprobs] | None]  # of the ids; None if none were asked for, or could be had
    failed: dict[int, int]  # index of the row in these lists -> index of its sample that could not be drawn


def accept_drafts(
    drawn: SampleOutput, drafts: Sequence[Sequence[int]], reach: Sequence[int]
) -> AcceptedTokens:
    """Compare the drafts with the tokens that were sampled in their places.

    Args:
        drawn: samples of all positions, window after window.
        drafts: drafts of each sampled row.
        reach: how many drafts of each row may be accepted; those behind are rejected, whatever was sampled.
    """
    token_ids, num_rejected, logprobs, failed = [], [], [], {}
    first = 0
    for index, own in enumerate(drafts):
        num_accepted = 0
        while num_accepted < reach[index] and drawn.token_ids[first + num_accepted] == own[num_accepted]:
            num_accepted += 1
        last = first + num_accepted
        token_ids.append(drawn.token_ids[first : last + 1])
        num_rejected.append(len(own) - num_accepted)
        entries = [entry for entry in drawn.logprobs[first : last + 1] if entry is not None]
        logprobs.append(entries or None)
        if drawn.token_ids[last] == NO_TOKEN:
            failed[index] = last
        first += len(own) + 1
    return AcceptedTokens(token_ids=token_ids, num_rejected=num_rejected, logprobs=logprobs, failed=failed)
