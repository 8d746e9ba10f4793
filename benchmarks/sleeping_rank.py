"""A rank whose layers sleep for a fixed time in place of computing; all else of it is the real one.

Started by `stand_in.py` in place of `penstock.executor.worker`; it is that worker with another decoder.
From the environment:

    SLEEPING_RANK_MS   milliseconds of a step in the layers of each stage; steps without tokens do not sleep
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from penstock.executor import worker


def let_layers_sleep(seconds: float) -> None:
    """Wrap the decoder of `executor.loading`."""
    from penstock.executor import loading
    from penstock.models.intermediate import IntermediateTensors

    class SleepingDecoder(loading.Decoder):
        def record(self, kv: Sequence[Any], max_num_tokens: int) -> None:
            """Nothing is replayed."""

        def forward(self, tensors: IntermediateTensors, *arguments: Any) -> IntermediateTensors:
            passed = IntermediateTensors(dict(tensors.tensors))  # waits for the stage before
            if len(passed["hidden_states"]):
                time.sleep(seconds)
            return passed

    loading.Decoder = SleepingDecoder  # type: ignore[misc]


if __name__ == "__main__":
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # before torch comes, as the worker does
    let_layers_sleep(float(os.environ["SLEEPING_RANK_MS"]) / 1000)
    sys.exit(worker.main())
