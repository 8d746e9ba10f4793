"""Several sequences of one prompt (`n`): one request to the core, in which others follow the first.

Called by both faces of the engine. The core takes all of them or none, and lets the others wait until the
first has computed the prompt, whose blocks they then find (`scheduler.prefix_reuse`).
"""

from __future__ import annotations

import msgspec

from penstock.request import Follower, GenerationRequest, SamplingParams
from penstock.scheduler.admission import derive_seed

_SIBLINGS = 0x5DEECE66D  # sets these seeds apart from those of requests that bring none


def sibling_seed(seed: int | None, index: int) -> int | None:
    """The seed of choice `index` of a request with this seed: of choice 0 the seed itself.

    None stays None: each sequence then gets a seed of the engine's, by its place in the order of arrival.
    """
    if seed is None or index == 0:
        return seed
    return derive_seed(seed ^ _SIBLINGS, index)


def with_siblings(
    request_id: str, prompt_token_ids: list[int], sampling: SamplingParams
) -> GenerationRequest:
    """The request for `sampling.n` sequences; choice i > 0 is named after the first, with `/i` behind."""
    assert not sampling.bad_words, "bad words are ids by now: the core has no tokenizer"
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=msgspec.structs.replace(sampling, n=1),
        followers=[
            Follower(f"{request_id}/{index}", sibling_seed(sampling.seed, index))
            for index in range(1, sampling.n)
        ],
    )
