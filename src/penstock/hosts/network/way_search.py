"""Searches for ways (network paths) between hosts in a thread, while the supervisor goes on with its work.

    supervisor's thread                                thread of the search
      find(one, other) ──────────── pair ────────────▶ PathFinder.find
      attend()         ◀── question to a host ──────── HostLine.tell
         host.tell ──▶ wire      wire ──▶ host.pump ──▶ HostLine.pump_until
         tell, warn    ◀────────── lines ──────────────
      is_settled(hosts)

A search takes seconds if a host does not answer. Only the supervisor's thread may use wires and reporters.
The thread of the search therefore leaves questions, lines for the user and its results for the supervisor's
thread, and rings a bell. Connections wait until the search between their hosts is settled (`Routes`), but at
most `PATIENCE_S`. Used by `hosts.gathering`.
"""

from __future__ import annotations

import itertools
import queue
import select
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.errors import describe
from penstock.hosts.bell import Bell
from penstock.hosts.network.path_finding import PathFinder, Tell
from penstock.hosts.network.remote_scout import RemoteScout
from penstock.hosts.network.routes import Route
from penstock.hosts.network.scout import Scout
from penstock.hosts.network.scout_messages import FromScout
from penstock.process.config import HostLink
from penstock.process.readiness import Waitable
from penstock.trust.peer_names import PeerName

PATIENCE_S = 5.0  # the longest wait for a search: running requests wait too, and a known way may still work
_REVIEW, _FIND, _END = range(3)  # in this order: running requests may wait for a review, and not for `find`


class HostElsewhere(Protocol):
    """The part of another host that a search for network paths uses (`hosts.remote_host.RemoteHost`).

    Attributes:
        name: name of the host.
        numbers: numbers for questions.
        scout_answers: answers that were not taken yet, by the number of the question.
        wires: the connection to the host; empty when it is broken, and another one when the host is back.
    """

    name: str
    scout_answers: dict[int, FromScout]

    @property
    def numbers(self) -> Iterator[int]: ...

    @property
    def wires(self) -> Collection[Waitable]: ...

    def tell(self, message: msgspec.Struct) -> None: ...

    def attend(self) -> None: ...


class HostLine:
    """The line on which the search's thread asks a host; the supervisor's thread passes the messages on.

    Implements `AskedHost`.
    """

    def __init__(self, search: WaySearch, host: HostElsewhere) -> None:
        self.name = host.name
        self.numbers = host.numbers
        self.scout_answers = host.scout_answers
        self._search = search
        self._host = host
        self._asked_over: list[Waitable] = []

    @property
    def is_there(self) -> bool:
        """Whether the host can still answer what it was asked last."""
        is_same = bool(self._asked_over) and list(self._host.wires) == self._asked_over
        return is_same and not self._search.is_closed

    def tell(self, message: msgspec.Struct) -> None:
        self._asked_over = list(self._host.wires)
        self._search.pass_on(self._host, message)

    def pump_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        self._search.wait_until(lambda: condition() or not self.is_there, timeout_s)
        return condition()


