"""A rank that is slow where a test wants it to be: after its layers have computed a step, it sleeps.

Started by `benchmarks/stand_in.py` in place of `penstock.rank.process`; all else of it is the real one.
From the environment:

    THROTTLED_LAYER   first layer of the stage that is slow
    THROTTLED_MS      milliseconds of each of its steps with tokens
"""

from __future__ import annotations

import os
import time
from typing import Any

from penstock.process.child import bound_thread_pools, leave
from penstock.rank import process as worker


def throttle(first_layer: int, step_s: float) -> None:
    """Put another `forward` into the decoder."""
    from penstock.models.decoder import Decoder

    compute = Decoder.forward

    def forward(self: Decoder, tensors: Any, *rest: Any, **named: Any) -> Any:
        passed = compute(self, tensors, *rest, **named)
        if self.start_layer == first_layer and len(passed["hidden_states"]):
            time.sleep(step_s)
        return passed

    Decoder.forward = forward  # type: ignore[method-assign]


if __name__ == "__main__":
    bound_thread_pools(1)  # before torch comes, as the worker does
    throttle(int(os.environ["THROTTLED_LAYER"]), float(os.environ["THROTTLED_MS"]) / 1000)
    leave(worker.main())
