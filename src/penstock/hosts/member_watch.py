"""Watches all members of an engine, its processes on all hosts: one place to wait for news of any of them."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Collection, Sequence

from penstock.errors import ErrorInfo
from penstock.executor.base import first_cause
from penstock.hosts.member import Member
from penstock.process.child import StatusEvent
from penstock.process.readiness import Waitable

CAUSE_GRACE_S = 0.5  # so long a stage that caused the end of another process has to report its failure
POLL_S = 0.01


class MemberWatch:
    """A watch that waits for news of members, the processes of an engine, reads their reports and ends them.

    It also waits for other objects that can be polled.

    Args:
        take: called by `hear` with each event that a member has reported.
    """

    def __init__(self, take: Callable[[Member, StatusEvent], None]) -> None:
        self._take = take
        self._selector = selectors.DefaultSelector()
        self._sources: dict[Member, set[Waitable]] = {}  # for each member that has not been reaped
        self._watched: set[Waitable] = set()

    @property
    def members(self) -> list[Member]:
        """The members that were added and have not been reaped."""
        return list(self._sources)

    def add(self, member: Member) -> Member:
        self._sources[member] = set()
        self._listen(member, member.sources)
        return member

    def watch(self, source: Waitable) -> None:
        """Let `wait` also return when `source`, an object with a descriptor, is readable."""
        self._watched.add(source)
        self._selector.register(source, selectors.EVENT_READ)

    def unwatch(self, source: Waitable) -> None:
        self._watched.discard(source)
        self._selector.unregister(source)

    def wait(self, timeout_s: float | None) -> tuple[set[Member], set[Waitable]]:
        """Wait for news, for `timeout_s` at most; None: without a limit.

        Returns:
            The members with news, and the objects given to `watch` that are readable.
        """
        readable = {key.fileobj for key, _ in self._selector.select(timeout_s)}
        members = {member for member, sources in self._sources.items() if not readable.isdisjoint(sources)}
        return members, {source for source in self._watched if source in readable}

    def hear(self, member: Member) -> None:
        """Read the events that a member has reported, and give each one to `take`.

        If `take` fails, the remaining events are dropped. If the member runs on this host, the error is
        raised; if it runs on another one, that host is given up as lost.
        """
        events = member.read_status()
        self._listen(member, member.sources)
        try:
            for event in events:
                self._take(member, event)
        except Exception as error:
            member.disown(error)
            self._listen(member, member.sources)

    def hear_until(self, condition: Callable[[], object], timeout_s: float) -> None:
        """Read the events of all members repeatedly until the condition holds, for `timeout_s` at most."""
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline:
            time.sleep(POLL_S)
            for member in self.members:
                self.hear(member)

    def first_cause(self, ended: Member, suspects: Sequence[Member]) -> ErrorInfo:
        """Return the error that explains the end of a member: its own, or that of a stage that is the cause.

        If the member may not be the cause itself, this waits a moment for a stage that reports a failure.

        Args:
            ended: the member that has ended.
            suspects: members that may have caused the end, with `ended` itself.
        """
        if not ended.is_cause or (ended.stage is None and ended.failure is not None):
            stages = [member for member in suspects if member.stage is not None]
            self.hear_until(lambda: any(stage.is_cause for stage in stages), CAUSE_GRACE_S)
        guilty = [member for member in suspects if member.has_failed]
        guilty = [member for member in guilty if member is ended or member.stage is not None]
        return first_cause([member.end() for member in guilty or [ended]])

    def reap(self, member: Member) -> None:
        """Stop watching a member that has ended, and close it."""
        # Its sources are dropped before it is closed: their numbers may go to other files at once.
        self._listen(member, ())
        member.close()
        del self._sources[member]

    def kill(self) -> None:
        """Kill all members at once and reap them; `take` does not get their last events."""
        for member in self.members:
            member.kill_now()
        for member in self.members:
            # Its reports are read before it is reaped, since `failure` would be lost otherwise.
            member.read_status()
            self.reap(member)

    def close(self) -> None:
        self.kill()
        self._selector.close()

    def _listen(self, member: Member, sources: Collection[Waitable]) -> None:
        """Poll these sources of a member, and no other sources of it; members may share a source."""
        before, now = self._sources[member], set(sources)
        if before == now:
            return
        others = set().union(*(own for other, own in self._sources.items() if other is not member))
        self._sources[member] = now
        for source in before - now - others:
            self._selector.unregister(source)
        for source in now - before - others:
            self._selector.register(source, selectors.EVENT_READ)
