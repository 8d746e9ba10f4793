"""Each kind of message has a path of its own, so that none holds up another (rows C9, C12)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from carriers import ONE_WAY_CHANNELS, connect_channel, connect_link
from hand_core import Crew, Part, make_plan
from penstock.batch import ScheduledBatch, ScoredTokens, StepResult
from penstock.pipeline.links.frame import FrameHeader, FrameKind
from penstock.pipeline.ports import SampleSink

LONG_S = 60.0
NUM_TOKENS, WIDTH = 2048, 512  # two tensors of float32: 8 MiB a frame
NUM_FRAMES = 8  # more than both ends and the kernel hold, while nobody takes one


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def header(step: int, num_tokens: int = NUM_TOKENS, width: int = WIDTH) -> FrameHeader:
    return FrameHeader(
        epoch=0,
        step_id=step,
        kind=FrameKind.HIDDEN,
        num_tokens=num_tokens,
        width=width,
        dtype="float32",
        num_tensors=2,
        digest=5,
    )


def hidden(step: int, num_tokens: int = NUM_TOKENS, width: int = WIDTH) -> list[torch.Tensor]:
    return [torch.full((num_tokens, width), 10.0 * step + part) for part in range(2)]


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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("frames", "messages"), [("memory", "memory"), ("shared memory", "ring"), ("tcp", "tcp")]
)
def test_c9_kinds_may_be_read_in_any_order_and_each_keeps_its_own(
    closing: ExitStack, frames: str, messages: str, seed: int
) -> None:
    """In an inbox that all kinds shared, whoever wants the second kind would first have to put the others
    aside."""
    num_steps, kinds, chance = 4, ["frames", "samples", "results"], random.Random(seed)
    link_out, link_in = connect_link(
        frames, closing, "stage 0 -> stage 1", LONG_S, num_frames=num_steps, max_num_tokens=1, width=8
    )
    channels = {
        kind: connect_channel(ONE_WAY_CHANNELS, messages, closing, f"{kind} of stage 1") for kind in kinds[1:]
    }

    def send(kind: str, step: int) -> None:
        if kind == "frames":
            link_out.send_frame(header(step, 1, 8), hidden(step, 1, 8))
        else:
            channels[kind][0].send(b"%s of step %d" % (kind.encode(), step))

    def check(kind: str, step: int) -> None:
        if kind == "frames":
            out = [torch.empty(1, 8) for _ in range(2)]
            link_in.receive_frame(header(step, 1, 8), out).wait()
            assert all(torch.equal(own, sent) for own, sent in zip(out, hidden(step, 1, 8), strict=True))
        else:
            assert channels[kind][1].recv(LONG_S) == b"%s of step %d" % (kind.encode(), step)

    for act in (send, check):
        in_any_order(act, kinds, num_steps, chance)


def in_any_order(
    act: Callable[[str, int], None], kinds: list[str], count: int, chance: random.Random
) -> None:
    """Do it `count` times for each kind, step by step of each, the kinds mixed."""
    steps = dict.fromkeys(kinds, 0)
    mixed = kinds * count
    chance.shuffle(mixed)
    for kind in mixed:
        act(kind, steps[kind])
        steps[kind] += 1


def test_c12_samples_leave_before_scores_guesses_and_the_result() -> None:
    """The first stage may be waiting for them, and nobody waits for the rest."""
    trace: list[str] = []

    class Watched:
        """Runner, token return and channel of results in one."""

        def sample(self, *_: object) -> StepResult:
            return StepResult(step_id=0, token_ids=[[7]], num_rejected=[0])

        def send_samples(self, plan: ScheduledBatch, result: StepResult) -> None:
            trace.append("samples")

        def with_scores(self, result: StepResult, *_: object) -> StepResult:
            trace.append("scores")
            return result

        def with_guesses(self, result: StepResult, *_: object) -> StepResult:
            trace.append("guesses")
            return result

        def send(self, frame: bytes, **_: object) -> None:
            trace.append("result")

    scored = [ScoredTokens(place=0, first=1, count=1)]
    plan = msgspec.structs.replace(make_plan(0, [Part(row=0, start=0)]), scored=scored, mtp={0: 1})
    watched: Any = Watched()
    batch: Any = SimpleNamespace(plan=plan)
    SampleSink(watched, watched, watched).put_tensors(watched, batch)
    assert trace == ["samples", "scores", "guesses", "result"]
