"""Samples have a path of their own: hidden states under way do not hold them up (row C12)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from carriers import ONE_WAY_CHANNELS, connect_channel, connect_link
from hand_core import Crew
from penstock.pipeline.links.frame import FrameHeader, FrameKind

LONG_S = 60.0
NUM_TOKENS, WIDTH = 2048, 512  # two tensors of float32: 8 MiB a frame
NUM_FRAMES = 8  # more than both ends and the kernel hold, while nobody takes one


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def header(step: int) -> FrameHeader:
    return FrameHeader(
        epoch=0,
        step_id=step,
        kind=FrameKind.HIDDEN,
        num_tokens=NUM_TOKENS,
        width=WIDTH,
        dtype="float32",
        num_tensors=2,
        digest=5,
    )


def hidden(step: int) -> list[torch.Tensor]:
    return [torch.full((NUM_TOKENS, WIDTH), 10.0 * step + part) for part in range(2)]


@pytest.mark.parametrize(
    ("frames", "samples"), [("memory", "memory"), ("shared memory", "ring"), ("tcp", "tcp"), ("tls", "tls")]
)
def test_c12_hidden_states_under_way_do_not_delay_samples(
    closing: ExitStack, frames: str, samples: str
) -> None:
    """Stage 0 sends more frames than stage 1 takes. The samples of stage 1 reach stage 0 all the same."""
    to_next, from_before = connect_link(
        frames, closing, "stage 0 -> stage 1", LONG_S, max_num_tokens=NUM_TOKENS, width=WIDTH
    )
    last, early = connect_channel(ONE_WAY_CHANNELS, samples, closing, "stage 1 -> stage 0")
    sent: list[int] = []

    def send_all() -> None:
        for step in range(NUM_FRAMES):
            to_next.send_frame(header(step), hidden(step))
            sent.append(step)

    crew = Crew()
    crew.start(send_all)
    for step in range(20):
        last.send(b"the samples of step %d" % step)
        assert early.recv(LONG_S) == b"the samples of step %d" % step
    assert len(sent) < NUM_FRAMES, "frames are under way still"
    for step in range(NUM_FRAMES):
        out = [torch.empty(NUM_TOKENS, WIDTH) for _ in range(2)]
        from_before.receive_frame(header(step), out).wait()
        assert all(torch.equal(own, other) for own, other in zip(out, hidden(step), strict=True))
    crew.join()
