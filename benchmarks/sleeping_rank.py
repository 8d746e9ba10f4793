"""A rank whose layers sleep for a fixed time in place of computing; all else of it is the real one.

Started by `stand_in.py` in place of `penstock.rank.process`; it is that worker, whose decoder does not
compute.
From the environment:

    SLEEPING_RANK_MS   milliseconds of a step in the layers of each stage; steps without tokens do not sleep
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock.process.child import bound_thread_pools, leave
from penstock.rank import process as worker

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.attention.metadata import AnyKV, AttentionMetadata
    from penstock.models.interfaces import BeforeLayer


def let_layers_sleep(seconds: Callable[[int], float]) -> None:
    """Put other methods into the decoder.

    Args:
        seconds: of a step with so many tokens.
    """
    from penstock.models.decoder import Decoder
    from penstock.models.intermediate import IntermediateTensors

    def record(self: Decoder, kv: Sequence[AnyKV], max_num_tokens: int) -> None:
        """Nothing is replayed."""

    def forward(
        self: Decoder,
        tensors: IntermediateTensors,
        positions: Tensor,
        kv: Sequence[AnyKV],
        metadata: AttentionMetadata,
        before_layer: BeforeLayer | None = None,
    ) -> IntermediateTensors:
        # Waits for the stage before. Copies, as layers would: the buffer of a link holds one frame.
        passed = IntermediateTensors({name: tensor.clone() for name, tensor in tensors.tensors.items()})
        num_tokens = len(passed["hidden_states"])
        if num_tokens:
            time.sleep(seconds(num_tokens))
        return passed

    Decoder.record = record  # type: ignore[method-assign]
    Decoder.forward = forward  # type: ignore[method-assign]


if __name__ == "__main__":
    bound_thread_pools(1)  # before torch comes, as the worker does
    step_s = float(os.environ["SLEEPING_RANK_MS"]) / 1000
    let_layers_sleep(lambda num_tokens: step_s)
    leave(worker.main())
