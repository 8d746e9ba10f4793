"""Requests that come to a server over two hosts at times of their own, while it loses its worker's host again
and again.

What is lost is chosen in turns of `host_faults.FAULTS`, and each time it is back before the next loss. The
tokens of a request depend on nobody else, so that they are compared with those of an undisturbed run, however
that was timed.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from host_faults import FAULTS, NOTICED_LIMIT_S, Fault, Hosts
from namespaces import CommandFailedError
from penstock.workloads.traces import TraceRow
from served_hosts import HostClient, PairServer

HOST_FAULTS = tuple(
    fault
    for name in ("kill -9 of the worker", "SIGSTOP of the worker's host", "RST of all connections")
    for fault in FAULTS
    if fault.name == name
)
INPUT_SCALE = 16  # by which prompts of a trace are shorter
_MAX_AT_ONCE = 256  # threads of the client


class Timed(NamedTuple):
    """A request of a run.

    Attributes:
        arrival_s: after its begin.
        num_output: ids that it asks for.
    """

    arrival_s: float
    prompt: list[int]
    num_output: int


class Answer(NamedTuple):
    """What has come of a request.

    Attributes:
        ids: all of them, or those before an error.
        error: why it has failed; "": it has not.
        pause_s: the longest time between two of its tokens.
        late_s: until the first one.
    """

    ids: list[int]
    error: str = ""
    pause_s: float = 0.0
    late_s: float = 0.0


class Comparison(NamedTuple):
    """A disturbed run against an undisturbed one.

    Attributes:
        num_lost: requests that have failed, or have not all of their tokens.
        num_other: of the rest, those with other tokens.
        pause_s: the longest time between two tokens of any request.
        late_s: the longest time to a first one.
    """

    num_lost: int
    num_other: int
    pause_s: float
    late_s: float

    @property
    def is_good(self) -> bool:
        return self.num_lost == 0 and self.num_other == 0


def shaped(
    rows: Sequence[TraceRow],
    stretch: float,
    *,
    ids: Sequence[int],
    seed: int,
    output_scale: int,
    most: tuple[int, int],
) -> list[Timed]:
    """Return requests of random ids whose lengths and times are those of a trace, scaled.

    Args:
        stretch: of the times; prompts are a sixteenth as long.
        most: tokens of a prompt, of an answer.
    """
    chosen = random.Random(seed)
    most_input, most_output = most
    return [
        Timed(
            arrival_s=stretch * row.arrival_s,
            prompt=chosen.choices(ids, k=_scaled(row.input_len, INPUT_SCALE, most_input)),
            num_output=_scaled(row.output_len, output_scale, most_output),
        )
        for row in rows
    ]


def _scaled(length: int, scale: int, most: int) -> int:
    return min(most, max(1, length // scale))


def play(client: HostClient, requests: Sequence[Timed], at_once: int = _MAX_AT_ONCE) -> list[Answer]:
    """Ask each request at its time, so many at once at most, and return their answers, in order."""
    began = time.monotonic()

    def answered(request: Timed) -> Answer:
        time.sleep(max(0.0, began + request.arrival_s - time.monotonic()))
        return _answer(client, request)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(answered, requests))


def _answer(client: HostClient, request: Timed) -> Answer:
    ids: list[int] = []
    asked_at = came_at = time.monotonic()
    pause_s = late_s = 0.0
    try:
        for arrival in client.stream([request.prompt], request.num_output):
            if arrival.ids and ids:
                pause_s = max(pause_s, arrival.at - came_at)
            elif arrival.ids:
                late_s = arrival.at - asked_at
            came_at = arrival.at if arrival.ids else came_at
            ids += arrival.ids
    except (AssertionError, OSError, ValueError) as error:
        return Answer(ids, f"{type(error).__name__}: {error}", pause_s, late_s)
    return Answer(ids, "", pause_s, late_s)


def compared(requests: Sequence[Timed], answers: Sequence[Answer], expected: Sequence[Answer]) -> Comparison:
    """Compare the answers of a disturbed run with those of an undisturbed one."""
    num_lost = num_other = 0
    for request, answer, right in zip(requests, answers, expected, strict=True):
        if answer.error or len(answer.ids) < request.num_output:
            num_lost += 1
        elif answer.ids != right.ids:
            num_other += 1
    return Comparison(
        num_lost=num_lost,
        num_other=num_other,
        pause_s=max((answer.pause_s for answer in answers), default=0.0),
        late_s=max((answer.late_s for answer in answers), default=0.0),
    )


class HostLosses:
    """Loses the worker's host every so many seconds while the body of a `with` runs.

    For half of that time at least nothing happens: a request that gains nothing between two losses counts as
    their reason, and ends. A loss that takes long to be made good puts the next one off. After the body the
    last one is made good.

    Attributes:
        struck: names of the faults so far.
        troubles: what did not go as it should: a loss that nobody noticed or that was not made good.
    """

    def __init__(
        self, server: PairServer, hosts: Hosts, every_s: float, faults: Sequence[Fault] = HOST_FAULTS
    ) -> None:
        self.struck: list[str] = []
        self.troubles: list[str] = []
        self._server, self._hosts = server, hosts
        self._every_s = every_s
        self._faults = itertools.cycle(faults)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> HostLosses:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        next_at = time.monotonic() + self._every_s
        while not self._is_over.wait(max(0.0, next_at - time.monotonic())):
            self._lose(next(self._faults))
            next_at = max(next_at + self._every_s, time.monotonic() + self._every_s / 2)

    def _lose(self, fault: Fault) -> None:
        """Let one fault happen, and wait until a step has crossed the pipe again."""
        first = len(self._server.head.lines)
        self.struck.append(fault.name)
        try:
            fault.strike(self._server, self._hosts)
            self._server.await_event("recovered", NOTICED_LIMIT_S, first)
        except (AssertionError, CommandFailedError, IndexError, OSError) as error:
            self.troubles.append(f"{fault.name}: {error}")
