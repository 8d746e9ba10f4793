"""Finds out whether a link between two hosts has become slow, from the reports of the stages at both ends.

    sender     |copies frame 7 into the link|
    receiver         waits ........................................|copies frame 7 out of it|
                                            ▲ latency ▲  carrying  ▲

A frame has the hidden states of one plan. The stages' reports, which also make traces, say when a frame was
handed to the link, and when the next stage began to take it. `engine.core.pipe_watch` puts both times on one
clock. Probes, the plans without tokens, show the latency of the link. A frame with tokens takes longer: the
rest is the time in which its bytes are carried. If the frame before it was still on its way, that time begins
when the frame before has arrived. Frames that follow each other without a pause are a *run*. The time of a
run is compared with the time for the same bytes at the measured speed:

- slow: the run took more than twice as long and some spare time (`_Hop.spare_ns`), even by the shortest time
  that the errors of measurement allow;
- well: the run took at most twice as long, even by the longest time that these errors allow;
- neither: the run had too few bytes, or both may be true. An idle link is therefore not judged.

Only frames that the receiver has waited for count. If a busy receiver takes a frame late, nobody knows when
it arrived.

Runs are judged in windows of some seconds; a window with hardly any judged runs does not count. A link
becomes slow when all judged runs of several windows, one after another, were slow. It is well again when each
of several windows, one after another, had a run that was well. A stall, or other traffic for some seconds,
therefore changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from penstock.batch import StageSpans
from penstock.process.child import LinkJudged
from penstock.process.config import HostLink
from penstock.process.pipe_hosts import PipeHosts
from penstock.trace.phases import Phase

SLOWNESS = 2.0  # a slow run takes more than this many times as long as at the measured speed
WINDOW_NS = 10_000_000_000
NUM_WINDOWS = 3  # this many windows, one after another, change what a link counts as
LEAST_RUNS = 3  # a window with fewer judged runs does not count
FORGET_WINDOWS = 6  # after this many windows that did not count, the windows before are forgotten
LEAST_NS = 2_000_000  # a run is judged only if it takes at least this long at the measured speed
LEAST_WAIT_NS = 200_000  # a receiver that waits at least this long was there before its frame
SPARE_NS = 3_000_000  # a run may take this much longer, since two processes have to be woken
SPARE_TRIPS = 8  # and this many round trips longer, since TCP sends more bytes with each of them
LONG_RUN = 10  # a run whose expected time exceeds this many times `_Hop.spare_ns` is judged before its end
NUM_PROBES = 10  # the last probes, this many, show the latency, and how much it varies
MAX_STEPS = 1024  # a report of more steps, as from a tiny model, is left out


class _Passage(NamedTuple):
    """The passage of a step through one stage, in nanoseconds of the head's time.

    Attributes:
        arrived_ns: when the stage began to take the hidden states, which may have come before.
        waited_ns: how long the stage had waited for them until then; 0: they were there already.
        sent_ns: when the stage had handed its own hidden states to the next link.
    """

    step: int
    num_tokens: int
    arrived_ns: int
    waited_ns: int
    sent_ns: int


def passages_of(report: StageSpans) -> Iterator[_Passage]:
    """Yield the passage of each step in a report; steps that crossed no link are left out."""
    ends = [index for index, _, _ in report.steps[1:]] + [len(report.phases)]
    starts_ns = list(accumulate(report.durations_ns, initial=report.start_ns))
    for (begin, step, num_tokens), end in zip(report.steps, ends, strict=True):
        copies = [index for index in range(begin, end) if report.phases[index] == Phase.COMM]
        if not copies:
            continue
        first, last = copies[0], copies[-1]
        has_waited = first > begin and report.phases[first - 1] == Phase.WAIT_PREV
        yield _Passage(
            step=step,
            num_tokens=num_tokens,
            arrived_ns=starts_ns[first],
            waited_ns=report.durations_ns[first - 1] if has_waited else 0,
            sent_ns=starts_ns[last + 1],
        )


class _Verdict:
    """The verdict of many runs about a link.

    Attributes:
        is_slow: whether the link counts as slow now.
        bytes_per_s: the highest speed of a run while the link was becoming slow.
    """

    def __init__(self) -> None:
        self.is_slow = False
        self.bytes_per_s = 0.0
        self._window = 0
        self._runs: list[bool] = []  # for each judged run of the window: whether it was slow
        self._judged = 0  # the last window with enough runs
        self._num_against = 0  # windows in a row that speak against `is_slow`

    def add(self, at_ns: int, is_slow: bool, bytes_per_s: float) -> bool:
        """Take a run that was slow or well; return whether `is_slow` has changed."""
        window = at_ns // WINDOW_NS
        has_changed = window != self._window and self._close()
        self._window = window
        self._runs.append(is_slow)
        if is_slow and not self.is_slow:
            self.bytes_per_s = max(self.bytes_per_s, bytes_per_s)
        return has_changed

    def _close(self) -> bool:
        """Judge the window that is over; return whether `is_slow` has changed."""
        runs, self._runs = self._runs, []
        if len(runs) < LEAST_RUNS:
            return False
        if self._window - self._judged > FORGET_WINDOWS:
            self._num_against = 0
        self._judged = self._window
        self._num_against = self._num_against + 1 if all(runs) != self.is_slow else 0
        if self._num_against == NUM_WINDOWS:
            self.is_slow, self._num_against = not self.is_slow, 0
            return True
        if not self.is_slow and not self._num_against:
            self.bytes_per_s = 0.0
        return False


class _Run:
    """A run of frames that followed each other without a pause; only frames that were waited for count.

    Attributes:
        expected_ns: the time that the frames take at the measured speed.
        least_ns, most_ns: the bounds of the time that they took.
    """

    def __init__(self) -> None:
        self.expected_ns = self.least_ns = self.most_ns = 0


class _Hop:
    """A link from one stage to the next stage, which is on another host.

    Args:
        speed: bytes per second, as measured.
        token_bytes: bytes that cross the link for each token.

    Attributes:
        verdict: whether the link is slow.
        spare_ns: time that a run may take besides `SLOWNESS` times its expected time, without being slow.
        fuzz_ns: the most by which the clocks of the two ends may wrongly shorten or lengthen a time. It is
            twice the sum of both clocks' errors: the latency of the probes has such an error, too.
    """

    def __init__(self, speed: float, token_bytes: int) -> None:
        self.verdict = _Verdict()
        self.spare_ns = self.fuzz_ns = 0
        self._speed = speed
        self._token_ns = 1e9 * token_bytes / max(speed, 1.0)
        self._sent: dict[int, _Passage] = {}  # by step, those whose arrival was not reported yet
        self._arrived: dict[int, _Passage] = {}  # by step, those whose sending was not reported yet
        self._latencies: deque[int] = deque(maxlen=NUM_PROBES)
        self._run = _Run()
        self._free_ns = 0  # when the last frame had arrived, or was taken by a busy receiver
        self._is_exact = False  # whether the receiver waited for it: then it arrived at `_free_ns`

    def note(self, sent: Sequence[_Passage], arrived: Sequence[_Passage]) -> bool:
        """Take the passages at both ends; return whether the verdict has changed."""
        self._sent |= {passage.step: passage for passage in sent}
        self._arrived |= {passage.step: passage for passage in arrived}
        common = sorted(self._sent.keys() & self._arrived.keys())
        changes = [self._cross(self._sent[step], self._arrived[step]) for step in common]
        if common:
            self._sent = {step: each for step, each in self._sent.items() if step > common[-1]}
            self._arrived = {step: each for step, each in self._arrived.items() if step > common[-1]}
        return any(changes)

    def _cross(self, sent: _Passage, arrived: _Passage) -> bool:
        """Take a frame that has crossed; return whether the verdict has changed."""
        at_ns, has_changed = arrived.arrived_ns, False
        if sent.num_tokens == 0:
            self._latencies.append(at_ns - sent.sent_ns)
        elif self._latencies:
            earliest_ns = sent.sent_ns + min(self._latencies)
            latest_ns = sent.sent_ns + max(self._latencies)
            run = self._run
            if earliest_ns > self._free_ns:  # the wire was idle
                has_changed = self._end_run()
                run = self._run
            is_awaited = arrived.waited_ns >= LEAST_WAIT_NS
            if is_awaited:
                run.expected_ns += round(sent.num_tokens * self._token_ns)
                run.least_ns += max(0, at_ns - max(latest_ns, self._free_ns))
                run.most_ns += at_ns - (max(earliest_ns, self._free_ns) if self._is_exact else earliest_ns)
            self._free_ns, self._is_exact = max(self._free_ns, at_ns), is_awaited
            if run.expected_ns > LONG_RUN * self.spare_ns:
                has_changed |= self._end_run()
        return has_changed

    def _end_run(self) -> bool:
        """Judge the run, and begin another; return whether the verdict has changed."""
        run, self._run = self._run, _Run()
        is_slow = run.least_ns > SLOWNESS * run.expected_ns + self.spare_ns
        is_well = run.most_ns + self.fuzz_ns <= SLOWNESS * run.expected_ns
        if run.expected_ns < LEAST_NS or is_slow == is_well:
            return False
        bytes_per_s = self._speed * run.expected_ns / max(run.least_ns, 1)
        return self.verdict.add(self._free_ns, is_slow, bytes_per_s)


class _WatchedLink(NamedTuple):
    """The facts about a watched link; what was learnt about the link holds as long as they stay the same.

    Attributes:
        sender, receiver: names of the hosts of the two stages.
        link: the network path between these hosts, as measured.
        token_bytes: bytes that cross for each token.
    """

    sender: str
    receiver: str
    link: HostLink
    token_bytes: int

    def begin(self) -> _Hop:
        """Return a hop for this link, about which nothing is learnt yet."""
        return _Hop(self.link.bytes_per_s(self.sender), self.token_bytes)


class LinkWatch:
    """Watches the links of one pipe that lead to another host, and judges whether they are slow."""

    def __init__(self) -> None:
        self._hops: dict[int, tuple[_Hop, _WatchedLink]] = {}  # by the stage that sends
        self._hosts = PipeHosts()
        self._newest: dict[int, int] = {}  # by stage: the last step of the newest report that was taken

    def lay(self, hosts: PipeHosts) -> None:
        """Set the hosts that the stages run on.

        What was learnt about a link between two stages is kept if its hosts, its measurements and the bytes
        of a token are as before.
        """
        known, self._hops, self._hosts = self._hops, {}, hosts
        by_hosts = {frozenset(link.hosts): link for link in hosts.links}
        for stage, (sender, receiver) in enumerate(pairwise(hosts.stages)):
            link = by_hosts.get(frozenset((sender, receiver)))
            if link is None or sender == receiver:
                continue
            watched = _WatchedLink(sender, receiver, link, hosts.token_bytes)
            is_known = stage in known and known[stage][1] == watched
            self._hops[stage] = known[stage] if is_known else (watched.begin(), watched)
        for stage, (hop, watched) in self._hops.items():
            hop.fuzz_ns = 2 * sum(hosts.clock_of(end).error_ns for end in (stage, stage + 1))
            hop.spare_ns = SPARE_NS + hop.fuzz_ns + round(SPARE_TRIPS * 1e9 * watched.link.round_trip_s)

    @property
    def slow(self) -> dict[tuple[str, str], float]:
        """The bytes per second that slow links carry, by the hosts of sender and receiver."""
        return {
            (watched.sender, watched.receiver): hop.verdict.bytes_per_s
            for hop, watched in self._hops.values()
            if hop.verdict.is_slow
        }

    def follow(self, reports: Sequence[StageSpans]) -> list[LinkJudged]:
        """Learn from the stages' reports, and return the links that have become slow, or are well again.

        Args:
            reports: reports with times of one clock; those that were taken before are skipped.
        """
        passages = self._new_passages(reports)
        judged = []
        for stage, (hop, watched) in self._hops.items():
            if not hop.note(passages.get(stage, []), passages.get(stage + 1, [])):
                continue
            judged.append(
                LinkJudged(
                    sender=watched.sender,
                    receiver=watched.receiver,
                    is_slow=hop.verdict.is_slow,
                    bytes_per_s=hop.verdict.bytes_per_s,
                    measured_bytes_per_s=watched.link.bytes_per_s(watched.sender),
                )
            )
        return judged

    def _new_passages(self, reports: Sequence[StageSpans]) -> dict[int, list[_Passage]]:
        """Return, by stage, the new passages through stages at the ends of watched links."""
        ends = {end for stage in self._hops for end in (stage, stage + 1)}
        known = {clock.host for clock in self._hosts.clocks}
        passages: dict[int, list[_Passage]] = {}
        for report in reports:
            stage, steps = report.stage, report.steps
            if stage not in ends or not steps or steps[-1][1] <= self._newest.get(stage, -1):
                continue
            self._newest[stage] = steps[-1][1]
            if len(steps) <= MAX_STEPS and self._hosts.stages[stage] in known:
                passages.setdefault(stage, []).extend(passages_of(report))
        return passages
