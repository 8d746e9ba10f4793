"""Draws a seed for each sequence without one: in the client, so that the seed outlives a core.

Sequence k of an engine, in the order in which sequences are sent, gets the k-th seed derived from the
engine's seed (`scheduler.admission.derive_seed`). A core would draw the same seeds for requests without one;
but the core that replaces it would count from the beginning again. Used by `engine.client.async_engine`.
"""

from __future__ import annotations

import msgspec

from penstock.engine.ipc import Welcome
from penstock.request import GenerationRequest
from penstock.scheduler.admission import derive_seed


class Seeds:
    """Draws the seeds of one client's sequences.

    Args:
        welcome: the first message of the first core that the client met. It has the engine's seed, and the
            number of sequences that this core was asked for before, from which counting goes on.
    """

    def __init__(self, welcome: Welcome) -> None:
        self._engine_seed = welcome.seed
        self._num_drawn = welcome.num_sequences

    def given(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with a seed for each of its sequences; seeds are drawn if the request has none.

        A pooled request needs no seed and is returned unchanged, but is counted too.
        """
        first, self._num_drawn = self._num_drawn, self._num_drawn + 1 + len(request.followers)
        if request.sampling.seed is not None or request.pooling is not None:
            return request  # the seeds of its followers are derived from its own (`siblings.sibling_seed`)
        replace = msgspec.structs.replace
        return replace(
            request,
            sampling=replace(request.sampling, seed=derive_seed(self._engine_seed, first)),
            followers=[
                replace(follower, seed=derive_seed(self._engine_seed, first + index))
                for index, follower in enumerate(request.followers, 1)
            ],
        )
