"""A tied head by transfer: the first stage's embedding goes down the pipe to the last (rows S2, A14).

The other way, and the default, is that the last stage reads the embedding from the checkpoint as well.
Transfer is for a last stage whose host has not got that file. `rank.rank` calls it in each epoch, when
all ranks have loaded and before the first plan; it uses the links of the pipe and nothing else.

    first: sends its rows      middle: passes each block on      last: fills its own rows
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.pipeline.links.frame import FrameHeader, FrameKind
from penstock.pipeline.links.link import Link


def transfer_tied_head(
    weight: Tensor,
    *,
    epoch: int,
    incoming: Link | None,
    outgoing: Link | None,
    block_rows: int,
    keep: Callable[[int, Tensor], None] | None = None,
) -> None:
    """Move the embedding one stage on.

    Args:
        weight: [vocab, hidden]; read on the first stage, filled on the last. A middle stage, which does not
            keep it, gives only its shape (`relay_weight`).
        epoch: of the links.
        incoming, outgoing: the stage's links; absent at the ends of the pipe.
        block_rows: rows of one frame; a frame of the link holds as many tokens.
        keep: takes (first row, rows) on a last stage that holds them in a form of its own; `weight`
            then gives only the shape.

    Raises what the links raise: `WaitTimeoutError`, `LinkClosedError`, `ProtocolError`.
    """
    for number, first in enumerate(range(0, len(weight), block_rows)):
        block = weight[first : first + block_rows]
        if weight.stride(0) == 0:
            block = torch.empty(block.shape, dtype=block.dtype, device=block.device)
        header = _header(epoch, number, block)
        if incoming is not None:
            incoming.receive_frame(header, [block]).wait()
        if outgoing is not None:
            outgoing.send_frame(header, [block])
        if keep is not None:
            keep(first, block)


def relay_weight(vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The shape of an embedding without its memory: [vocab, hidden], all rows the same."""
    return torch.empty((1, hidden_size), dtype=dtype, device=device).expand(vocab_size, hidden_size)


def _header(epoch: int, number: int, block: Tensor) -> FrameHeader:
    return FrameHeader(
        epoch=epoch,
        step_id=number,
        kind=FrameKind.WEIGHT,
        num_tokens=len(block),
        width=block.shape[1],
        dtype=str(block.dtype).removeprefix("torch."),
        num_tensors=1,
        digest=0,
    )
