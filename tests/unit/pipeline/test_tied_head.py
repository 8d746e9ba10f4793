"""A tied head goes down the pipe by shares: issue 25, point 14."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.distributed.group import SOLO, MemoryGroup, TensorGroup, memory_meeting
from penstock.distributed.share import vocab_share
from penstock.errors import ProtocolError
from penstock.pipeline.links.frame import FrameHeader
from penstock.pipeline.links.memory import MemoryLink
from penstock.pipeline.tied_head import HeadRoute, pass_head_on, send_head, take_head

VOCAB, HIDDEN, BLOCK_ROWS = 150, 8, 20
TIMEOUT_S = 30.0
LAYOUTS = [
    *[(1, 1), (1, 1, 1), (2, 2), (4, 4), (2, 2, 2), (4, 1, 4)],
    *[(1, 2), (1, 4), (2, 1), (4, 1), (4, 2), (2, 4), (3, 2), (2, 3)],
    *[(1, 4, 2), (2, 1, 4), (4, 2, 1), (3, 2, 4), (2, 4, 3)],
]
RankAddress = tuple[int, int]  # stage, rank in the stage


class CountedLink(MemoryLink):
    """Keeps the header of each frame."""

    def __init__(self, name: str) -> None:
        super().__init__(name, TIMEOUT_S)
        self.sent: list[FrameHeader] = []

    def send_frame(self, header: FrameHeader, tensors: Sequence[Tensor], *more: Any) -> None:
        self.sent.append(header)
        super().send_frame(header, tensors, *more)


class Pipe:
    """The ranks of a pipeline as threads, with their links and the group of the first stage."""

    def __init__(self, tp_sizes: tuple[int, ...], weight: Tensor) -> None:
        self.tp_sizes, self.weight = tp_sizes, weight
        self.incoming: dict[RankAddress, CountedLink] = {}
        self.outgoing: dict[RankAddress, list[CountedLink]] = defaultdict(list)
        for stage, (size, next_size) in enumerate(itertools.pairwise(tp_sizes)):
            for tp_rank in range(size):
                for receiver in range(tp_rank, next_size, size):
                    link = CountedLink(f"{stage}.{tp_rank} -> {stage + 1}.{receiver}")
                    self.incoming[stage + 1, receiver] = link
                    self.outgoing[stage, tp_rank].append(link)
        self.num_gathered = [0] * tp_sizes[0]
        self._meeting = memory_meeting(tp_sizes[0])

    def run(self) -> list[Tensor]:
        """Return what each rank of the last stage holds afterwards."""
        ranks = [(stage, tp_rank) for stage, size in enumerate(self.tp_sizes) for tp_rank in range(size)]
        with ThreadPoolExecutor(len(ranks)) as pool:
            held = list(pool.map(lambda rank: self._live(*rank), ranks))
        return held[-self.tp_sizes[-1] :]

    def route(self, stage: int, tp_rank: int) -> HeadRoute:
        return HeadRoute(
            tp_sizes=self.tp_sizes,
            stage=stage,
            tp_rank=tp_rank,
            vocab_size=VOCAB,
            block_rows=BLOCK_ROWS,
            epoch=3,
        )

    def _live(self, stage: int, tp_rank: int) -> Tensor:
        route, links = self.route(stage, tp_rank), self.outgoing[stage, tp_rank]
        buffer = torch.full((BLOCK_ROWS, HIDDEN), torch.nan, dtype=self.weight.dtype)
        if stage == 0:
            own = vocab_share(VOCAB, tp_rank, self.tp_sizes[0])
            send_head(route, self.weight[own.start : own.end], self._group(tp_rank), links)
            return torch.empty(0)
        incoming = self.incoming.get((stage, tp_rank))
        if stage < len(self.tp_sizes) - 1:
            if incoming is not None:
                pass_head_on(route, buffer, incoming, links)
            return torch.empty(0)
        assert incoming is not None
        held = torch.full((route.own_share.size, HIDDEN), torch.nan, dtype=self.weight.dtype)

        def put(first: int, rows: Tensor) -> None:
            held[first : first + len(rows)] = rows

        take_head(route, buffer, incoming, put)
        return held

    def _group(self, tp_rank: int) -> TensorGroup:
        if self.tp_sizes[0] == 1:
            return SOLO
        group = MemoryGroup(tp_rank, self.tp_sizes[0], name="stage 0", timeout_s=TIMEOUT_S)
        group.join(self._meeting)
        gather, counts = group.all_gather, self.num_gathered

        def counted(x: Tensor) -> list[Tensor]:
            counts[tp_rank] += 1
            return gather(x)

        group.all_gather = counted  # type: ignore[method-assign]
        return group


def embedding(dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows that differ, with a negative zero, which a sum of shares would lose."""
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7)).to(dtype)
    weight[::3, 0] = -0.0
    return weight


