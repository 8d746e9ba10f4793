"""What each kind of fault does to a frame, and that a seed says which: the tools of `test_link_faults`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from carriers import LINKS, connect_link
from faulty_links import (
    SENDING,
    Faults,
    FaultyChannel,
    FaultyLink,
    InjectedError,
    Kind,
    change_plan,
    change_result,
    change_samples,
    is_plan,
    is_result,
)
from hand_core import Part, make_plan, new_row
from penstock.batch import SampledTokens, StepResult, decode_sampled_tokens, decode_to_core, encode
from penstock.errors import LinkClosedError, ProtocolError, WaitTimeoutError
from penstock.pipeline.links.frame import FrameHeader, FrameKind
from penstock.pipeline.links.link import Link
from penstock.pipeline.links.plan_channel import QueueChannel
from penstock.pipeline.stage import plans_from

NAME, WIDTH = "stage 0 -> stage 1", 4
LINK_OUTCOMES = {
    Kind.DELAY: None,
    Kind.DROP: ProtocolError,
    Kind.DUPLICATE: ProtocolError,
    Kind.REORDER: ProtocolError,
    Kind.CORRUPT: ProtocolError,
    Kind.RESHAPE: ProtocolError,
    Kind.CLOSE: LinkClosedError,
    Kind.THROW: InjectedError,
}


class OneFault(Faults):
    """One kind of fault, on the first frame only."""

    def __init__(self, kind: Kind, seed: int = 0) -> None:
        super().__init__(seed, 1.0, kinds=[kind], limit=1)


@pytest.fixture(params=LINKS)
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Link, Link]]:
    with ExitStack() as closing:
        yield connect_link(request.param, closing, NAME, 30.0, num_frames=3, width=WIDTH)


def header(step_id: int) -> FrameHeader:
    return FrameHeader(
        epoch=1,
        step_id=step_id,
        kind=FrameKind.HIDDEN,
        num_tokens=2,
        width=WIDTH,
        dtype="float32",
        num_tensors=2,
        digest=77 + step_id,
    )


def tensors(step_id: float) -> list[torch.Tensor]:
    return [torch.full((2, WIDTH), step_id + part) for part in (0.0, 0.5)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", SENDING)
def test_each_fault_of_a_frame_is_noticed_by_who_sends_or_receives(
    ends: tuple[Link, Link], kind: Kind, seed: int
) -> None:
    faults = OneFault(kind, seed)
    sender, receiver = FaultyLink(ends[0], "out", faults), ends[1]

    def pass_frames() -> None:
        for step in range(2):
            sender.send_frame(header(step), tensors(step))
        for step in range(2):
            out = tensors(99)
            receiver.receive_frame(header(step), out, ["who"]).wait()
            assert all(torch.equal(a, b) for a, b in zip(out, tensors(step), strict=True))

    expected = LINK_OUTCOMES[kind]
    if expected is None:
        pass_frames()
    else:
        with pytest.raises(expected):
            pass_frames()
    assert [(fault.kind, fault.name, fault.number) for fault in faults.happened] == [(kind, "out", 0)]


@pytest.mark.parametrize("kind", [Kind.CLOSE, Kind.THROW])
def test_the_receiving_end_suffers_when_it_waits(ends: tuple[Link, Link], kind: Kind) -> None:
    receiver = FaultyLink(ends[1], "in", OneFault(kind))
    handle = receiver.receive_frame(header(0), tensors(99))
    for _ in range(2):
        with pytest.raises(LINK_OUTCOMES[kind]):
            handle.wait()


@pytest.mark.parametrize("carrier", LINKS)
def test_a_dropped_frame_that_none_follows_is_missed_at_the_deadline(carrier: str) -> None:
    with ExitStack() as closing:
        sender, receiver = connect_link(carrier, closing, NAME, 0.01, num_frames=3, width=WIDTH)
        FaultyLink(sender, "out", OneFault(Kind.DROP)).send_frame(header(0), tensors(0))
        with pytest.raises(WaitTimeoutError, match="step 0"):
            receiver.receive_frame(header(0), tensors(99)).wait()


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", [Kind.DROP, Kind.DUPLICATE, Kind.REORDER, Kind.CORRUPT, Kind.RESHAPE])
def test_d4_each_fault_of_a_plan_is_noticed_by_its_stage(kind: Kind, seed: int) -> None:
    core, inner = QueueChannel.pair()
    rank = FaultyChannel(
        inner, "plans", OneFault(kind, seed), concerns=is_plan, change=change_plan, incoming=True
    )
    part = Part(row=0, num_tokens=3, start=0, blocks=[0], sampled=True)
    for step in range(2):
        core.send(encode(make_plan(step, [part], new_rows=[new_row(0, [5, 6, 7])])))
    with pytest.raises(ProtocolError):
        list(plans_from(rank))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", [Kind.CORRUPT, Kind.RESHAPE])
def test_changed_samples_and_results_are_others_in_what_is_compared(kind: Kind, seed: int) -> None:
    sent, path = QueueChannel.pair()
    for num_rows in (0, 3):
        ids, rejected = [[7]] * num_rows, [0] * num_rows
        result = StepResult(step_id=3, epoch=1, digest=9, token_ids=ids, num_rejected=rejected)
        FaultyChannel(
            sent, "r", OneFault(kind, seed), concerns=is_result, change=change_result, incoming=False
        ).send(encode(result))
        frame = path.recv(0)
        assert frame is not None
        found = decode_to_core(frame)
        assert isinstance(found, StepResult)
        compared = found.step_id, found.epoch, found.digest, len(found.token_ids)
        assert compared != (3, 1, 9, num_rows)
    samples = encode(SampledTokens(step_id=3, epoch=1, digest=9, token_ids=ids, num_rejected=rejected))
    FaultyChannel(sent, "s", OneFault(kind, seed), concerns=bool, change=change_samples, incoming=False).send(
        samples
    )
    frame = path.recv(0)
    assert frame is not None
    other = decode_sampled_tokens(frame)
    assert (other.step_id, other.epoch, other.digest, len(other.token_ids)) != (3, 1, 9, 3)


def test_a_seed_says_what_happens_to_each_frame_of_each_link() -> None:
    def schedule(seed: int, name: str) -> list[Kind | None]:
        return [Faults(seed, 0.25).kind_of(name, number, SENDING) for number in range(4000)]

    first = schedule(1, "a")
    assert first == schedule(1, "a")
    assert len({tuple(schedule(seed, name)) for seed in (1, 2) for name in ("a", "b")}) == 4
    counts = Counter(first)
    assert 900 < sum(counts[kind] for kind in Kind) < 1100
    assert all(90 < counts[kind] < 160 for kind in Kind)


def test_no_more_faults_happen_than_wanted() -> None:
    faults = Faults(1, 1.0, limit=3)
    struck = [faults.strike("a", number, [Kind.DROP]) for number in range(9)]
    assert [fault is not None for fault in struck] == [True] * 3 + [False] * 6
    assert "seed 1, 3 faults" in str(faults)
    assert "drop a #2" in str(faults)