class _Jobs:
    """The searches that have begun and have not ended; the search's thread calls `get` and `end`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[frozenset[str], float]] = {}  # by number: hosts, and when begun
        self._queue: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def begin(self, order: int, names: Collection[str], job: Callable[[], None]) -> None:
        number = next(self._numbers)
        self._open[number] = frozenset(names), self._clock()
        self._queue.put((order, number, job))

    def close(self) -> None:
        """Let the thread end after the searches that have begun."""
        self._queue.put((_END, 0, None))

    def get(self) -> tuple[int, Callable[[], None] | None]:
        _, number, job = self._queue.get()
        return number, job

    def end(self, number: int) -> None:
        self._ended.put(number)

    def note_ends(self) -> bool:
        """Remove the searches that have ended; return whether there were any."""
        num_before = len(self._open)
        while not self._ended.empty():
            del self._open[self._ended.get()]
        return len(self._open) < num_before

    @property
    def is_idle(self) -> bool:
        return not self._open

    def is_awaited(self, names: Collection[str]) -> bool:
        """Return whether a search between two of these hosts goes on, and not for too long."""
        too_old = self._clock() - PATIENCE_S
        return any(
            begun_at > too_old and len(hosts.intersection(names)) > 1
            for hosts, begun_at in self._open.values()
        )


class WaySearch:
    """Knows the network paths between the hosts of an engine, and searches for them. Implements `Routes`.

    Only the supervisor's thread may call it, except for `pass_on` and `wait_until`.

    Args:
        directory: directory in which measured speeds are kept.
        tell: shows the user a line of text.
        warn: shows the user a warning.
        clock: monotonic seconds.

    Attributes:
        is_closed: no host is asked any more.

    Raises:
        UsageError: the directory cannot be used.
    """

    def __init__(
        self, directory: Path, tell: Tell, warn: Tell, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_closed = False
        self._tell = tell
        self._lines: queue.SimpleQueue[tuple[Tell, str]] = queue.SimpleQueue()
        self._finder = PathFinder(
            directory,
            lambda text: self._lines.put((tell, text)),
            lambda text: self._lines.put((warn, text)),
        )
        self._questions: queue.SimpleQueue[tuple[HostElsewhere, msgspec.Struct]] = queue.SimpleQueue()
        self._links: Sequence[HostLink] = ()  # as of the last time when no search was under way
        self._asked: set[HostElsewhere] = set()  # hosts that were sent questions of searches under way
        self._heard: set[Waitable] = set()  # the wires of these hosts
        self._jobs = _Jobs(clock)
        self._occasions: set[Hashable] = set()
        self._bell = Bell()
        self._sources = select.epoll()
        self._sources.register(self._bell.fileno(), select.EPOLLIN)
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="way search", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor, readable when `attend` has something to do."""
        return self._sources.fileno()

    def scout_of(self, host: HostElsewhere, peer: PeerName) -> Scout:
        """Return the stand-in for another host's scout, to be given to `find`.

        Args:
            peer: name of the host's agent.
        """
        return RemoteScout(HostLine(self, host), peer)

    def find(self, one: Scout, other: Scout) -> None:
        """Begin to search for the best network path between two hosts; the thread of the search does it."""
        names = (one.peer.host, other.peer.host)
        self._jobs.begin(_FIND, names, lambda: self._finder.find(one, other))

    def attend(self) -> None:
        """Send the search's questions to hosts, take in the answers, and show its lines to the user.

        To be called when `fileno` is readable, and each second as well.
        """
        self._bell.hush()
        while not self._questions.empty():
            host, question = self._questions.get()
            host.tell(question)
            self._asked.add(host)
        for host in self._asked:
            host.attend()
        with self._news:
            self._news.notify_all()
        has_any_ended = self._jobs.note_ends()  # before the lines: those of a search are shown before its end
        while not self._lines.empty():
            give, text = self._lines.get()
            give(text)
        if has_any_ended and self.is_idle:
            self._links = self._finder.links()
        if self.is_idle:
            self._asked.clear()
        self._listen_to({wire for host in self._asked for wire in host.wires})

    @property
    def is_idle(self) -> bool:
        """Whether no network path between any hosts is being searched for."""
        return self._jobs.is_idle

    def is_settled(self, names: Collection[str]) -> bool:
        """Return whether no search between these hosts is under way, other than one that takes too long.

        Implements `Routes.is_settled`.
        """
        return not self._jobs.is_awaited(names)

    def between(self, accepting: str, joining: str) -> Route:
        """Return the route of a connection, over the network path in use if there is one.

        Implements `Routes.between`.
        """
        return self._finder.between(accepting, joining)

    def links(self) -> Sequence[HostLink]:
        """Return what was measured of the network paths in use, as of when no search was under way.

        Implements `Routes.links`.
        """
        return self._links

    def review(self, occasion: Hashable, names: Collection[str]) -> bool:
        """Begin to check the network paths between these hosts; return whether the check has ended.

        The first call for an `occasion`, such as an epoch, begins it; further calls only ask.

        Implements `Routes.review`.
        """
        if occasion not in self._occasions:
            self._occasions.add(occasion)
            self._jobs.begin(_REVIEW, names, lambda: self._finder.review(names))
        return self.is_settled(names)

    def close(self) -> None:
        """End all searches and their thread; wait some seconds if this host itself is just measuring.

        Searches that have not begun are dropped, and other hosts are asked no more.
        """
        self.is_closed = True
        self._jobs.close()
        with self._news:
            self._news.notify_all()
        self._thread.join()
        self._sources.close()
        self._bell.close()

    def pass_on(self, host: HostElsewhere, message: msgspec.Struct) -> None:
        """Leave a message to a host for the supervisor's thread, which sends it in `attend`."""
        self._questions.put((host, message))
        self._bell.ring()

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `condition` holds, for `timeout_s` at most; it is checked after each `attend`."""
        with self._news:
            self._news.wait_for(condition, timeout_s)

    def _run(self) -> None:
        while True:
            number, job = self._jobs.get()
            if job is None:
                return
            try:
                if not self.is_closed:
                    job()
            except Exception as error:  # the search must end as such, since connections wait for its end
                self._lines.put((self._tell, f"paths were not searched: {describe(error).message}"))
            self._jobs.end(number)
            self._bell.ring()

    def _listen_to(self, wires: set[Waitable]) -> None:
        """Let `fileno` be readable also when something comes over these wires, and over no other wires.

        Broken wires are not among them, since they would be readable for ever.
        """
        for wire in self._heard - wires:
            if wire.fileno() >= 0:  # the kernel has removed a closed one already
                self._sources.unregister(wire.fileno())
        for wire in wires - self._heard:
            self._sources.register(wire.fileno(), select.EPOLLIN)
        self._heard = wires
