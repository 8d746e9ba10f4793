"""Makes one request for the `n` sequences of a prompt: the others start once the first has computed it.

Called by `engine.client.async_engine` and `llm.offline_requests`. The core takes all sequences or none. The
others wait until the first has computed the prompt, and then reuse its KV blocks (`scheduler.prefix_reuse`).
"""

from __future__ import annotations

import msgspec

from penstock.request import Follower, GenerationRequest, SamplingParams
from penstock.scheduler.admission import derive_seed

_SIBLINGS = 0x5DEECE66D  # sets these seeds apart from those of requests that bring none


def sibling_seed(seed: int | None, index: int) -> int | None:
    """Return the seed of sequence `index` among those of a request with this seed: for 0 the seed itself.

    None stays None: each sequence then gets a seed derived from the engine's, by its place in the order of
    arrival.
    """
    if seed is None or index == 0:
        return seed
    return derive_seed(seed ^ _SIBLINGS, index)


def with_siblings(
    request_id: str, prompt_token_ids: list[int], sampling: SamplingParams
) -> GenerationRequest:
    """Return one request for `sampling.n` sequences of the prompt.

    The first has the id `request_id`; sequence i > 0 has that id with `/i` behind it.
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
