"""All links (`tests/support/carriers.py`) keep the same promises: C3, C4, C6, C8, DR1, DR2, DR9."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import msgspec
import pytest
import torch

from carriers import COUNTING_LINKS, LINKS, MAX_TOKENS, WIDTH, connect_link
from hand_core import Crew
from link_frames import blank, header, tensors
from penstock.errors import LinkClosedError, ProtocolError, WaitTimeoutError
from penstock.pipeline.links.frame import frame_bytes
from penstock.pipeline.links.link import AsyncIntermediateTensors, Link, RecvHandle
from penstock.pipeline.links.link_carriers import open_link
from penstock.pipeline.links.ring import SharedMemoryLink
from penstock.pipeline.links.ring_memory import Ring, close_handle, create_ring
from penstock.process.endpoints import MemoryHandle
from penstock.trace.phases import Phase, PhaseClock

NAME = "stage 0 -> stage 1"
MOST_BUFFERED_FRAMES = 200_000  # by a kernel: 100 MB of them
Ends = tuple[Link, Link]
Connect = Callable[..., Ends]


@pytest.fixture(params=LINKS)
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes the sending and the receiving end of a link."""
    with ExitStack() as closing:

        def make(timeout_s: float = 30.0, num_frames: int = 1) -> Ends:
            return connect_link(request.param, closing, NAME, timeout_s, num_frames=num_frames)

        yield make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 5, MAX_TOKENS])
def test_c3_tensors_arrive_bit_for_bit_and_empty_ones_too(
    connect: Connect, dtype: torch.dtype, num_tokens: int
) -> None:
    sender, receiver = connect()
    sent, out = tensors(1, num_tokens, dtype), blank(num_tokens, dtype)
    described = header(num_tokens=num_tokens, dtype=str(dtype).removeprefix("torch."))
    sender.send_frame(described, sent)
    receiver.receive_frame(described, out).wait()
    assert all(torch.equal(a, b) for a, b in zip(out, sent, strict=True))


def test_c6_sent_tensors_may_be_written_over_at_once(connect: Connect) -> None:
    sender, receiver = connect(num_frames=2)
    buffer = blank(4)
    for step in range(2):
        for place, value in zip(buffer, tensors(step, 4), strict=True):
            place.copy_(value)
        sender.send_frame(header(step, 4), buffer)
    for place in buffer:
        place.fill_(-1.0)
    for step in range(2):
        out = blank(4)
        receiver.receive_frame(header(step, 4), out).wait()
        assert all(torch.equal(a, b) for a, b in zip(out, tensors(step, 4), strict=True))


def test_c6_received_tensors_survive_the_next_frames(connect: Connect) -> None:
    sender, receiver = connect()
    sender.send_frame(header(0, 2), tensors(0, 2))
    first = blank(2)
    receiver.receive_frame(header(0, 2), first).wait()
    sender.send_frame(header(1, 2), tensors(1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, tensors(0, 2), strict=True))


@pytest.mark.parametrize("connect", COUNTING_LINKS, indirect=True)
def test_c8_a_send_waits_until_the_frame_before_has_left(connect: Connect) -> None:
    sender, receiver = connect(num_frames=1)
    sender.send_frame(header(0, 2), tensors(0, 2))
    events = []
    crew = Crew()

    def send_next() -> None:
        sender.send_frame(header(1, 2), tensors(1, 2))
        events.append("sent 1")

    out = blank(2)
    handle = receiver.receive_frame(header(0, 2), out)
    crew.start(send_next)
    assert events == []  # one frame, and it is full: the send cannot have returned
    events.append("waiting for 0")
    handle.wait()
    crew.join()
    assert events == ["waiting for 0", "sent 1"]
    assert torch.equal(out[0], tensors(0, 2)[0])


def test_c8_a_frame_is_whole_when_it_is_given_away_and_read_when_it_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle = create_ring(frame_bytes(max_num_tokens=MAX_TOKENS, width=WIDTH, itemsize=4, num_tensors=2), 1)
    sender, receiver = (SharedMemoryLink(handle, NAME, 30.0) for _ in range(2))
    close_handle(handle)
    publish, release, out, given = Ring.publish, Ring.release, blank(3), []

    def read_at_once(ring: Ring) -> None:
        publish(ring)
        receiver.receive_frame(header(0), out).wait()
        given.append("away")

    def write_over_at_once(ring: Ring) -> None:
        ring.frames[:] = bytes([7]) * len(ring.frames)
        release(ring)
        given.append("back")

    monkeypatch.setattr(Ring, "publish", read_at_once)
    monkeypatch.setattr(Ring, "release", write_over_at_once)
    sender.send_frame(header(0), tensors(0, 3))
    assert given == ["back", "away"]
    assert all(torch.equal(a, b) for a, b in zip(out, tensors(0, 3), strict=True))
    for end in (sender, receiver):
        end.close()


