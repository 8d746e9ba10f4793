"""What children do first and how they report."""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import sys
import termios
import threading

import msgspec
import pytest

from penstock.batch import RankLoaded
from penstock.errors import CheckpointError, StageLostError, UsageError
from penstock.process.child import (
    STUCK_S,
    Abandoned,
    Alive,
    ChildFailed,
    LoadProgressed,
    Measured,
    Pulse,
    Ready,
    StatusEvent,
    StatusWriter,
    TensorsRead,
    TextSideLoaded,
    WeightsLoaded,
    decode_status,
    encode_config,
    failure,
    read_config,
)
from penstock.process.config import RankConfig, RankProcessConfig

RANK = RankConfig(
    model_path="/models/x",
    dtype="float32",
    max_model_len=64,
    stage=0,
    num_stages=2,
    start_layer=0,
    end_layer=2,
    device="cpu",
    threads=1,
    block_size=16,
    num_blocks=None,
    kv_cache_bytes=None,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    depth=2,
    link_frames=1,
)
PROCESS = RankProcessConfig(
    rank=RANK,
    parent_pid=1,
)


def pipe_with(content: bytes) -> int:
    read_fd, write_fd = os.pipe()
    with os.fdopen(write_fd, "wb") as pipe:
        pipe.write(content)
    return read_fd


def lines_of(read_fd: int, write_fd: int) -> list[bytes]:
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        return pipe.read().splitlines()


def test_a_config_crosses_a_pipe() -> None:
    assert read_config(pipe_with(encode_config(PROCESS)), RankProcessConfig) == PROCESS


@pytest.mark.parametrize("content", [b"", b"nonsense", encode_config(RANK)])
def test_a_config_that_is_none_is_refused(content: bytes) -> None:
    with pytest.raises(UsageError, match="is not a RankProcessConfig"):
        read_config(pipe_with(content), RankProcessConfig)


def test_events_are_json_lines() -> None:
    read_fd, write_fd = os.pipe()
    status = StatusWriter(write_fd)
    rank = RankLoaded(
        stage=1,
        max_blocks=4,
        block_bytes=5,
        tensor_bytes=6,
        bytes_read=7,
        load_seconds=0.5,
        is_invariant=False,
    )
    failed = failure(CheckpointError(file="f", tensor="t", expected="a", found="b"))
    events = [
        LoadProgressed(done=1, total=2),
        TensorsRead(digests=bytes(range(64))),
        WeightsLoaded(bytes_read=7, seconds=0.5, identity=b"model"),
        Ready(epoch=1, rank=rank),
        failed,
    ]
    for event in events:
        status.write(event)
    lines = lines_of(read_fd, write_fd)
    assert [json.loads(line)["event"] for line in lines] == ["progress", "read", "loaded", "ready", "failed"]
    assert [decode_status(line) for line in lines] == events


def test_what_a_rank_has_read_comes_whole_though_the_pipe_is_full() -> None:
    """More lines than a pipe holds, read by somebody who comes late."""
    read_fd, write_fd = os.pipe()
    status = StatusWriter(write_fd)
    events = [TensorsRead(digests=bytes([number]) * 2560) for number in range(60)]
    while True:  # fill it: this event is dropped where there is no room
        before = num_waiting(read_fd)
        status.write(Alive())
        if num_waiting(read_fd) == before:
            break
    found: list[StatusEvent] = []

    def read() -> None:
        with os.fdopen(read_fd, "rb") as pipe:
            found.extend(decode_status(line) for line in pipe)

    reader = threading.Thread(target=read)
    reader.start()
    for event in events:
        status.write(event)
    status.write(WeightsLoaded(bytes_read=7, seconds=0.5))
    os.close(write_fd)
    reader.join()
    told = [event for event in found if not isinstance(event, Alive)]
    assert told == [*events, WeightsLoaded(bytes_read=7, seconds=0.5)]


