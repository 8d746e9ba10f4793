"""Chooses the request that starts next: the oldest, unless it needs a grammar and too many are in use.

    rows    a: grammar 1   b: grammar 2            there is room for two grammars
    line    c: grammar 3   d: none   e: grammar 1   f: grammar 4   g: none
    start   d, e, g; c as soon as a or b has ended (and e, if it is a); then f

A request without room keeps its place, and is tried first for every plan. Until it has room, a request behind
it may start only if that takes none of the room. That is so if the later request has no grammar, or the
grammar of a running request that is older than the one without room. Running requests end sooner or later,
so no request waits for ever for a grammar. A request that has room but is short of something else, such as
blocks, holds up those behind it. Called by `scheduler.placement`.
"""

from __future__ import annotations

from penstock.scheduler.grammars import GrammarBuilds
from penstock.scheduler.queues import RequestQueues, RequestState


class StartGate:
    """A gate that can keep new requests from starting; this one is always open.

    Attributes:
        reason: why the gate was shut at the last call of `is_open`; empty if it was open.
    """

    reason = ""

    def is_open(self) -> bool:
        """Return whether new requests may start; here, always. Called for every plan."""
        return True


ALWAYS_OPEN = StartGate()
MAX_PASSED = 64  # requests without room that others pass; a bound on the work for one plan


class StartOrder:
    """Chooses the request that starts next.

    Args:
        queues: the queues whose line of waiting and preempted requests is read.
        grammars: says whether the last stage has room for the grammar of a request.
    """

    def __init__(self, queues: RequestQueues, grammars: GrammarBuilds) -> None:
        self._queues = queues
        self._grammars = grammars

    def next_request(self, *, newcomers: bool) -> RequestState | None:
        """Return the request that should start next, or None. It stays in line.

        It is the first in line. If the last stage has no room for the grammar of that one, it is the next
        that needs no further room for a grammar. None if the line has no such request, or if more than
        `MAX_PASSED` stand before it.

        Args:
            newcomers: whether requests may start that have never run; else they are skipped.
        """
        oldest_passed: RequestState | None = None
        num_passed = 0
        for request in self._queues.line():
            if not (newcomers or request.has_started):
                continue
            if self._may_start(request, oldest_passed):
                return request
            if num_passed == MAX_PASSED:
                return None
            num_passed += 1
            oldest_passed = oldest_passed or request
        return None

    def _may_start(self, request: RequestState, oldest_passed: RequestState | None) -> bool:
        if oldest_passed is None:
            return self._grammars.has_room(request)
        return self._grammars.is_kept_by_older(request, oldest_passed.arrival)