@pytest.mark.parametrize("num_frames", [1, 3])
def test_c8_a_link_holds_as_many_frames_as_were_promised(connect: Connect, num_frames: int) -> None:
    sender, receiver = connect(num_frames=num_frames)
    for step in range(num_frames):
        sender.send_frame(header(step), tensors(step, 3))
    for step in range(num_frames):
        out = blank(3)
        receiver.receive_frame(header(step), out).wait()
        assert torch.equal(out[0], tensors(step, 3)[0])


@pytest.mark.parametrize("num_frames", [1, 3])
@pytest.mark.parametrize("connect", COUNTING_LINKS, indirect=True)
def test_c8_a_link_that_counts_holds_no_more(connect: Connect, num_frames: int) -> None:
    sender, receiver = connect(timeout_s=0.01, num_frames=num_frames)
    for step in range(num_frames):
        sender.send_frame(header(step), tensors(step, 3))
    with pytest.raises(WaitTimeoutError):
        sender.send_frame(header(num_frames), tensors(num_frames, 3))
    receiver.receive_frame(header(0), blank(3)).wait()
    sender.send_frame(header(num_frames), tensors(num_frames, 3))


def test_frames_of_many_sizes_cross_in_order(connect: Connect) -> None:
    sender, receiver = connect(num_frames=3)
    sizes = [(7 * step) % (MAX_TOKENS + 1) for step in range(60)]
    crew = Crew()
    crew.start(lambda: [sender.send_frame(header(s, n), tensors(s, n)) for s, n in enumerate(sizes)])
    for step, size in enumerate(sizes):
        out = blank(size)
        receiver.receive_frame(header(step, size), out, ["r"]).wait()
        assert all(torch.equal(a, b) for a, b in zip(out, tensors(step, size), strict=True))
    crew.join()


@pytest.mark.parametrize(
    "change", [{"step_id": 4}, {"epoch": 1}, {"digest": 6}, {"num_tokens": 2}, {"dtype": "bfloat16"}], ids=str
)
def test_dr1_another_frame_is_refused_before_its_payload(connect: Connect, change: dict) -> None:
    sender, receiver = connect()
    sent = header(**{"step_id": 3, **change})
    sender.send_frame(sent, tensors(3, sent.num_tokens, getattr(torch, sent.dtype)))
    out = blank(3)
    with pytest.raises(ProtocolError, match=r"stage 0 -> stage 1.*step 3.*request-a, request-b"):
        receiver.receive_frame(header(3), out, ["request-a", "request-b"]).wait()
    assert all(bool((place == 99.0).all()) for place in out)


def test_d1_no_changed_bit_of_a_payload_goes_unnoticed() -> None:
    """Issue 25, point 4: numbers that change in the memory between two processes are refused."""
    size = frame_bytes(max_num_tokens=MAX_TOKENS, width=WIDTH, itemsize=4, num_tensors=2)
    handle = create_ring(size, 1)
    sender, receiver = (SharedMemoryLink(handle, NAME, 30.0) for _ in range(2))
    memory = Ring(handle, NAME)
    close_handle(handle)
    tensor_bytes = 3 * WIDTH * 4
    payload = [*range(tensor_bytes), *range(128, 128 + tensor_bytes)]  # each tensor begins at a cache line
    checksum = range(-8, 0)
    for place in (*checksum, *payload[::5], payload[-1]):
        sender.send_frame(header(), tensors(0, 3))
        memory.frames[64 + place] ^= 1 << place % 8
        out = blank(3)
        with pytest.raises(ProtocolError, match=r"stage 0 -> stage 1.*hidden states of step 0.*request-a"):
            receiver.receive_frame(header(), out, ["request-a"]).wait()
        assert all(bool((tensor == 99.0).all()) for tensor in out)
        receiver._ring.release()  # as if it had been taken
    for end in (sender, receiver, memory):
        end.close()


def test_d1_a_changed_frame_without_tokens_is_noticed_too() -> None:
    handle = create_ring(frame_bytes(max_num_tokens=MAX_TOKENS, width=WIDTH, itemsize=4, num_tensors=2), 1)
    sender, receiver = (SharedMemoryLink(handle, NAME, 30.0) for _ in range(2))
    memory = Ring(handle, NAME)
    close_handle(handle)
    sender.send_frame(header(num_tokens=0), tensors(0, 0))
    memory.frames[60] ^= 1
    with pytest.raises(ProtocolError, match="step 0"):
        receiver.receive_frame(header(num_tokens=0), blank(0)).wait()
    for end in (sender, receiver, memory):
        end.close()


def test_dr2_tensors_must_be_what_their_header_says(connect: Connect) -> None:
    sender, receiver = connect()
    with pytest.raises(AssertionError):
        sender.send_frame(header(num_tokens=4), tensors(0, 3))
    with pytest.raises(AssertionError):
        receiver.receive_frame(header(num_tokens=3), blank(4)).wait()
    with pytest.raises(AssertionError):
        sender.send_frame(header(num_tokens=3), tensors(0, 3)[:1])


