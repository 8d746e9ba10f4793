"""Sends a prompt's `n` sequences in one message: when the first has computed the prompt, the others start.

Called by `engine.client.async_engine` and `llm.offline_requests`. The core takes all sequences or none. The
others wait until the first has computed the prompt, and then reuse the prompt's KV blocks
(`scheduler.prefix_reuse`).
"""

from __future__ import annotations

import msgspec

from penstock.request import Follower, GenerationRequest, SamplingParams
from penstock.scheduler.admission import derive_seed

_SIBLINGS = 0x5DEECE66D  # makes these seeds differ from those that are drawn for requests without a seed


def sibling_seed(seed: int | None, index: int) -> int | None:
    """Return the seed of sequence `index` of a request with this seed; the first sequence has `seed` itself.

    None stays None: `engine.client.seeds` or the core then derives a seed for each sequence from the
    engine's seed.
    """
    if seed is None or index == 0:
        return seed
    return derive_seed(seed ^ _SIBLINGS, index)


def with_siblings(
    request_id: str, prompt_token_ids: list[int], sampling: SamplingParams
) -> GenerationRequest:
    """Return one request for `sampling.n` sequences of the prompt.

    The first sequence has the id `request_id`. Sequence i > 0 has the id `request_id/i`.
    """
    assert not sampling.bad_words, "bad words must be ids here: the core has no tokenizer"
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=msgspec.structs.replace(sampling, n=1),
        followers=[
            Follower(f"{request_id}/{index}", sibling_seed(sampling.seed, index))
            for index in range(1, sampling.n)
        ],
    )
