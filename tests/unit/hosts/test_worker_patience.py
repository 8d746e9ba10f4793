"""For how long a worker waits for its head: once, without end, or as long as a launcher bears."""

from __future__ import annotations

import itertools
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from agent_pairs import SECRET
from fakes import FakeClock
from penstock.errors import CertificateError, LinkClosedError, PeerError
from penstock.hosts import worker
from penstock.hosts.local_process import Descriptor
from penstock.hosts.network.followed_head import Find, found_nowhere
from penstock.hosts.station import WorkerSettings
from penstock.process.link_ports import PortRange
from penstock.trust.cancellation import Cancellation
from penstock.trust.joining import Address, JoinedHead
from penstock.trust.peer_names import HEAD_ROLE, PeerName
from penstock.trust.token_prompt import GivenTokens

AWAY = LinkClosedError("nothing listens there.")
CLUSTER = "a" * 32
BEFORE, NOW = ("127.0.0.1", 7700), ("127.0.0.9", 7700)  # addresses of the head


class TickingClock(FakeClock):
    """Goes on a little with each look, so that pauses end."""

    def __call__(self) -> float:
        self.advance(1e-3)
        return super().__call__()


class StandInMembership:
    """Raises what it is given in turns, or joins a head that is gone at once. Each try takes a second."""

    def __init__(self, outcomes: Iterator[PeerError | None], clock: FakeClock) -> None:
        self._outcomes = outcomes
        self._clock = clock
        self._has_joined = False
        self.tries: list[Address] = []

    @property
    def cluster(self) -> str:
        return CLUSTER if self._has_joined else ""

    def is_final(self, error: PeerError) -> bool:
        return not self._has_joined

    def join(self, head: Address, cancellation: Cancellation) -> JoinedHead:
        self.tries.append(head)
        self._clock.advance(1.0)
        if (error := next(self._outcomes)) is not None:
            raise error
        self._has_joined = True
        ours, theirs = socket.socketpair()
        theirs.close()
        name = PeerName(cluster=CLUSTER, host="tower", role=HEAD_ROLE)
        return JoinedHead(ours, name, SECRET, head)  # type: ignore[arg-type]  # no TLS


class Rig:
    """A worker and the clock that it looks at."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings = WorkerSettings(
            head=BEFORE,
            name="desk",
            state=directory / "state",
            address="127.0.0.3",
            ports=PortRange(0, 0),
        )
        self.said: list[str] = []
        self.find: Find = found_nowhere
        self._monkeypatch = monkeypatch
        self._stop, self._ending = os.pipe()
        monkeypatch.setattr(worker, "FIRST_PAUSE_S", 1e-3)
        monkeypatch.setattr(worker, "MOST_PAUSE_S", 1e-3)

    def run(self, *outcomes: PeerError | None, then: PeerError = AWAY) -> StandInMembership:
        clock = TickingClock()
        made = StandInMembership(itertools.chain(outcomes, itertools.repeat(then)), clock)
        self._monkeypatch.setattr(worker, "Membership", lambda *_: made)
        stop = Descriptor(self._stop)
        worker.Worker(self.settings, GivenTokens(None), self.said.append, stop, clock, self.find).run()
        return made

    def close(self) -> None:
        os.close(self._stop)
        os.close(self._ending)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(tmp_path, monkeypatch)
    yield made
    made.close()


def test_a_head_that_is_not_there_is_an_error_at_once(rig: Rig) -> None:
    with pytest.raises(LinkClosedError):
        rig.run()


def test_i2_a_head_that_starts_with_its_workers_is_waited_for(rig: Rig) -> None:
    rig.settings = msgspec.structs.replace(rig.settings, patience_s=10.0, away_limit_s=math.inf)
    with pytest.raises(LinkClosedError):
        rig.run()
    with pytest.raises(CertificateError):
        rig.run(AWAY, AWAY, then=CertificateError("it is for another cluster."))


def test_i2_a_worker_of_a_launcher_ends_when_its_head_has_been_away_for_long(rig: Rig) -> None:
    rig.settings = msgspec.structs.replace(rig.settings, patience_s=10.0, away_limit_s=5.0)
    made = rig.run(AWAY, None, AWAY, None)
    assert len(made.tries) == 4 + 5
    assert any("so this worker takes it as ended" in line for line in rig.said)


def test_g1_a_worker_that_searches_for_its_head_follows_it_to_another_address(rig: Rig) -> None:
    """And back to the first one: that is where a search finds it the second time."""
    searches: list[tuple[str, Address]] = []

    def find(cluster: str, known: Address, cancellation: Cancellation) -> Address | None:
        searches.append((cluster, known))
        return None if len(searches) == 1 else BEFORE if known == NOW else NOW

    rig.find = find
    rig.settings = msgspec.structs.replace(rig.settings, away_limit_s=1.5)
    made = rig.run(None, AWAY, AWAY, None, AWAY, None)
    assert made.tries[:6] == [BEFORE, BEFORE, BEFORE, NOW, NOW, BEFORE]
    assert searches[:3] == [(CLUSTER, BEFORE), (CLUSTER, BEFORE), (CLUSTER, NOW)]
    moves = [line for line in rig.said if "has moved" in line]
    assert moves == ["the head has moved to 127.0.0.9:7700", "the head has moved to 127.0.0.1:7700"]


def test_g1_a_worker_whose_user_has_typed_the_address_stays_with_it(rig: Rig) -> None:
    rig.settings = msgspec.structs.replace(rig.settings, away_limit_s=5.0)
    assert set(rig.run(None).tries) == {BEFORE}
