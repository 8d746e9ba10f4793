"""What processes print, read line by line; with real pipes and no process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from penstock.hosts.logs.child_outputs import MAX_LINE_BYTES, InheritedOutputs, PipedOutputs
from stand_in_hosts import StandInHost, StandInMember


@pytest.fixture
def outputs() -> Iterator[PipedOutputs]:
    made = PipedOutputs()
    yield made
    made.close()


@pytest.fixture
def host() -> Iterator[StandInHost]:
    made = StandInHost("desk")
    yield made
    made.close()


class Child:
    """Stands for a process that has an output."""

    def __init__(self, outputs: PipedOutputs, host: StandInHost, name: str) -> None:
        self.member = StandInMember(host, name, 1, 0)
        with outputs.opened() as output:
            assert output.fd is not None
            self._fd = os.dup(output.fd)
            output.member = self.member

    def print(self, data: bytes) -> None:
        os.write(self._fd, data)

    def end(self) -> None:
        os.close(self._fd)


def test_r15_lines_come_whole_with_the_name_of_their_process(
    outputs: PipedOutputs, host: StandInHost
) -> None:
    first, second = Child(outputs, host, "stage 1"), Child(outputs, host, "spare")
    first.print(b"one\ntw")
    second.print(b"\xff warning\n\n")
    assert sorted(outputs.take()) == [("spare", "\ufffd warning"), ("stage 1", "one")]
    assert outputs.take() == []
    second.member.begin_as("stage 2", 2, 7)
    first.print(b"o\n")
    second.print(b"now a stage\n")
    assert sorted(outputs.take()) == [("stage 1", "two"), ("stage 2", "now a stage")]
    first.print(b"last words")
    first.end()
    second.end()
    assert outputs.take() + outputs.take() == [("stage 1", "last words")]


def test_r15_a_line_without_an_end_is_taken_in_pieces(outputs: PipedOutputs, host: StandInHost) -> None:
    child = Child(outputs, host, "stage 1")
    child.print(b"x" * (2 * MAX_LINE_BYTES))
    ((_, line),) = outputs.take()
    assert len(line) == 2 * MAX_LINE_BYTES
    child.end()


def test_a_process_that_could_not_be_started_leaves_no_descriptor(outputs: PipedOutputs) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no room"), outputs.opened():
        raise OSError("no room")
    assert set(os.listdir("/proc/self/fd")) == before
    assert outputs.take() == []


def test_on_the_head_processes_print_where_it_does() -> None:
    with InheritedOutputs().opened() as output:
        assert output.fd is None
