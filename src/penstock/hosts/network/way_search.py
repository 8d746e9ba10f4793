"""Looks for ways between hosts in a thread, while the supervisor goes on with its work.

    supervisor's thread                                thread of the search
      find(one, other) ──────────── pair ────────────▶ PathFinder.find
      attend()         ◀── question to a host ──────── HostLine.tell
         host.tell ──▶ wire      wire ──▶ host.pump ──▶ HostLine.pump_until
         tell, warn    ◀────────── lines ──────────────
      is_settled

A search takes seconds where a host does not answer. Wires and reporters belong to the supervisor's thread:
questions, lines for the user and the end of a search are left for it, and a bell rings. Connections wait
until the search is settled (`Routes`). Used by `hosts.gathering`.
"""

from __future__ import annotations

import contextlib
import queue
import select
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.errors import describe
from penstock.hosts.bell import Bell
from penstock.hosts.member import Waitable
from penstock.hosts.network.path_finding import PathFinder, Tell
from penstock.hosts.network.remote_scout import RemoteScout
from penstock.hosts.network.routes import Route
from penstock.hosts.network.scout import Scout
from penstock.hosts.network.scout_messages import FromScout
from penstock.process.config import HostLink
from penstock.trust.peer_names import PeerName


class HostElsewhere(Protocol):
    """What a search needs of a host elsewhere (`hosts.remote_host.RemoteHost`).

    Attributes:
        name: of the host.
        numbers: for questions.
        scout_answers: by number, those that nobody has taken.
        wires: over which it says something; none when it is lost, and another one when it is back.
    """

    name: str
    numbers: Iterator[int]
    scout_answers: dict[int, FromScout]

    @property
    def wires(self) -> Collection[Waitable]: ...

    def tell(self, message: msgspec.Struct) -> None: ...

    def attend(self) -> None: ...


class HostLine:
    """A host as the thread of the search may ask it: the supervisor passes all on. Implements `AskedHost`."""

    def __init__(self, search: WaySearch, host: HostElsewhere) -> None:
        self.name = host.name
        self.numbers = host.numbers
        self.scout_answers = host.scout_answers
        self._search = search
        self._host = host
        self._asked_over: list[Waitable] = []

    @property
    def is_there(self) -> bool:
        """Whether it can still answer what it was asked last."""
        is_same = bool(self._asked_over) and list(self._host.wires) == self._asked_over
        return is_same and not self._search.is_closed

    def tell(self, message: msgspec.Struct) -> None:
        self._asked_over = list(self._host.wires)
        self._search.pass_on(self._host, message)

    def pump_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        self._search.wait_until(lambda: condition() or not self.is_there, timeout_s)
        return condition()


class WaySearch:
    """The ways between the hosts of an engine, and the search for them. Implements `Routes`.

    All but `pass_on` and `wait_until` is for the supervisor's thread.

    Args:
        directory: where what was measured is kept.
        tell: takes lines for the user.
        warn: takes warnings.

    Attributes:
        is_closed: nobody is asked any more.

    Raises:
        UsageError: the directory cannot be used.
    """

    def __init__(self, directory: Path, tell: Tell, warn: Tell) -> None:
        self.is_closed = False
        self._tell = tell
        self._lines: queue.SimpleQueue[tuple[Tell, str]] = queue.SimpleQueue()
        self._finder = PathFinder(
            directory,
            lambda text: self._lines.put((tell, text)),
            lambda text: self._lines.put((warn, text)),
        )
        self._questions: queue.SimpleQueue[tuple[HostElsewhere, msgspec.Struct]] = queue.SimpleQueue()
        self._links: Sequence[HostLink] = ()  # as of the last time that it was settled
        self._asked: set[HostElsewhere] = set()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._num_open = 0  # jobs
        self._occasions: set[Hashable] = set()
        self._bell = Bell()
        self._sources = select.epoll()
        self._sources.register(self._bell.fileno(), select.EPOLLIN)
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="way search", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Readable when `attend` has something to do."""
        return self._sources.fileno()

    def scout_of(self, host: HostElsewhere, peer: PeerName) -> Scout:
        """Return the scout of a host elsewhere, for `find`."""
        return RemoteScout(HostLine(self, host), peer)

    def find(self, one: Scout, other: Scout) -> None:
        """Begin to look for the best way between two hosts."""
        self._begin(lambda: self._finder.find(one, other))

    def attend(self) -> None:
        """Pass on questions and answers, and what is to be told; to be called each second too."""
        self._bell.hush()
        while not self._questions.empty():
            host, question = self._questions.get()
            host.tell(question)
            self._asked.add(host)
            self._listen_to(host.wires)
        for host in self._asked:
            host.attend()
        with self._news:
            self._news.notify_all()
        while not self._lines.empty():
            give, text = self._lines.get()
            give(text)
        while not self._done.empty():
            self._done.get()
            self._num_open -= 1
            self._links = self._finder.links() if self.is_settled else self._links
        if self.is_settled and self._asked:
            self._listen_to_nobody()

    @property
    def is_settled(self) -> bool:
        """See `Routes.is_settled`."""
        return self._num_open == 0

    def between(self, accepting: str, joining: str) -> Route:
        """See `Routes.between`."""
        return self._finder.between(accepting, joining)

    def links(self) -> Sequence[HostLink]:
        """See `Routes.links`."""
        return self._links

    def review(self, occasion: Hashable) -> bool:
        """See `Routes.review`."""
        if occasion not in self._occasions:
            self._occasions.add(occasion)
            self._begin(self._finder.review)
        return self.is_settled

    def close(self) -> None:
        """End. A way that is just being measured from this host is waited for, some seconds at most."""
        self.is_closed = True
        self._jobs.put(None)
        with self._news:
            self._news.notify_all()
        self._thread.join()
        self._sources.close()
        self._bell.close()

    def pass_on(self, host: HostElsewhere, message: msgspec.Struct) -> None:
        """Have the supervisor's thread send a message to a host."""
        self._questions.put((host, message))
        self._bell.ring()

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait for what the supervisor's thread hears from hosts, for this long at most."""
        with self._news:
            self._news.wait_for(condition, timeout_s)

    def _begin(self, job: Callable[[], None]) -> None:
        self._num_open += 1
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if not self.is_closed:
                    job()
            except Exception as error:  # connections wait for the end of the search, whatever it is
                self._lines.put((self._tell, f"ways were not looked for: {describe(error).message}"))
            self._done.put(True)
            self._bell.ring()

    def _listen_to(self, wires: Collection[Waitable]) -> None:
        """Let `fileno` be readable too when something comes over one of these."""
        for wire in wires:
            with contextlib.suppress(FileExistsError):
                self._sources.register(wire.fileno(), select.EPOLLIN)

    def _listen_to_nobody(self) -> None:
        for wire in [
            wire for host in self._asked for wire in host.wires
        ]:  # one that is closed is out already
            with contextlib.suppress(FileNotFoundError):
                self._sources.unregister(wire.fileno())
        self._asked.clear()