@pytest.mark.parametrize(
    "event",
    [
        Ready(epoch=1, numeric_classes=["x86-64-v4 float32"] * 2000),
        Measured(costs=msgspec.Raw(msgspec.json.encode([0.125] * 9000))),
        TextSideLoaded(prompt_form="messages", cautions=["tools will not work."] * 2000),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_long_line_comes_whole_while_another_thread_says_that_it_is_alive(event: StatusEvent) -> None:
    """The pipe takes less at once, as where the system gives this user no larger ones."""
    read_fd, write_fd = os.pipe()
    fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, select.PIPE_BUF)
    status = StatusWriter(write_fd)
    received: list[bytes] = []

    def read() -> None:
        with os.fdopen(read_fd, "rb") as pipe:
            received.extend(pipe)

    writers = [
        threading.Thread(target=status.write, args=(event,)),
        threading.Thread(target=lambda: [status.write(Alive()) for _ in range(100)]),
    ]
    reader = threading.Thread(target=read)
    for thread in (*writers, reader):
        thread.start()
    for writer in writers:
        writer.join()
    os.close(write_fd)
    reader.join()
    assert [said for said in map(decode_status, received) if said != Alive()] == [event]


def num_waiting(fd: int) -> int:
    """Bytes in a pipe."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), "little")


def test_what_others_have_said_of_a_failure_fits_a_line_however_long_it_is() -> None:
    read_fd, write_fd = os.pipe()
    status = StatusWriter(write_fd)
    error = StageLostError("\N{SNOWMAN}" * 100_000, remedy="r" * 100_000, stage=1).info()
    status.write(Abandoned(epoch=3, error=error))
    status.write(ChildFailed(error=error, trace="t" * 100_000))
    status.write(Alive())
    lines = lines_of(read_fd, write_fd)
    assert all(len(line) <= select.PIPE_BUF for line in lines)
    abandoned, failed, alive = map(decode_status, lines)
    assert isinstance(abandoned, Abandoned)
    assert abandoned.error.message == "\N{SNOWMAN}" * len(abandoned.error.message) != ""
    assert isinstance(failed, ChildFailed)
    assert failed.trace == "t" * len(failed.trace) != ""
    assert alive == Alive()


def test_progress_is_told_once_per_percent() -> None:
    read_fd, write_fd = os.pipe()
    status = StatusWriter(write_fd)
    for done in range(10_001):
        status.write(LoadProgressed(done=done, total=10_000))
    told = [decode_status(line) for line in lines_of(read_fd, write_fd)]
    assert len(told) == 101
    assert told[-1] == LoadProgressed(done=10_000, total=10_000)


def test_nobody_reading_never_blocks_nor_fails() -> None:
    read_fd, write_fd = os.pipe()
    status = StatusWriter(write_fd)
    for done in range(5_000):  # more than a pipe holds
        status.write(LoadProgressed(done=done, total=5_000))
        status.write(failure(RuntimeError("x" * 3000)))
    os.close(read_fd)
    status.write(Ready())
    os.close(write_fd)


def test_failures_fit_a_line_and_keep_their_cause() -> None:
    try:
        try:
            raise ZeroDivisionError("the cause")
        except ZeroDivisionError as error:
            raise StageLostError("y" * 9000, stage=3) from error
    except StageLostError as error:
        failed = failure(error)
    assert isinstance(failed, ChildFailed)
    assert failed.error.kind == "StageLostError"
    assert failed.error.stage == 3
    assert failed.trace.rstrip().endswith("ZeroDivisionError: the cause")
    assert len(msgspec.json.encode(failed)) < 4096
    assert failure(UsageError("plain")).trace == ""
    assert "KeyError" in failure(KeyError("foreign")).trace


PARENT = """
import os, subprocess, sys
program = (
    "import os, sys; from penstock.process.child import enter_child\\n"
    "from types import SimpleNamespace\\n"
    "enter_child('penstock stage 7 tp 0', SimpleNamespace(parent_pid=int(sys.argv[1])))\\n"
    "title = open('/proc/self/cmdline').read().rstrip(chr(0))\\n"
    "print(os.getpid(), title, 'torch' in sys.modules, flush=True)\\n"
    "sys.stdin.read()"
)
child = subprocess.Popen([sys.executable, "-c", program, str(os.getpid())], stdin=subprocess.PIPE)
sys.stdin.read()
os._exit(9)
"""


def test_a_child_has_a_title_and_dies_with_its_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, *title, has_torch = parent.stdout.readline().split()
        assert " ".join(title) == "penstock stage 7 tp 0"
        assert has_torch == "False"
        pidfd = os.pidfd_open(int(pid))
        parent.kill()
        parent.wait()
        assert select.select([pidfd], [], [], 30.0)[0], "the child outlived its parent"
        os.close(pidfd)


def test_a_child_whose_parent_has_gone_already_ends_itself() -> None:
    program = "from penstock.process.child import die_with_parent; die_with_parent(1 << 22); print('alive')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9
    assert done.stdout == ""


def test_r2_who_has_a_main_loop_is_alive_while_it_turns() -> None:
    now = 100.0
    pulse = Pulse(clock=lambda: now)
    now += 3600.0
    assert pulse.is_alive, "it loads, and has no loop yet"
    pulse.beat()
    now += STUCK_S - 0.1
    assert pulse.is_alive
    now += 0.2
    assert not pulse.is_alive
    pulse.beat()
    assert pulse.is_alive
