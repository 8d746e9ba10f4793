"""Gets the weights for a worker's ranks, in a thread beside the loop of its agent, which must not wait.

    agent ── seek(7, identity, config) ──▶ one thread, rank after rank ──▶ model_finder
          ◀── bell, take(): 34 % have come, … ; the directory, or why there is none ──┘

A rank of the same stage finds what was fetched for its neighbour. The processes of ranks start meanwhile, and
wait for the directory once they have imported what they need.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from penstock.errors import PeerError, PenstockError
from penstock.hosts.bell import Bell
from penstock.hosts.weights.model_finder import Notes
from penstock.process.child import LoadProgressed
from penstock.process.config import RankConfig
from penstock.process.control import UseModel
from penstock.trust.cancellation import Cancellation, CancelledError

CLOSE_S = 1.0  # so long `close` waits for a thread at a slow disk; it ends with the worker in any case
LINE_S = 5.0  # between two lines for the user about the progress of one rank


class Delivery(NamedTuple):
    """News of a rank's weights: they are there (`UseModel`), on their way, or cannot be had (an error).

    `number` is the agent's number of the rank's process.
    """

    number: int
    news: UseModel | LoadProgressed | PenstockError


class Models(Protocol):
    """The interface with which an agent gets ranks their weights; readable when there is a delivery."""

    def fileno(self) -> int: ...

    def seek(self, number: int, identity: bytes, rank: RankConfig) -> None:
        """Begin to get the weights of a rank; news of them comes with `take`.

        Args:
            number: the agent's number of the rank's process.
            identity: of the head's model (`kvstore.names.model_identity`).
        """
        ...

    def take(self) -> list[Delivery]:
        """Return the news of all ranks' weights since the last call."""
        ...

    def forget(self, number: int) -> None:
        """End the work for a rank whose process has ended; there is no more news of it."""
        ...

    def close(self) -> None:
        """Stop, and give up what is under way."""
        ...


class Find(Protocol):
    """The interface of `ModelFinder.find`, as a function."""

    def __call__(
        self, identity: bytes, rank: RankConfig, notes: Notes, cancellation: Cancellation
    ) -> Path: ...


class _Job(NamedTuple):
    number: int
    identity: bytes
    rank: RankConfig
    cancellation: Cancellation


class ModelSupply:
    """Gets weights in a thread, for one rank after the other. Implements `Models`.

    Args:
        find: finds or fetches the weights of a rank.
        tell: shows the user a line of text, in the thread of the agent.
        clock: monotonic seconds.
    """

    def __init__(
        self, find: Find, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._find = find
        self._tell = tell
        self._clock = clock
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._wanted: dict[int, Cancellation] = {}
        self._news: queue.SimpleQueue[tuple[_Job, Delivery | str]] = queue.SimpleQueue()
        self._bell = Bell()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._bell.fileno()

    def seek(self, number: int, identity: bytes, rank: RankConfig) -> None:
        self._wanted[number] = Cancellation()
        self._jobs.put(_Job(number, identity, rank, self._wanted[number]))

    def take(self) -> list[Delivery]:
        self._bell.hush()
        deliveries = []
        while not self._news.empty():
            job, news = self._news.get()
            if isinstance(news, str):
                self._tell(news)
            elif self._wanted.get(job.number) is job.cancellation:  # otherwise that process has ended
                deliveries.append(news)
        return deliveries

    def forget(self, number: int) -> None:
        cancellation = self._wanted.pop(number, None)
        if cancellation is not None:
            cancellation.cancel()

    def close(self) -> None:
        for number in list(self._wanted):
            self.forget(number)
        self._jobs.put(None)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():  # a living thread may still ring the bell
            self._bell.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                progress = _Progress(job, partial(self._put, job), self._clock)
                path = self._find(job.identity, job.rank, progress, job.cancellation)
            except CancelledError:
                continue
            except PenstockError as error:
                self._put(job, f"{job.rank.name} cannot get its weights: {error}")
                self._put(job, Delivery(job.number, error))
            except Exception as error:  # whatever it is, the rank must not wait for ever
                self._put(job, Delivery(job.number, PeerError(f"its weights cannot be fetched: {error}.")))
            else:
                self._put(job, Delivery(job.number, UseModel(path=str(path), identity=job.identity)))

    def _put(self, job: _Job, news: Delivery | str) -> None:
        self._news.put((job, news))
        self._bell.ring()


class _Progress:
    """The progress of the work for one rank. Implements `Notes`."""

    def __init__(self, job: _Job, put: Callable[[Delivery | str], None], clock: Callable[[], float]) -> None:
        self._job = job
        self._put = put
        self._clock = clock
        self._mutex = threading.Lock()
        self._done = self._total = 0
        self._percent = 0
        self._began_at = self._told_at = clock()

    def begin(self, num_bytes: int) -> None:
        self._total = num_bytes
        self._began_at = self._told_at = self._clock()
        self._put(f"{self._job.rank.name}: fetching {num_bytes / 1e6:.1f} MB from the head")

    def say(self, line: str) -> None:
        self._put(f"{self._job.rank.name}: {line}")

    def add(self, num_bytes: int) -> None:
        with self._mutex:
            self._done += num_bytes
            percent = 100 * self._done // max(1, self._total)
            if percent <= self._percent:
                return
            self._percent = percent
            progress = LoadProgressed(done=self._done, total=self._total, what="fetching")
            self._put(Delivery(self._job.number, progress))
            self._tell()

    def _tell(self) -> None:
        now = self._clock()
        name, megabytes = self._job.rank.name, self._total / 1e6
        if self._done == self._total:
            seconds = max(now - self._began_at, 1e-3)
            self._put(
                f"{name}: fetched {megabytes:.1f} MB in {seconds:.1f} s ({megabytes / seconds:.0f} MB/s)"
            )
        elif now - self._told_at >= LINE_S:
            self._told_at = now
            self._put(f"{name}: fetching, {self._percent} % of {megabytes:.1f} MB received")
