"""A link that becomes slow while it is in use is noticed, and nothing else is taken for one."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import pytest

from penstock.batch import StageSpans
from penstock.engine.core.link_watch import NUM_WINDOWS, WINDOW_NS, LinkWatch, passages_of
from penstock.engine.core.pipe_watch import PipeWatch
from penstock.process.child import LinkJudged
from penstock.process.config import HostLink
from penstock.process.pipe_hosts import HostClock, PipeHosts
from penstock.trace.phases import Phase

MS = 1_000_000
SECOND = 1000 * MS
TOKEN_BYTES = 4096
SPEED = 125e6  # bytes per second, as measured
NUM_FRAMES = 4  # that the link holds
AWAY_NS = 77 * SECOND  # what the clock of the other host shows in addition
LINK = HostLink(
    hosts=("desk", "tower"),
    interfaces=("eth0", "enp3"),
    round_trip_s=0.0002,
    bytes_per_s_out=4 * SPEED,
    bytes_per_s_in=SPEED,
)
HOSTS = PipeHosts(
    stages=["tower", "desk"],
    links=[LINK],
    clocks=[
        HostClock(host="tower", offset_ns=0, error_ns=0),
        HostClock(host="desk", offset_ns=-AWAY_NS, error_ns=100_000),
    ],
    token_bytes=TOKEN_BYTES,
)


class Frame(NamedTuple):
    """What a plan does in the simulation."""

    num_tokens: int
    after_ns: int  # the sender takes this long for it
    compute_ns: int  # and the receiver


class Wire:
    """Two stages and the wire between them, which reports as ranks do.

    Attributes:
        speed: bytes per second.
        late_ns: returns how much later than it should a frame is there.
    """

    def __init__(self, watch: PipeWatch, speed: float = SPEED) -> None:
        self.watch, self.speed = watch, speed
        self.late_ns: Callable[[], int] = lambda: 0
        self.now_ns = SECOND
        self._step = 0
        self._free_ns = self._ready_ns = self._come_ns = 0  # wire and receiver, and when the last frame came
        self._taken_ns: deque[int] = deque([0] * NUM_FRAMES, maxlen=NUM_FRAMES)
        self.judged: list[LinkJudged] = []

    def play(self, seconds: float, *frames: Frame) -> list[LinkJudged]:
        """Let these plans cross again and again, behind a probe each second; what was judged meanwhile."""
        until_ns, judged_before = self.now_ns + round(seconds * SECOND), len(self.judged)
        while self.now_ns < until_ns:
            self._second(frames)
        return self.judged[judged_before:]

    def _second(self, frames: tuple[Frame, ...]) -> None:
        begin_ns = max(self.now_ns, self._free_ns, self._ready_ns) + MS
        sender, receiver = _Spans(0, begin_ns, 0), _Spans(1, begin_ns, AWAY_NS)
        self._cross(Frame(0, 0, 0), sender, receiver)
        while frames and sender.now_ns < begin_ns + SECOND:
            for frame in frames:
                self._cross(frame, sender, receiver)
        self.now_ns = begin_ns + SECOND
        self.judged += self.watch.follow(lambda: [sender.report(), receiver.report()])

    def _cross(self, frame: Frame, sender: _Spans, receiver: _Spans) -> None:
        self._step += 1
        step = self._step, frame.num_tokens
        sender.begin(*step)
        sender.spend(Phase.FORWARD, frame.after_ns)
        sender.spend(Phase.WAIT_NEXT, max(0, self._taken_ns[0] - sender.now_ns))
        sender.spend(Phase.COMM, 10_000)
        num_bytes = 64 + frame.num_tokens * TOKEN_BYTES
        self._free_ns = max(self._free_ns, sender.now_ns) + round(1e9 * num_bytes / self.speed)
        arrival_ns = self._come_ns = max(self._come_ns, self._free_ns + 100_000 + self.late_ns())
        receiver.begin(*step)
        receiver.spend(Phase.WAIT_PREV, max(5_000, arrival_ns - receiver.now_ns))
        receiver.spend(Phase.COMM, 10_000)
        self._taken_ns.append(receiver.now_ns)
        receiver.spend(Phase.FORWARD, frame.compute_ns)
        self._ready_ns = receiver.now_ns


class _Spans:
    """What one stage does, as its reporter keeps it."""

    def __init__(self, stage: int, began_ns: int, away_ns: int) -> None:
        self.stage, self.began_ns, self.now_ns = stage, began_ns + away_ns, began_ns
        self.phases, self.durations = bytearray(), list[int]()
        self.steps: list[tuple[int, int, int]] = []

    def begin(self, step: int, num_tokens: int) -> None:
        self.steps.append((len(self.phases), step, num_tokens))

    def spend(self, phase: Phase, nanoseconds: int) -> None:
        self.phases.append(phase)
        self.durations.append(nanoseconds)
        self.now_ns += nanoseconds

    def report(self) -> StageSpans:
        return StageSpans(
            stage=self.stage,
            began_ns=self.began_ns,
            phases=bytes(self.phases),
            durations_ns=self.durations,
            steps=self.steps,
        )


CHUNK = Frame(num_tokens=512, after_ns=60 * MS, compute_ns=30 * MS)  # 17 ms of wire
DECODE = Frame(num_tokens=16, after_ns=2 * MS, compute_ns=1 * MS)  # half a millisecond
LONG_S = (NUM_WINDOWS + 1) * WINDOW_NS / SECOND + 2


@pytest.fixture
def wire() -> Wire:
    watch = PipeWatch()
    watch.note(HOSTS)
    return Wire(watch)


def test_passages_are_read_from_the_spans_of_a_stage() -> None:
    spans = _Spans(1, 1000, 0)
    spans.spend(Phase.WAIT_PLAN, 50)  # behind the last step of the report before
    spans.begin(7, 3)
    for phase, duration in ((Phase.TAKE, 5), (Phase.WAIT_PREV, 300), (Phase.COMM, 20), (Phase.FORWARD, 100)):
        spans.spend(phase, duration)
    spans.spend(Phase.COMM, 40)
    spans.begin(8, 0)
    spans.spend(Phase.FORWARD, 9)  # it copies nothing
    (passage,) = passages_of(spans.report())
    assert passage == (7, 3, 1000 + 50 + 5 + 300, 300, 1000 + 50 + 5 + 300 + 20 + 100 + 40)


@pytest.mark.parametrize(
    "frames", [(CHUNK,), (CHUNK, DECODE, DECODE), (CHUNK._replace(after_ns=0),)], ids=str
)
def test_r15_a_link_that_becomes_slow_is_told_once_and_once_when_it_is_well_again(
    wire: Wire, frames: tuple[Frame, ...]
) -> None:
    assert wire.play(LONG_S, *frames) == []
    wire.speed = SPEED / 5
    (slow,) = wire.play(LONG_S, *frames)
    assert (slow.sender, slow.receiver, slow.is_slow) == ("tower", "desk", True)
    assert slow.measured_bytes_per_s == SPEED
    assert 0.99 * SPEED / 5 < slow.bytes_per_s < SPEED / 3, "at most: of frames taken late nothing is known"
    (link,) = wire.watch.shown()[0].links
    assert link.is_slow
    assert (link.reduced_bytes_per_s_in, link.reduced_bytes_per_s_out) == (slow.bytes_per_s, 0.0)
    assert wire.play(LONG_S, *frames) == []
    wire.speed = SPEED
    (well,) = wire.play(LONG_S, *frames)
    assert not well.is_slow
    (link,) = wire.watch.shown()[0].links
    assert not link.is_slow


@pytest.mark.parametrize("share", [0.6, 0.9, 3.0])
def test_r15_a_link_that_carries_more_than_half_is_not_slow(wire: Wire, share: float) -> None:
    wire.speed = share * SPEED
    assert wire.play(2 * LONG_S, CHUNK, DECODE) == []


def test_r15_an_idle_link_is_not_judged(wire: Wire) -> None:
    wire.speed = SPEED / 100
    assert wire.play(3 * LONG_S) == []
    assert wire.play(LONG_S, DECODE._replace(num_tokens=1, after_ns=300 * MS)) == [], "too few bytes to tell"


def test_r15_a_receiver_that_is_slow_is_not_taken_for_the_wire(wire: Wire) -> None:
    busy = CHUNK._replace(compute_ns=200 * MS)
    assert wire.play(2 * LONG_S, busy) == []
    assert wire.play(2 * LONG_S, DECODE._replace(after_ns=0, compute_ns=30 * MS)) == []


def test_r15_stalls_and_jitter_are_no_slow_link(wire: Wire) -> None:
    chance = random.Random(5)
    wire.late_ns = lambda: SECOND if chance.random() < 0.01 else 0
    assert wire.play(2 * LONG_S, CHUNK, DECODE) == []
    wire.late_ns = lambda: round(chance.uniform(0, 200 * MS))
    assert wire.play(2 * LONG_S, CHUNK, DECODE) == []


def test_r15_a_way_that_only_became_longer_is_no_slow_link(wire: Wire) -> None:
    wire.play(LONG_S, CHUNK)
    wire.late_ns = lambda: 80 * MS
    assert wire.play(2 * LONG_S, CHUNK) == []


def test_r15_traffic_of_some_seconds_is_not_worth_a_warning(wire: Wire) -> None:
    for _ in range(4):
        wire.speed = SPEED / 10
        assert wire.play((NUM_WINDOWS - 1) * WINDOW_NS / SECOND, CHUNK) == []
        wire.speed = SPEED
        assert wire.play(1.5 * WINDOW_NS / SECOND, CHUNK) == []


def test_r15_a_clock_that_is_known_better_and_better_changes_nothing(wire: Wire) -> None:
    for error_ns in (100_000, 80_000, 90_000, 60_000):
        clock = HostClock(host="desk", offset_ns=-AWAY_NS + error_ns, error_ns=error_ns)
        wire.watch.note(
            PipeHosts(stages=HOSTS.stages, links=[LINK], clocks=[HOSTS.clocks[0], clock], token_bytes=4096)
        )
        assert wire.play(LONG_S, CHUNK, DECODE) == []


def test_nothing_is_judged_while_a_clock_is_unknown_or_nothing_was_measured(wire: Wire) -> None:
    wire.speed = SPEED / 10
    for links, clocks in (([LINK], HOSTS.clocks[:1]), ([], HOSTS.clocks)):
        hosts = PipeHosts(stages=HOSTS.stages, links=links, clocks=clocks, token_bytes=TOKEN_BYTES)
        wire.watch.note(hosts)
        assert wire.play(LONG_S, CHUNK) == []


def test_r15_another_way_begins_without_a_judgement(wire: Wire) -> None:
    wire.speed = SPEED / 5
    assert len(wire.play(LONG_S, CHUNK)) == 1
    wire.watch.note(HOSTS)
    (link,) = wire.watch.shown()[0].links
    assert link.is_slow, "clocks are told each second"
    other = HostLink(
        hosts=LINK.hosts,
        interfaces=("wlan0", "wlan0"),
        round_trip_s=0.002,
        bytes_per_s_out=SPEED / 5,
        bytes_per_s_in=SPEED / 5,
    )
    wire.watch.note(
        PipeHosts(stages=HOSTS.stages, links=[other], clocks=HOSTS.clocks, token_bytes=TOKEN_BYTES)
    )
    assert wire.watch.shown()[0].links == [other]
    assert wire.play(2 * LONG_S, CHUNK) == []


def test_r15_what_is_known_of_a_link_stays_when_another_host_joins(wire: Wire) -> None:
    wire.speed = SPEED / 5
    (slow,) = wire.play(LONG_S, CHUNK)
    further = [msgspec.structs.replace(LINK, hosts=(host, "laptop")) for host in HOSTS.stages]
    wire.watch.note(msgspec.structs.replace(HOSTS, links=[*further, LINK]))
    *others, link = wire.watch.shown()[0].links
    assert link.reduced_bytes_per_s_in == slow.bytes_per_s
    assert others == further
    assert wire.play(LONG_S, CHUNK) == [], "it was told before"
    wire.speed = SPEED
    (well,) = wire.play(LONG_S, CHUNK)
    assert not well.is_slow


def test_r15_a_link_that_no_stage_uses_any_more_is_not_slow(wire: Wire) -> None:
    wire.speed = SPEED / 5
    assert len(wire.play(LONG_S, CHUNK)) == 1
    for stages in (["tower", "tower"], HOSTS.stages):
        wire.watch.note(msgspec.structs.replace(HOSTS, stages=stages))
        assert wire.watch.shown()[0].links == [LINK]


def test_stages_of_one_host_have_no_link_to_watch() -> None:
    watch = LinkWatch()
    watch.lay(PipeHosts(stages=["tower", "tower"], links=[LINK], clocks=HOSTS.clocks, token_bytes=1))
    spans = _Spans(0, 0, 0)
    spans.begin(1, 1)
    spans.spend(Phase.COMM, 1)
    assert watch.follow([spans.report()]) == []
