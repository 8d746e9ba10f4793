"""The shared-memory ring: two ends in one process, and in two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hand_core import Crew
from penstock.errors import LinkClosedError, ProtocolError, WaitTimeoutError
from penstock.pipeline.links.ring_memory import Ring, close_handle, create_ring
from penstock.process.endpoints import RingHandle

LONG = 30.0


@pytest.fixture
def handle() -> Iterator[RingHandle]:
    made = create_ring(frame_bytes=100, num_frames=2)
    yield made
    close_handle(made)


@pytest.fixture
def ends(handle: RingHandle) -> Iterator[tuple[Ring, Ring]]:
    writer, reader = Ring(handle, "stage 0 -> stage 1"), Ring(handle, "stage 0 -> stage 1")
    yield writer, reader
    writer.close()
    reader.close()


def test_frames_arrive_whole_and_in_order(ends: tuple[Ring, Ring]) -> None:
    writer, reader = ends
    messages = [bytes([i]) * (i % 100 + 1) for i in range(250)]
    crew = Crew()
    crew.start(lambda: [writer.write(m, LONG, f"step {i}") for i, m in enumerate(messages)])
    received = [reader.read(LONG, f"step {i}") for i in range(len(messages))]
    crew.join()
    assert [r[: len(m)] for r, m in zip(received, messages, strict=True)] == messages


def test_c8_a_frame_is_written_again_only_after_it_was_released(ends: tuple[Ring, Ring]) -> None:
    writer, reader = ends
    assert writer.reserve(LONG, "step 0") == 0
    writer.publish()
    assert writer.reserve(LONG, "step 1") == 1
    writer.publish()
    with pytest.raises(WaitTimeoutError):
        writer.reserve(0.0, "step 2")
    assert reader.take(LONG, "step 0") == 0
    with pytest.raises(WaitTimeoutError):  # taken, but still being read
        writer.reserve(0.0, "step 2")
    reader.release()
    assert writer.reserve(LONG, "step 2") == 0


def test_g1_room_that_was_waited_for_stays_until_it_is_taken(ends: tuple[Ring, Ring]) -> None:
    writer, reader = ends
    for _ in range(2):
        for _ in range(3):
            writer.await_room(0.0, "step 0")
        writer.write(b"a", 0.0, "step 0")
    with pytest.raises(WaitTimeoutError, match="0 s for room for step 2"):
        writer.await_room(0.0, "step 2")
    reader.read(LONG, "step 0")
    writer.await_room(0.0, "step 2")
    reader.close()
    with pytest.raises(LinkClosedError):
        writer.await_room(LONG, "step 2")


def test_waits_have_deadlines_that_name_link_and_step(ends: tuple[Ring, Ring]) -> None:
    writer, reader = ends
    with pytest.raises(WaitTimeoutError, match=r"stage 0 -> stage 1.*0.001 s for the tensors of step 7"):
        reader.read(0.001, "the tensors of step 7")
    writer.write(b"a", LONG, "")
    writer.write(b"b", LONG, "")
    with pytest.raises(WaitTimeoutError, match=r"stage 0 -> stage 1.*room for step 9"):
        writer.write(b"c", 0.001, "step 9")


def test_frames_written_before_a_close_are_still_delivered(ends: tuple[Ring, Ring]) -> None:
    writer, reader = ends
    writer.write(b"first", LONG, "step 0")
    writer.write(b"second", LONG, "step 1")
    writer.close()
    assert reader.read(LONG, "step 0").startswith(b"first")
    assert reader.read(LONG, "step 1").startswith(b"second")
    for _ in range(2):
        with pytest.raises(LinkClosedError, match=r"stage 0 -> stage 1.*before step 2"):
            reader.read(LONG, "step 2")


@pytest.mark.parametrize("who", ["peer", "third party", "itself"])
def test_a_waiting_reader_returns_when_the_ring_is_closed(
    who: str, handle: RingHandle, ends: tuple[Ring, Ring]
) -> None:
    writer, reader = ends
    closer = {"peer": writer, "third party": Ring(handle, "supervisor"), "itself": reader}[who]
    crew = Crew()
    if who == "itself":
        closer.close()
    else:
        crew.start(closer.close)
    with pytest.raises(LinkClosedError):
        reader.read(LONG, "step 0")
    crew.join()


def test_a_waiting_writer_returns_when_the_reader_leaves(ends: tuple[Ring, Ring]) -> None:
    writer, reader = ends
    writer.write(b"a", LONG, "step 0")
    writer.write(b"b", LONG, "step 1")
    crew = Crew()
    crew.start(reader.close)
    with pytest.raises(LinkClosedError, match="before step 2"):
        writer.write(b"c", LONG, "step 2")
    crew.join()


def test_a_ring_has_no_name_cannot_be_resized_and_leaves_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    names = set(os.listdir("/dev/shm"))
    handle = create_ring(4096, 3)
    assert set(os.listdir("/dev/shm")) == names
    assert all(os.get_inheritable(fd) for fd in (handle.memory_fd, handle.data_fd, handle.space_fd))
    with pytest.raises(PermissionError):
        os.ftruncate(handle.memory_fd, 0)
    ring = Ring(handle, "x")
    close_handle(handle)
    ring.close()
    ring.close()
    del ring
    assert set(os.listdir("/proc/self/fd")) == before


def test_memory_that_is_no_ring_is_refused(handle: RingHandle) -> None:
    with pytest.raises(ProtocolError, match="bytes, expected"):
        Ring(RingHandle(**{f: getattr(handle, f) for f in handle.__struct_fields__} | {"num_frames": 3}), "x")
    os.pwrite(handle.memory_fd, b"?", 0)
    with pytest.raises(ProtocolError, match="not hold a ring"):
        Ring(handle, "x")


ECHO = """
import json, sys
from penstock.process.endpoints import RingHandle
from penstock.errors import LinkClosedError
from penstock.pipeline.links.ring_memory import Ring
assert "torch" not in sys.modules
there, back = (Ring(RingHandle(**fields), "echo") for fields in json.loads(sys.argv[1]))
step = 0
try:
    while True:
        back.write(there.read(30.0, f"step {step}")[::-1], 30.0, f"step {step}")
        step += 1
except LinkClosedError:
    print(step)
"""


def test_two_processes_share_rings_through_inherited_descriptors() -> None:
    there, back = create_ring(64, 2), create_ring(64, 2)
    fds = [fd for h in (there, back) for fd in (h.memory_fd, h.data_fd, h.space_fd)]
    fields = [{f: getattr(h, f) for f in h.__struct_fields__} for h in (there, back)]
    writer, reader = Ring(there, "to the child"), Ring(back, "from the child")
    command = [sys.executable, "-c", ECHO, json.dumps(fields)]
    with subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE, text=True) as child:
        for step in range(100):
            frame = bytes((step + i) % 256 for i in range(64))
            writer.write(frame, LONG, f"step {step}")
            assert reader.read(LONG, f"step {step}") == frame[::-1]
        writer.close()
        output, _ = child.communicate(timeout=LONG)
    assert child.returncode == 0
    assert output == "100\n"
    reader.close()
    close_handle(there)
    close_handle(back)
