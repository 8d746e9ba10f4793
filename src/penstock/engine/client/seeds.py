"""Draws a seed for each sequence without one: in the client, so that the seed outlives a core.

Sequence k of an engine, in the order in which sequences are sent, gets the k-th seed that is derived from the
engine's own (`scheduler.admission.derive_seed`). A core draws the same seeds for requests without one, but
another core would count from the beginning again. Used by `engine.client.async_engine`.
"""

from __future__ import annotations

import msgspec

from penstock.engine.ipc import Welcome
from penstock.request import GenerationRequest
from penstock.scheduler.admission import derive_seed


class Seeds:
    """Draws the seeds of one client's sequences.

    Args:
        welcome: the first message of the first core that the client met, with the engine's seed. Counting
            begins behind the sequences that other clients had asked this core for.
    """

    def __init__(self, welcome: Welcome) -> None:
        self._engine_seed = welcome.seed
        self._num_drawn = welcome.num_sequences

    def given(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with a seed for each of its sequences, drawn where it brings none.

        A pooled request needs no seed, and is returned as it is.
        """
        first, self._num_drawn = self._num_drawn, self._num_drawn + 1 + len(request.followers)
        if request.sampling.seed is not None or request.pooling is not None:
            return request  # those of its followers follow from it
        replace = msgspec.structs.replace
        return replace(
            request,
            sampling=replace(request.sampling, seed=derive_seed(self._engine_seed, first)),
            followers=[
                replace(follower, seed=derive_seed(self._engine_seed, first + index))
                for index, follower in enumerate(request.followers, 1)
            ],
        )
