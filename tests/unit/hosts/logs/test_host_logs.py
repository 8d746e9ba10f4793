"""From what a worker's processes print to what the head shows of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from fakes import FakeClock
from penstock.hosts.agent_messages import LogLines
from penstock.hosts.logs.child_outputs import PipedOutputs
from penstock.hosts.logs.head_log import HeadLog
from penstock.hosts.logs.line_ration import LINES_AT_ONCE
from penstock.hosts.logs.worker_log import WorkerLog
from penstock.told_text import MAX_LINE_CHARS
from stand_in_hosts import StandInHost, StandInMember


class Logs:
    """The log of a worker with one stage, and that of its head."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.here: list[str] = []
        self.at_head: list[tuple[str, str, str]] = []
        outputs = PipedOutputs()
        self.worker = WorkerLog(self.here.append, outputs, self.clock)
        self.head = HeadLog("desk", lambda *line: self.at_head.append(line), self.clock)
        self.host = StandInHost("desk")
        with outputs.opened() as output:
            assert output.fd is not None
            self._fd = os.dup(output.fd)
            output.member = StandInMember(self.host, "stage 1", 1, 0)

    def print(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def carry(self) -> None:
        for message in self.worker.take():
            self.head.take(message)

    def close(self) -> None:
        os.close(self._fd)
        self.worker.close()
        self.host.close()


@pytest.fixture
def logs() -> Iterator[Logs]:
    made = Logs()
    yield made
    made.close()


def test_r15_lines_of_a_worker_and_of_its_ranks_appear_there_and_at_the_head(logs: Logs) -> None:
    logs.worker.say("desk has joined tower")
    logs.print("a warning\nand another\n")
    logs.carry()
    assert logs.here == ["desk has joined tower", "stage 1: a warning", "stage 1: and another"]
    assert logs.at_head == [
        ("desk", "", "desk has joined tower"),
        ("desk", "stage 1", "a warning"),
        ("desk", "stage 1", "and another"),
    ]
    logs.carry()
    assert len(logs.at_head) == 3


def test_r15_a_worker_does_not_flood_the_head_and_says_how_much_is_left_out(logs: Logs) -> None:
    for _ in range(LINES_AT_ONCE + 50):
        logs.print("again\n")
        logs.carry()
    assert len(logs.at_head) == LINES_AT_ONCE
    logs.clock.advance(1.0)
    logs.carry()
    assert logs.at_head[LINES_AT_ONCE:] == [("desk", "", "50 more lines are only in the log of that host")]
    assert len(logs.here) == LINES_AT_ONCE + 50, "there all of them are shown"


def test_r15_the_head_keeps_to_bounds_of_its_own(logs: Logs) -> None:
    line = ("stage\x1b[2J 1", "\x07" + "y" * 2 * MAX_LINE_CHARS)
    logs.head.take(LogLines(lines=[line] * 10 * LINES_AT_ONCE))
    assert len(logs.at_head) == 2 * LINES_AT_ONCE
    _, name, text = logs.at_head[0]
    assert name == "stage\\x1b[2J 1"
    assert text.startswith("\\x07yyy")
    assert len(text) < MAX_LINE_CHARS + 50
    logs.clock.advance(1.0)
    logs.head.take(LogLines(lines=[], num_dropped=3))
    assert logs.at_head[-1][2] == f"{8 * LINES_AT_ONCE + 3} more lines are only in the log of that host"
