"""What a worker keeps from one connection to the next, and what it says to its user."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent_pairs import SECRET, hello_at
from penstock.hosts.agent_messages import AgentHello, KeepSpare, NotNeeded, TalkBegins, ToHead
from penstock.hosts.agent_wire import AgentWire
from penstock.hosts.bell import Bell
from penstock.hosts.local_process import Descriptor
from penstock.hosts.station import LOOK_EVERY_S, Station, WorkerSettings
from penstock.hosts.weights.weight_cache import WeightCache
from penstock.process.link_ports import PortRange
from penstock.process.readiness import Waitable
from penstock.trust.joining import JoinedHead
from penstock.trust.peer_names import HEAD_ROLE, PeerName

TALK_BEGINS = TalkBegins()


class Rig:
    """A station, and heads that a test plays.

    Attributes:
        said: lines for the user.
    """

    def __init__(self, directory: Path, cache: WeightCache) -> None:
        settings = WorkerSettings(
            head=("127.0.0.2", 7700),
            name="desk",
            state=directory,
            address="127.0.0.3",
            ports=PortRange(0, 0),
        )
        self.said: list[str] = []
        self._stop, self._ending = os.pipe()
        self.attempts = Bell()
        self.station = Station(
            settings,
            directory / "spare",
            cache,
            self.said.append,
            Descriptor(self._stop),
            self.attempts,
            time.monotonic,
        )

    def join(self, cluster: str = "a") -> tuple[JoinedHead, AgentWire[ToHead]]:
        ours, theirs = socket.socketpair()
        self._theirs = theirs
        name = PeerName(cluster=cluster * 32, host="tower", role=HEAD_ROLE)
        head = JoinedHead(ours, name, SECRET, ("127.0.0.2", 7700))  # type: ignore[arg-type]  # no TLS
        return head, AgentWire(theirs, ToHead)

    def serve_for_a_moment(
        self, cluster: str = "a", first_word: TalkBegins | NotNeeded = TALK_BEGINS
    ) -> AgentHello:
        """Serve a head that says that the talk begins, or another first word, and then is gone."""
        head, wire = self.join(cluster)
        wire.send(first_word)
        wire.send(KeepSpare(threads=0))
        self._theirs.shutdown(socket.SHUT_WR)
        assert not self.station.serve(head)
        hello = hello_at(wire)
        wire.close()
        return hello

    def end(self) -> None:
        os.write(self._ending, b"!")

    def close(self) -> None:
        self.station.close()
        self.attempts.close()
        for fd in (self._stop, self._ending):
            os.close(fd)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr("penstock.hosts.local.LocalHost.keep_spare", lambda host, threads: 0)
    with closing(WeightCache(tmp_path / "weights")) as cache, closing(Rig(tmp_path, cache)) as made:
        yield made


def test_r15_a_worker_comes_back_to_its_head_with_the_talk_of_before(rig: Rig) -> None:
    first = rig.serve_for_a_moment()
    again = rig.serve_for_a_moment()
    assert first.talk == again.talk != ""
    assert first.num_received == 0
    assert again.num_received <= 1
    assert rig.said[0].startswith("desk has joined tower; links from other hosts use 127.0.0.3")
    assert rig.said[1].startswith("the head is lost: ")
    assert "ranks" not in rig.said[1], "there are none"


def test_a_worker_that_is_one_too_many_says_so_once_and_that_it_is_in_when_it_is(rig: Rig) -> None:
    for _ in range(3):
        rig.serve_for_a_moment(first_word=NotNeeded())
    assert rig.said == ["desk is not needed yet: all hosts have joined. This host tries again."]
    rig.serve_for_a_moment()
    rig.serve_for_a_moment(first_word=NotNeeded())
    _, joined, gone, not_needed = rig.said
    assert joined.startswith("desk has joined tower")
    assert gone.startswith("the head is lost: ")
    assert not_needed == rig.said[0]


def test_r15_with_a_head_of_another_cluster_all_begins_anew(rig: Rig) -> None:
    assert rig.serve_for_a_moment("a").talk != rig.serve_for_a_moment("b").talk


def test_a_worker_ends_when_it_is_to_whether_a_head_is_there_or_not(rig: Rig) -> None:
    assert not rig.station.wait(0.0)
    head, wire = rig.join()
    rig.end()
    assert rig.station.wait(30.0)
    assert rig.station.serve(head)
    wire.close()


def test_r15_ranks_are_kept_and_ended_in_time_while_the_worker_joins(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt may take longer than ranks are kept for."""
    served: list[float] = []

    class Agent:
        has_members = True

        def serve(self, timeout_s: float) -> set[Waitable]:
            served.append(timeout_s)
            self.has_members = len(served) < 2
            return {rig.attempts} if len(served) == 3 else set()

        def close(self) -> None: ...

    rig.station._agent.close()
    monkeypatch.setattr(rig.station, "_agent", Agent())
    assert not rig.station.await_attempt()
    assert served == [LOOK_EVERY_S] * 3
    assert rig.said == ["the head has ended or refuses this host. Its ranks are ended."]


def test_a_worker_ends_when_it_is_to_while_it_joins(rig: Rig) -> None:
    rig.attempts.ring()
    assert not rig.station.await_attempt()
    rig.end()
    assert rig.station.await_attempt()