def test_dr2_a_frame_that_does_not_fit_is_refused_by_its_sender() -> None:
    handle = create_ring(frame_bytes(max_num_tokens=2, width=WIDTH, itemsize=4, num_tensors=2), 1)
    link = SharedMemoryLink(handle, NAME, 30.0)
    with pytest.raises(ProtocolError, match=r"step 0 needs a frame of 320 bytes.*hold 192"):
        link.send_frame(header(num_tokens=5), tensors(0, 5))
    link.close()
    close_handle(handle)


def test_an_endpoint_that_no_carrier_opens_is_refused_with_a_remedy() -> None:
    class Pigeon(msgspec.Struct, tag="pigeon"):
        loft: int

    with pytest.raises(
        ProtocolError, match=r"stage 0 -> stage 1 .* kind pigeon.* memory, ring, stream_link"
    ) as caught:
        open_link(Pigeon(7), NAME, 1.0)  # type: ignore[arg-type]
    assert "same Penstock version" in caught.value.remedy


def test_a_link_in_memory_that_nobody_holds_is_closed() -> None:
    with pytest.raises(LinkClosedError, match="stage 0 -> stage 1: its memory is closed"):
        open_link(MemoryHandle(number=-1), NAME, 1.0)


class AwaitingClock(PhaseClock):
    """Notes what begins, and where the device is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def begin(self, phase: Phase, was: Phase | None = None) -> Phase:
        self.noted.append(phase.name)
        return super().begin(phase, was)

    def await_device(self) -> None:
        self.noted.append("device")


def test_d6_what_a_gpu_still_computes_is_awaited_before_the_copy_and_not_in_it() -> None:
    """Issue 25, point 6."""
    clock = AwaitingClock()
    with ExitStack() as closing:
        sender, receiver = connect_link("shared memory", closing, NAME, 30.0, num_frames=1)
        sender.send_frame(header(), tensors(0, 3), clock)
        assert clock.noted == ["device", "WAIT_NEXT", "COMM", "NO_WORK"]
        clock.noted.clear()
        receiver.receive_frame(header(), blank(3), clock=clock).wait()
        assert clock.noted == ["WAIT_PREV", "device", "COMM", "NO_WORK"]


def test_waits_end_with_a_typed_error(connect: Connect) -> None:
    sender, receiver = connect(timeout_s=0.001)
    with pytest.raises(WaitTimeoutError, match=r"stage 0 -> stage 1.*hidden states of step 8"):
        receiver.receive_frame(header(8), blank(3)).wait()

    def send_many() -> None:
        for _ in range(MOST_BUFFERED_FRAMES):
            sender.send_frame(header(9, MAX_TOKENS), tensors(9, MAX_TOKENS))

    with pytest.raises(WaitTimeoutError, match=r"stage 0 -> stage 1.*step 9"):
        send_many()


def test_a_close_wakes_the_receiver(connect: Connect) -> None:
    sender, receiver = connect()
    sender.send_frame(header(1), tensors(1, 3))
    receiver.receive_frame(header(1), blank(3)).wait()  # so that they have met
    crew = Crew()
    crew.start(sender.close)
    with pytest.raises(LinkClosedError, match="step 2"):
        receiver.receive_frame(header(2), blank(3)).wait()
    crew.join()


def test_dr9_waiting_twice_receives_once(connect: Connect) -> None:
    sender, receiver = connect(num_frames=2)
    sender.send_frame(header(0), tensors(0, 3))
    sender.send_frame(header(1), tensors(1, 3))
    out = blank(3)
    handle = receiver.receive_frame(header(0), out)
    handle.wait()
    handle.wait()
    receiver.receive_frame(header(1), out).wait()
    assert torch.equal(out[1], tensors(1, 3)[1])


def test_dr9_a_failed_wait_fails_again_the_same_way() -> None:
    calls = []

    def fetch() -> None:
        calls.append(1)
        raise WaitTimeoutError("too late")

    handle = RecvHandle(fetch)
    for _ in range(2):
        with pytest.raises(WaitTimeoutError, match="too late"):
            handle.wait()
    assert calls == [1]


def test_c4_lazy_tensors_wait_on_first_access_once_and_postprocess_once() -> None:
    events = []
    buffers = {"hidden_states": torch.zeros(2, 3), "residual": torch.ones(2, 3)}
    lazy = AsyncIntermediateTensors(
        buffers,
        RecvHandle(lambda: events.append("wait")),
        [lambda: events.append("first"), lambda: events.append("second")],
    )
    assert events == []
    assert lazy["hidden_states"] is buffers["hidden_states"]
    assert events == ["wait", "first", "second"]
    assert dict(lazy.items()) == buffers
    assert len(lazy[0:1]["residual"]) == 1
    assert events == ["wait", "first", "second"]
