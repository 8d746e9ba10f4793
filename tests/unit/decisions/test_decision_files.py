"""Files of decisions: cut, damaged or of another version, and on a disk that is full or slow."""

from __future__ import annotations

import errno
import io
import logging
import threading
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from fakes import FakeClock
from penstock.decisions.core_call import Addition, CoreCall, Turn
from penstock.decisions.log_file import DecisionFile, RecordStream, create_log
from penstock.decisions.log_writer import LogWriter
from penstock.decisions.recorder import NO_RECORDER, open_recorder
from penstock.decisions.records import Record, Turned, packed_times, unpacked_times
from penstock.decisions.redaction import Redaction, _grammar_of_size
from penstock.errors import DecisionLogError, UsageError
from penstock.process.config import StoreConfig
from penstock.replay.replayer import Replayer
from penstock.request import GenerationRequest, SamplingParams, StructuredOutputs
from recorded_runs import CONFIG, prompt, recorded

HEAD_BYTES = len(b"penstock decisions 1 0.1.0\n")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log"
    with recorded(path) as run:
        for number in range(4):
            run.add(f"r{number}", prompt(8, start=number))
    return path


@pytest.mark.parametrize("share", [0.5, 0.9, 0.97])
def test_a_part_is_replayed_up_to_its_last_whole_record(log: Path, tmp_path: Path, share: float) -> None:
    data, part = log.read_bytes(), tmp_path / "part"
    part.write_bytes(data[: int(share * len(data))])
    came, whole = Replayer(part).run(), Replayer(log).run()
    assert came.difference is None
    assert not came.is_whole
    assert 0 < came.num_plans <= whole.num_plans
    assert share > 0.6 or came.num_plans < whole.num_plans


def test_no_record_is_no_log(log: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(log.read_bytes()[: HEAD_BYTES + 20])
    with pytest.raises(DecisionLogError, match="does not hold a complete record"):
        Replayer(part).run()


@pytest.mark.parametrize("place", [0.3, 0.6, 0.9])
def test_damage_is_told(log: Path, tmp_path: Path, place: float) -> None:
    data, bad = bytearray(log.read_bytes()), tmp_path / "bad"
    data[int(place * len(data))] ^= 0x55
    bad.write_bytes(data)
    with pytest.raises(DecisionLogError, match=r"is damaged.*record again"):
        Replayer(bad).run()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"penstock decisions 1 0.0.9\n", r"recorded by Penstock 0\.0\.9.*Replay it with Penstock 0\.0\.9"),
        (b"penstock decisions 7 0.1.0\n", "in format 7"),
        (b"#!/bin/sh\n", "is not a file of decisions"),
        (b"", "is not a file of decisions"),
    ],
)
def test_another_version_or_kind_is_refused(log: Path, tmp_path: Path, line: bytes, said: str) -> None:
    other = tmp_path / "other"
    other.write_bytes(line + log.read_bytes()[HEAD_BYTES:])
    with pytest.raises(DecisionLogError, match=said):
        Replayer(other).run()


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DecisionLogError, match="No such file"):
        Replayer(tmp_path / "none").run()


def test_settings_of_another_version_are_refused(log: Path, tmp_path: Path) -> None:
    first, *_ = DecisionFile(log).records()
    call = msgspec.structs.replace(first.call, config_digest="0" * 64)
    file, path = create_log(tmp_path / "other")
    stream = RecordStream()
    file.write(stream.add(msgspec.structs.replace(first, call=call)) + stream.finish())
    file.close()
    with pytest.raises(DecisionLogError, match="settings unknown to this version"):
        Replayer(path).run()


def test_a_log_without_its_beginning_is_refused(tmp_path: Path) -> None:
    file, path = create_log(tmp_path / "other")
    stream = RecordStream()
    file.write(stream.add(Record(call=Turned())) + stream.finish())
    file.close()
    with pytest.raises(DecisionLogError, match="does not begin with the settings"):
        Replayer(path).run()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        file, path = create_log(tmp_path / "log")
        file.close()
        names.append(path.name)
    assert names == ["log", "log.2", "log.3"]


def test_a_file_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, record_decisions=str(tmp_path / "none" / "log"))
    with pytest.raises(UsageError, match=r"cannot be recorded.*No such file.*--record-decisions"):
        open_recorder(config)


def test_a_store_is_refused(tmp_path: Path) -> None:
    store = StoreConfig(url=None, quota_bytes=None, namespace=b"", host_blocks=4)
    config = msgspec.structs.replace(CONFIG, record_decisions=str(tmp_path / "log"), store=store)
    with pytest.raises(UsageError, match="with a KV store or host tier"):
        open_recorder(config)
    assert not (tmp_path / "log").exists()


def test_without_the_flag_nothing_is_made() -> None:
    assert open_recorder(CONFIG) is NO_RECORDER
    clock = FakeClock()
    assert NO_RECORDER.clock(clock) is clock


class FullDisk(io.BytesIO):
    """A file on a disk that is full after some bytes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, data: bytes | memoryview, /) -> int:  # type: ignore[override]
        if self.tell() + len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_full_disk_ends_the_recording_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    writer = LogWriter(FullDisk(10), Path("log"))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            writer.put(CoreCall(Turn(0.0)))
        writer.close()
        writer.put(CoreCall(Turn(0.0)))
    assert writer.is_over
    assert [record.getMessage() for record in caplog.records] == [
        "recording of decisions in log has stopped: No space left on device."
    ]


class StuckDisk(io.BytesIO):
    """A disk that takes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.is_reached = threading.Event()

    def write(self, data: bytes | memoryview, /) -> int:  # type: ignore[override]
        self.is_reached.set()
        assert self.go_on.wait(10.0)
        return super().write(data)


def test_a_slow_disk_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    disk = StuckDisk()
    writer = LogWriter(disk, Path("log"), most_waiting=5)
    with caplog.at_level(logging.ERROR):
        while not writer.is_over:  # each `put` returns at once, though nothing is written
            writer.put(CoreCall(Turn(0.0)))
        assert "5 records of the core wait to be written" in caplog.text
    disk.go_on.set()
    writer.close()


def test_times_lose_nothing() -> None:
    times = [1234.567890123, 1234.567890123, 1234.5678905, 0.1 + 0.2, 1e7 + 1 / 3, 5.0]
    packed, last_ns = packed_times(times, 77)
    assert unpacked_times(packed, 77) == (times, last_ns)
    assert all(isinstance(entry, int) for entry in packed[:3])


@pytest.mark.parametrize("num_bytes", [*range(9, 60), 255, 256, 290, 65_536, 70_000])
def test_a_grammar_keeps_its_length(num_bytes: int) -> None:
    alias = _grammar_of_size(num_bytes, 3)
    assert len(msgspec.msgpack.encode(alias)) == num_bytes
    assert alias != _grammar_of_size(num_bytes, 4)


def test_no_grammar_is_kept_while_decisions_are_recorded() -> None:
    """A client may send another schema with each request."""
    redaction = Redaction()
    tracemalloc.start()
    try:
        for number in range(60):
            structured = StructuredOutputs(regex=f"{number}{'x' * 50_000}")
            request = GenerationRequest(
                request_id=f"r{number}",
                prompt_token_ids=[1],
                sampling=SamplingParams(structured_outputs=structured),
            )
            redaction.record(CoreCall(Addition(request, None, 0), ended=[f"r{number}"]))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1_000_000
