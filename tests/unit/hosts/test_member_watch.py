"""Waiting for members of hosts that share a source of news, and for those of this one."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from penstock.errors import ErrorInfo
from penstock.hosts.local_process import spawn
from penstock.hosts.member import Member
from penstock.hosts.member_watch import MemberWatch
from penstock.process.child import Alive, ChildFailed, Ready, StatusEvent
from stand_in_hosts import StandInHost, StandInMember

LONG_S = 60.0  # a bound for hangs, never waited for


class Fleet:
    """Two members of one host, and what was heard of them."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, StatusEvent]] = []
        self.host = StandInHost("cellar")
        self.watch = MemberWatch(self._take)
        self.first, self.second = (self._add(stage) for stage in range(2))

    def _add(self, stage: int) -> StandInMember:
        member = StandInMember(self.host, f"stage {stage}", stage, stage)
        self.watch.add(member)
        return member

    def _take(self, member: Member, event: StatusEvent) -> None:
        self.heard.append((member.name, event))

    def close(self) -> None:
        self.watch.close()
        self.host.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.close()


def test_members_that_share_a_source_are_all_heard_when_it_has_news(fleet: Fleet) -> None:
    fleet.second.say(Alive())
    members, sources = fleet.watch.wait(LONG_S)
    assert (members, sources) == ({fleet.first, fleet.second}, set())
    for member in members:
        fleet.watch.hear(member)
    assert fleet.heard == [("stage 1", Alive())]
    assert fleet.watch.wait(0) == (set(), set())


def test_the_others_are_still_heard_when_one_of_them_was_reaped(fleet: Fleet) -> None:
    fleet.first.leave(0)
    fleet.watch.reap(fleet.first)
    assert fleet.first.done == ["close"]
    fleet.second.say(Ready())
    members, _ = fleet.watch.wait(LONG_S)
    assert members == {fleet.second}
    fleet.watch.hear(fleet.second)
    assert fleet.second.is_ready


def test_another_source_is_told_apart_until_it_is_not_watched(fleet: Fleet) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fleet.watch.watch(ours)
        theirs.send(b"x")
        assert fleet.watch.wait(LONG_S) == (set(), {ours})
        fleet.watch.unwatch(ours)
        assert fleet.watch.wait(0) == (set(), set())


def test_the_first_cause_is_the_stage_that_brought_another_one_down(fleet: Fleet) -> None:
    consequence = ErrorInfo(kind="LinkClosedError", message="closed", stage=0)
    fleet.first.say(ChildFailed(error=consequence))
    fleet.watch.hear(fleet.first)
    fleet.first.leave(5)
    fleet.second.leave(-9)
    cause = fleet.watch.first_cause(fleet.first, [fleet.first, fleet.second])
    assert cause.message == "stage 1 (cellar #1) was killed by signal 9 (SIGKILL)."
    assert cause.stage == 1


def test_close_ends_and_reaps_all(fleet: Fleet) -> None:
    fleet.watch.kill()
    assert [member.done for member in (fleet.first, fleet.second)] == [["kill_now", "close"]] * 2
    assert fleet.watch.members == []


def test_r6_a_process_that_has_closed_its_status_pipe_does_not_keep_the_watch_awake() -> None:
    before = set(os.listdir("/proc/self/fd"))
    watch = MemberWatch(lambda member, event: None)
    child = spawn("this", b"", name="nobody")  # ends at once: arguments that it does not know
    watch.add(child)
    while child.exit_code is None:
        watch.wait(LONG_S)
        watch.hear(child)
    assert child.identity == f"pid {child.pid}"
    watch.hear(child)
    watch.reap(child)
    assert watch.wait(0) == (set(), set())
    watch.close()
    assert set(os.listdir("/proc/self/fd")) == before