@pytest.mark.parametrize("tp_sizes", LAYOUTS, ids=str)
def test_s2_a14_each_rank_of_the_last_stage_gets_its_share_bit_for_bit(tp_sizes: tuple[int, ...]) -> None:
    weight = embedding(torch.bfloat16)
    for rank, held in enumerate(Pipe(tp_sizes, weight).run()):
        own = vocab_share(VOCAB, rank, tp_sizes[-1])
        expected = weight[own.start : own.end]
        assert torch.equal(held.view(torch.int16), expected.contiguous().view(torch.int16)), rank


@pytest.mark.parametrize("tp_sizes", LAYOUTS, ids=str)
def test_s2_a14_a_link_carries_the_shares_of_the_ranks_behind_it_and_nothing_else(
    tp_sizes: tuple[int, ...],
) -> None:
    pipe = Pipe(tp_sizes, embedding())
    pipe.run()
    last, expected = len(tp_sizes) - 1, dict.fromkeys(pipe.incoming, 0)
    for receiver in range(tp_sizes[-1]):
        rank = receiver
        for stage in range(last, 0, -1):
            expected[stage, rank] += vocab_share(VOCAB, receiver, tp_sizes[-1]).size
            rank %= tp_sizes[stage - 1]
    carried = {
        address: sum(header.num_tokens for header in link.sent) for address, link in pipe.incoming.items()
    }
    assert carried == expected
    frames = [header for link in pipe.incoming.values() for header in link.sent]
    assert max(header.num_tokens for header in frames) == BLOCK_ROWS
    assert {header.epoch for header in frames} == {3}


@pytest.mark.parametrize(
    ("tp_sizes", "is_gathered"),
    [((2, 2), False), ((4, 4), False), ((1, 4), False), ((4, 1), True), ((2, 4), True), ((4, 2), True)],
    ids=str,
)
def test_a14_the_first_stage_gathers_only_where_a_sender_lacks_rows(
    tp_sizes: tuple[int, ...], is_gathered: bool
) -> None:
    pipe = Pipe(tp_sizes, embedding())
    pipe.run()
    assert len(set(pipe.num_gathered)) == 1, "all ranks make the same calls"
    assert (pipe.num_gathered[0] > 0) is is_gathered


def test_a14_the_ranks_of_the_last_stage_take_turns() -> None:
    route = Pipe((1, 2), embedding()).route(0, 0)
    blocks = list(route.all_blocks())
    assert [block.number for block in blocks] == list(range(len(blocks)))
    assert [block.receiver for block in blocks[:6]] == [0, 1, 0, 1, 0, 1]
    assert blocks[:3] == [(0, 0, 0, 20), (1, 1, 96, 116), (2, 0, 20, 40)]


def test_dr1_a_block_that_is_another_than_expected_is_refused() -> None:
    """Both ends must agree about the sizes of all stages."""
    link = CountedLink("stage 0 -> stage 1")
    weight = embedding()
    block = next(iter(Pipe((1, 2), weight).route(0, 0).all_blocks()))
    route = Pipe((1, 2), weight).route(1, 1)
    link.send_frame(route.header(block, weight), [weight[:BLOCK_ROWS]])
    buffer = torch.empty(BLOCK_ROWS, HIDDEN)
    with pytest.raises(ProtocolError, match="step_id expected 1, found 0"):
        take_head(route, buffer, link, lambda first, rows: None)
