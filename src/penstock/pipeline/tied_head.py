"""Sends a tied head (an output head that is the embedding) from the first stage to the last [S2] [A14].

By default the last stage reads the embedding from the checkpoint as well, and nothing is sent. The transfer
is for a last stage whose host does not have that file. `rank.rank` calls it in each epoch, when all ranks
have loaded and before the first plan. The transfer uses the links of the pipe. If the ranks of the first
stage hold other shares than those of the last, it also uses the group of the first stage.

    first: sends the rows of each share      middle: passes each block on      last: takes its own share

Each rank of the last stage gets the rows of its share and no others; a link carries the rows for all ranks
behind it. Here with three stages of 2, 1 and 4 ranks:

    rank 0 of 2 ──shares 0 to 3──▶ rank 0 of 1 ──share k──▶ rank k of 4
       ▲ rows of rank 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.distributed.group import TensorGroup
from penstock.distributed.share import Share, vocab_share
from penstock.pipeline.links.frame import FrameHeader, FrameKind
from penstock.pipeline.links.link import Link

PutRows = Callable[[int, Tensor], None]  # first row within the rank's own share, rows


class HeadBlock(NamedTuple):
    """A block of a tied head: the embedding's rows `[start, end)`, which cross each link in one frame."""

    number: int
    receiver: int  # rank of the last stage
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRoute:
    """The blocks into which a tied head is cut, and the ranks that each goes through, as one rank sees it.

    Attributes:
        tp_sizes: number of ranks of each stage.
        stage, tp_rank: this rank.
        vocab_size: rows of the embedding.
        block_rows: most rows of a block, as many as a frame of the links has tokens.
        epoch: epoch of the links.
    """

    tp_sizes: Sequence[int]
    stage: int
    tp_rank: int
    vocab_size: int
    block_rows: int
    epoch: int

    def share(self, tp_rank: int) -> Share:
        """Return the embedding's rows that a rank of this stage holds; for the first and last stage only."""
        return vocab_share(self.vocab_size, tp_rank, self.tp_sizes[self.stage])

    @property
    def own_share(self) -> Share:
        return self.share(self.tp_rank)

    def all_blocks(self) -> Iterator[HeadBlock]:
        """Yield all blocks of the head, in the order in which every rank sends, passes on or takes its own.

        Blocks for different receivers (ranks of the last stage) take turns, so that no receiver waits until
        another has its whole share.
        """
        num_receivers = self.tp_sizes[-1]
        shares = [vocab_share(self.vocab_size, rank, num_receivers) for rank in range(num_receivers)]
        number = 0
        for offset in range(0, max(share.size for share in shares), self.block_rows):
            for receiver, share in enumerate(shares):
                start = share.start + offset
                if start < share.end:
                    yield HeadBlock(number, receiver, start, min(start + self.block_rows, share.end))
                    number += 1

    def own_blocks(self) -> Iterator[HeadBlock]:
        """Yield the blocks that this rank sends, passes on or takes, in the order of `all_blocks`."""
        return (block for block in self.all_blocks() if self.rank_of(self.stage, block) == self.tp_rank)

    def rank_of(self, stage: int, block: HeadBlock) -> int:
        """Return the number of the rank of a stage that the block goes through.

        It is one of the receivers of the block's rank in the stage before (`RankConfig.receivers`).
        """
        rank = block.receiver
        for size in reversed(self.tp_sizes[stage:-1]):
            rank %= size
        return rank

    def next_link(self, block: HeadBlock, links: Sequence[Link]) -> Link:
        """Return the link by which the block leaves this rank.

        Args:
            links: from this rank to the next stage, in the order of `RankConfig.receivers`.
        """
        return links[(self.rank_of(self.stage + 1, block) - self.tp_rank) // self.tp_sizes[self.stage]]

    def header(self, block: HeadBlock, rows: Tensor) -> FrameHeader:
        """Return the header of the frame that carries a block; sender and receiver both derive it.

        Args:
            rows: the block's rows, or the buffer for them.
        """
        return FrameHeader(
            epoch=self.epoch,
            step_id=block.number,
            kind=FrameKind.WEIGHT,
            num_tokens=block.end - block.start,
            width=rows.shape[1],
            dtype=str(rows.dtype).removeprefix("torch."),
            num_tensors=1,
            digest=0,
        )


def send_head(route: HeadRoute, weight: Tensor, group: TensorGroup, links: Sequence[Link]) -> None:
    """Send the embedding block by block, on a rank of the first stage; all ranks of the stage must call it.

    If the sender of a block does not hold all its rows, the ranks of the stage gather them. That works
    because all ranks of the stage come to the same blocks in the same order.

    Args:
        weight: [rows of the own share, hidden].
        group: the ranks of the first stage.
        links: as for `HeadRoute.next_link`.

    Raises what the links raise, `WaitTimeoutError`, `LinkClosedError` and `ProtocolError`, and the group.
    """
    for block in route.all_blocks():
        sender = route.rank_of(0, block)
        held = route.share(sender)
        rows = None
        # All ranks of the stage must gather here, whichever of them sends: a gather waits for every rank.
        if block.start < held.start or block.end > held.end:
            rows = _gathered(route, weight, group, block)
        elif sender == route.tp_rank:
            rows = weight[block.start - held.start : block.end - held.start]
        if rows is not None and sender == route.tp_rank:
            route.next_link(block, links).send_frame(route.header(block, rows), [rows])


def pass_head_on(route: HeadRoute, buffer: Tensor, incoming: Link, links: Sequence[Link]) -> None:
    """Pass each of this rank's blocks of the head on as it comes, on a rank of a middle stage.

    Args:
        buffer: [block_rows, hidden], written over by each block.

    Other arguments and errors are those of `send_head`.
    """
    for block in route.own_blocks():
        rows = buffer[: block.end - block.start]
        header = route.header(block, rows)
        incoming.receive_frame(header, [rows]).wait()
        # The link has a copy when this returns; only then may the next block overwrite the buffer.
        route.next_link(block, links).send_frame(header, [rows])


def take_head(route: HeadRoute, buffer: Tensor, incoming: Link, put: PutRows) -> None:
    """Take the rows of this rank's share of the head from the link, on a rank of the last stage.

    Args:
        buffer: as for `pass_head_on`.
        put: copies the rows of a block into the weight, from the given row of the share on; the next block
            overwrites the buffer.

    Errors are those of `send_head`.
    """
    for block in route.own_blocks():
        rows = buffer[: block.end - block.start]
        incoming.receive_frame(route.header(block, rows), [rows]).wait()
        put(block.start - route.own_share.start, rows)


def _gathered(route: HeadRoute, weight: Tensor, group: TensorGroup, block: HeadBlock) -> Tensor:
    """Return the rows of a block, each from the rank that holds it."""
    shares = [route.share(rank) for rank in range(group.size)]
    spans = [
        (max(block.start, share.start), max(block.start, share.start, min(block.end, share.end)))
        for share in shares
    ]
    own = torch.zeros((block.end - block.start, weight.shape[1]), dtype=weight.dtype, device=weight.device)
    start, end = spans[group.rank]
    own_start = shares[group.rank].start
    own[start - block.start : end - block.start] = weight[start - own_start : end - own_start]
    parts = group.all_gather(own)
    return torch.cat(
        [
            part[start - block.start : end - block.start]
            for part, (start, end) in zip(parts, spans, strict=True)
        ]
    )
