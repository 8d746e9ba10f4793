"""When a token ends its request (row D11).

Stop strings are not here: they need text (`engine.client.outputs`).
"""

from __future__ import annotations

from penstock.request import FinishReason
from penstock.scheduler.queues import RequestState


def finish_reason(request: RequestState) -> FinishReason | None:
    """Why `request` ends with its newest token, or None.

    A stop id wins over a length reached by the same token. A stop id among the first `min_tokens`
    outputs ends nothing; the sampler does not let one through anyway.
    """
    if request.token_ids[-1] in request.stop_ids and request.num_outputs > request.sampling.min_tokens:
        return "stop"
    return "length" if len(request.token_ids) >= request.max_len else None
