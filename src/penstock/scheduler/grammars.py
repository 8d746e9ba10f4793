"""Tracks which grammars of structured output the last stage has built, and which rows wait for one [DR5].

    plan n       a row enters, of grammar 7 (`NewRow.grammar`)    the last stage begins to build it
    plan n + 1   the row's prompt, but for the last token         other rows go on
    report       7 is built, by all ranks of the last stage       (`batch.GrammarsBuilt`)
    plan n + 4   the last token of the prompt: the step samples the row

To build a grammar is to compile it for the sampler. No step ever waits for a build. The token that is held
back is the last one known, so that the rest of the prompt is computed meanwhile. If there is no other token,
the row enters without any. If the grammar is built already, nothing is held back, and the row loses no step.
Plans follow from the order of requests, results and reports, and from nothing else: ranks build and drop the
grammars that plans name.

Each grammar has a number, which is never used again. A built grammar that no row uses any more is kept for
later requests, within bounds on their number and bytes (`GrammarBuilds`); the longest unused is dropped
first. A grammar whose last row goes while it is being built is dropped at once. When ranks are lost, all
grammars are forgotten: the rows enter again, and grammars get new numbers. No torch, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.batch import NO_GRAMMAR, BuiltGrammar
from penstock.request import StructuredOutputs
from penstock.scheduler.queues import RequestState

MAX_UNUSED = 64  # grammars that are kept although no row has them

# The memory of a grammar on a rank (llguidance 1.9, measured): up to 120 bytes for each byte of the grammar's
# text when it is built, and later what matching adds, which works out its patterns step by step.
BYTES_PER_BYTE = 128
BYTES_AT_LEAST = 1 << 20  # more than most grammars ever take


@dataclass(slots=True, kw_only=True, eq=False)
class _Grammar:
    """A grammar that the last stage builds, has built, or keeps for later requests.

    Attributes:
        key: what the request asked for, encoded; equal keys share a grammar.
        num_bytes: the estimated memory that it takes on a rank.
        rows: requests that hold a row with it.
    """

    number: int
    key: bytes
    num_bytes: int
    is_built: bool = False
    rows: list[RequestState] = field(default_factory=list)


class GrammarBuilds:
    """The scheduler's record of the grammars of structured output that the last stage holds or builds.

    Args:
        max_bytes: most bytes, as estimated, of all grammars on a rank of the last stage. A grammar that is
            larger is used while no running request uses another.
        max_unused: most grammars that are kept for later requests while no running request uses them.
    """

    def __init__(self, max_bytes: int, max_unused: int = MAX_UNUSED) -> None:
        self._max_bytes, self._max_unused = max_bytes, max_unused
        self._known: dict[bytes, _Grammar] = {}  # by `key`; of the unused ones the longest unused comes first
        self._by_number: dict[int, _Grammar] = {}
        self._dropped: list[int] = []  # numbers of dropped grammars that no plan has announced yet
        self._next_number = 0

    @property
    def is_any_awaited(self) -> bool:
        """Whether a running request waits until the last stage has built its grammar."""
        return any(grammar.rows and not grammar.is_built for grammar in self._known.values())

    def is_built(self, request: RequestState) -> bool:
        """Return whether the request, if it started now, could be sampled without waiting for its grammar.

        That is so if the last stage has built the grammar, or if the request needs none.
        """
        structured = _wanted(request)
        if structured is None:
            return True
        grammar = self._known.get(_key(structured))
        return grammar is not None and grammar.is_built

    def has_room(self, request: RequestState) -> bool:
        """Return whether the request's grammar fits beside the grammars of running requests, by its bytes.

        It fits if the request has none. A grammar that is too large fits while no running request uses
        another, so that every request can start in the end.
        """
        structured = _wanted(request)
        if structured is None or not (in_use := [known for known in self._known.values() if known.rows]):
            return True
        key = _key(structured)
        others = sum(known.num_bytes for known in in_use if known.key != key)
        return others == 0 or others + _estimated(key) <= self._max_bytes

    def is_kept_by_older(self, request: RequestState, arrival: int) -> bool:
        """Return whether the request can start without taking room for a further grammar.

        It can if it has no grammar, or if a running request uses the same grammar and arrived before the one
        with number `arrival`.
        """
        structured = _wanted(request)
        if structured is None:
            return True
        grammar = self._known.get(_key(structured))
        return grammar is not None and any(row.arrival < arrival for row in grammar.rows)

    def enter(self, request: RequestState) -> int:
        """Register a request that starts to run, and return the number of its grammar.

        The number is `NO_GRAMMAR` if the request needs none. If the last stage has not built the grammar, the
        request is marked as waiting for it. Unused grammars beyond the bounds are dropped.
        """
        structured = _wanted(request)
        if structured is None:
            return NO_GRAMMAR
        key = _key(structured)
        grammar = self._known.pop(key, None)
        if grammar is None:
            grammar = _Grammar(number=self._next_number, key=key, num_bytes=_estimated(key))
            self._by_number[grammar.number] = grammar
            self._next_number += 1
        self._known[key] = grammar
        grammar.rows.append(request)
        request.grammar, request.awaits_grammar = grammar.number, not grammar.is_built
        self._drop_unused()
        return grammar.number

    def leave(self, request: RequestState) -> None:
        """Release the grammar of a request that no longer runs.

        If no other running request uses the grammar, it is dropped. A built one is kept for later requests
        instead, within the bounds.
        """
        if request.grammar == NO_GRAMMAR:
            return
        grammar = self._by_number[request.grammar]
        request.grammar, request.awaits_grammar = NO_GRAMMAR, False
        grammar.rows.remove(request)
        if not grammar.rows:
            self._leave_unused(grammar)

    def settle(self, reports: Iterable[BuiltGrammar]) -> list[tuple[RequestState, BuiltGrammar]]:
        """Apply reports of the last stage: requests whose grammar is built may be sampled from now on.

        Returns:
            The requests whose grammar cannot be built there, with the reports that say why. They have to end;
            a later request for the same grammar tries again.
        """
        failed = []
        for report in reports:
            grammar = self._by_number.get(report.number)
            if grammar is None:  # it was dropped meanwhile
                continue
            if report.why:
                failed += [(request, report) for request in grammar.rows]
            else:
                grammar.is_built = True
                for request in grammar.rows:
                    request.awaits_grammar = False
        return failed

    def take_dropped(self) -> list[int]:
        """Return the numbers of the grammars dropped since the last call, which the next plan announces."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def forget_all(self) -> None:
        """Forget all grammars, since the ranks have forgotten them and no request has a row."""
        for grammar in self._known.values():
            for request in grammar.rows:
                request.grammar, request.awaits_grammar = NO_GRAMMAR, False
        self._known.clear()
        self._by_number.clear()
        self._dropped.clear()

    def check_invariants(self, running: Sequence[RequestState]) -> None:
        assert list(self._by_number.values()) == sorted(self._known.values(), key=lambda known: known.number)
        for grammar in self._known.values():
            assert grammar.rows or grammar.is_built, "no request needs this grammar"
            for request in grammar.rows:
                assert (request.grammar, request.awaits_grammar) == (grammar.number, not grammar.is_built)
        held = [request.arrival for grammar in self._known.values() for request in grammar.rows]
        with_grammar = [request.arrival for request in running if request.grammar != NO_GRAMMAR]
        assert sorted(held) == with_grammar, "a grammar is held without a row"

    def _leave_unused(self, grammar: _Grammar) -> None:
        """Drop a grammar whose last row has gone, or keep it for later requests if it is built."""
        if not grammar.is_built:
            self._drop(grammar)
            return
        self._known[grammar.key] = self._known.pop(grammar.key)  # the newest now
        self._drop_unused()

    def _drop_unused(self) -> None:
        """Drop the longest unused grammars, as many as exceed the bounds."""
        unused = [grammar for grammar in self._known.values() if not grammar.rows]
        num_bytes = sum(grammar.num_bytes for grammar in self._known.values())
        num_kept = len(unused)
        for grammar in unused:
            if num_kept <= self._max_unused and num_bytes <= self._max_bytes:
                return
            self._drop(grammar)
            num_kept -= 1
            num_bytes -= grammar.num_bytes

    def _drop(self, grammar: _Grammar) -> None:
        del self._known[grammar.key], self._by_number[grammar.number]
        self._dropped.append(grammar.number)


def _wanted(request: RequestState) -> StructuredOutputs | None:
    """Return what constrains the request's samples, or None if no further token is to be sampled."""
    return request.sampling.structured if len(request.token_ids) < request.max_len else None


def _key(structured: StructuredOutputs) -> bytes:
    return msgspec.msgpack.encode(structured)


def _estimated(key: bytes) -> int:
    """Return the estimated bytes that a grammar takes on a rank."""
    return BYTES_AT_LEAST + BYTES_PER_BYTE * len(key)
