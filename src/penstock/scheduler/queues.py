"""The requests of the core, and the queue that each of them is in.

    add ──▶ waiting ──admit──▶ running ──finish──▶ (forgotten)
                                │    ▲
                         preempt│    │readmit, once no result is pending
                                ▼    │
                              preempted

`RequestState` keeps two clocks apart: what has been *scheduled* (plans issued) and what has *returned*
(results settled). Between them lie the steps in flight:

    position        0 . . . . . . . . . . .
    token_ids       [ prompt ][ returned ]           known to the core
    pending                               [ s s ]    sampled in steps in flight, ids not known yet
    num_scheduled   |<-- KV written or planned -->|

Owned by `scheduler.scheduler`, which alone calls it. Holds no policy, no blocks and no rows table.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from operator import attrgetter

from penstock.batch import NO_GRAMMAR, RowSampling
from penstock.config.engine import Pooling

NO_ROW = -1
NO_STEP = -1

_by_arrival = attrgetter("arrival")


class RequestPhase(Enum):
    """The phase of a request."""

    WAITING = "waiting"  # never ran
    RUNNING = "running"  # holds a row and blocks
    PREEMPTED = "preempted"  # lost them; keeps its tokens
    FINISHED = "finished"  # results in flight for it are dropped


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """The state of one request. Only the parts of the scheduler write to it.

    Attributes:
        arrival: 0, 1, 2, ...; never used again; owns the KV blocks.
        max_len: tokens, prompt and output, at which it ends with "length".
        num_scheduled: positions whose keys and values are written by the plans issued so far, if all drafts
            that are in flight are right.
        num_rejected: drafts that were wrong since it got its row.
        prefill_len: its `num_to_prefill` when it was admitted; below it, it is prefilling.
        num_pending: ids sampled by steps in flight, if all drafts are right.
        guessed_ids: drafts in flight, in order: what is guessed to follow the known tokens.
        num_windows_ahead: steps in flight whose first token is one of these.
        num_told: tokens that it had when it was in a plan last; the stages get all of these in time.
        is_rewound: the next plan tells the stages to go on from its newest token.
        last_sampled_step: step of the newest sample, returned or pending; the cadence counts from it.
        num_scores_planned, num_scores: scores of its prompt's tokens, from the second on: asked for by the
            plans issued so far, and returned (`scheduler.prompt_scores`).
        lost_at: its `progress` when the pipe broke with it in a step last.
        queue_seconds: time from arrival to first admission; None before.
        cache_root, block_hashes: names of its blocks (`kvcache.block_hash`), as far as they were wanted.
        num_named: blocks of its table that have been named, so that others can find them.
        num_unproven: blocks of its table, behind the named ones, that are still being loaded: until they are
            there it runs what it knows and no further, and none of its blocks is named.
        num_void: of the pending ids, the oldest that follow what had not come, or a wrong guess.
        num_cached_tokens: those of its prompt that were found when it first started.
        priority: what its blocks are worth to the cache.
        session_id: the session that keeps them when it has ended; "": none.
        leader: the request that has the same prompt, and computes it first.
        num_shared: tokens of the prompt that it will find when that one has.
        grammar: number of the one that it is sampled by, while it has a row.
        awaits_grammar: that is being built, and no step may sample the row yet (`scheduler.grammars`).
        pooling: it ends with the vector of its prompt, and samples nothing (`scheduler.pooled`).
        may_draft: what it says next may be guessed (`scheduler.windows`).
        awaits_result: what it says next may be guessed once its newest token is known; it goes on then.
        awaits_drafts: it is being guessed, and goes on when it is, or takes too long.
    """

    request_id: str
    arrival: int
    arrival_time: float
    prompt_len: int
    max_len: int
    stop_ids: frozenset[int]
    sampling: RowSampling
    token_ids: list[int]
    phase: RequestPhase = RequestPhase.WAITING
    row: int = NO_ROW
    num_scheduled: int = 0
    num_rejected: int = 0
    prefill_len: int = 0
    num_pending: int = 0
    guessed_ids: list[int] = field(default_factory=list)
    num_windows_ahead: int = 0
    num_told: int = 0
    is_rewound: bool = False
    last_sampled_step: int = NO_STEP
    num_scores_planned: int = 0
    num_scores: int = 0
    lost_at: int = -1
    queue_seconds: float | None = None
    cache_root: bytes = b""
    block_hashes: list[bytes] = field(default_factory=list)
    num_named: int = 0
    num_unproven: int = 0
    num_void: int = 0
    num_cached_tokens: int = 0
    priority: int = 0
    session_id: str = ""
    leader: RequestState | None = field(default=None, repr=False)
    num_shared: int = 0
    pooling: Pooling | None = None
    grammar: int = NO_GRAMMAR
    awaits_grammar: bool = False
    may_draft: bool = True
    awaits_result: bool = False
    awaits_drafts: bool = False

    @property
    def num_planned(self) -> int:
        """The positions as plans count them: every draft since the request got its row counts as right."""
        return self.num_scheduled + self.num_rejected

    @property
    def num_awaited(self) -> int:
        """The number of ids that steps in flight will yield, if all drafts are right."""
        return self.num_pending - self.num_void

    @property
    def is_guessed(self) -> bool:
        """Whether the tokens in flight are all guessed but the last, so that more can be guessed."""
        return self.num_awaited == len(self.guessed_ids) + 1

    def follow(self, token_ids: Sequence[int], step_id: int) -> int:
        """Compare the tokens that a step has yielded with the guesses in flight.

        If windows ahead guessed other tokens, they become void, and the request goes on from here.

        Returns:
            The number of tokens in windows that have become void.
        """
        if not self.num_windows_ahead:
            self.guessed_ids.clear()
            return 0
        if self.guessed_ids[: len(token_ids)] == token_ids:
            del self.guessed_ids[: len(token_ids)]
            self.num_windows_ahead -= 1
            return 0
        num_lost = self.num_awaited
        self.num_void, self.num_windows_ahead, self.last_sampled_step = self.num_pending, 0, step_id
        self.guessed_ids.clear()
        if self.phase is RequestPhase.RUNNING:
            self.num_scheduled -= num_lost
            self.num_rejected, self.is_rewound = 0, True
        return num_lost

    @property
    def num_outputs(self) -> int:
        """The number of tokens generated and returned."""
        return len(self.token_ids) - self.prompt_len

    @property
    def progress(self) -> int:
        """The number of tokens and scores that have returned; it never falls."""
        return self.num_outputs + self.num_scores

    @property
    def wants_scores(self) -> bool:
        """Whether tokens of the prompt are to be scored by steps that are not planned."""
        return self.sampling.num_prompt_logprobs >= 0 and self.num_scores_planned < self.prompt_len - 1

    @property
    def num_to_prefill(self) -> int:
        """The number of tokens to run when the request starts, or starts again.

        These are all known tokens, but for the last that the request may have: nothing follows from that one,
        unless its hidden state is wanted. At least one, so that there is a step that ends the request.
        """
        return max(1, min(len(self.token_ids), self.max_len - (self.pooling is None)))

    @property
    def backlog_tokens(self) -> int:
        """The number of tokens to prefill when the request starts, as far as that is known."""
        return len(self.token_ids) - self.num_shared

    @property
    def is_prefilling(self) -> bool:
        return self.num_scheduled < self.prefill_len

    @property
    def num_runnable(self) -> int:
        """The number of tokens to prefill that may run now; the last waits while it cannot be sampled."""
        return self.prefill_len - self.num_scheduled - self.awaits_grammar

    @property
    def has_started(self) -> bool:
        """Whether the request has had a row, here or in another core.

        It also counts as started when its leader has a row or has got anything, because they begin as one.
        """
        if self.queue_seconds is not None or self.progress > 0:
            return True
        leader = self.leader
        return leader is not None and (
            leader.phase in (RequestPhase.RUNNING, RequestPhase.PREEMPTED) or leader.progress > 0
        )


class RequestQueues:
    """The queues of all live requests, oldest first in each.

    Running ones are older than all preempted ones, and those than all waiting ones, but for requests that
    others may pass (`scheduler.start_order`): those start later, and take their place by age. The youngest
    gives way, so that the oldest request with a row always gets its blocks, and nobody starves.
    """

    def __init__(self) -> None:
        self.running: list[RequestState] = []  # oldest first
        self.preempted: deque[RequestState] = deque()  # oldest first
        self.waiting: deque[RequestState] = deque()  # oldest first
        self.backlog_tokens = 0  # tokens that preempted and waiting requests have to prefill
        self._by_id: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[RequestState]:
        """All live requests, oldest first."""
        return iter(self._by_id.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def get(self, request_id: str) -> RequestState | None:
        return self._by_id.get(request_id)

    def add(self, request: RequestState) -> None:
        self._by_id[request.request_id] = request
        self.waiting.append(request)
        self.backlog_tokens += request.backlog_tokens

    def line(self) -> Iterator[RequestState]:
        """Return the requests without a row, in the order in which they should start."""
        return chain(self.preempted, self.waiting)

    def decoding(self) -> list[RequestState]:
        """Return the running requests whose next token to run is a sampled one, oldest first.

        The token must be reliable, and the sample stay within `max_len`. Behind its prompt a request has
        scheduled all tokens that it will have but the newest
        (`scheduler.invariants`). This runs over all rows for every plan.
        """
        return [
            request
            for request in self.running
            if request.prefill_len <= request.num_scheduled < request.max_len - 1 and not request.num_unproven
        ]

    def prefilling(self) -> list[RequestState]:
        """Return the running requests that have tokens to prefill, oldest first."""
        return [request for request in self.running if request.num_scheduled < request.prefill_len]

    def first_new(self) -> RequestState | None:
        """Return the oldest waiting request that has not run, here or in another core."""
        return next((request for request in self.waiting if not request.has_started), None)

    def followers_in_line(self, leader: RequestState) -> list[RequestState]:
        """Return the requests that follow `leader` and have no row."""
        return [request for request in (*self.preempted, *self.waiting) if request.leader is leader]

    def admit(self, request: RequestState, row: int) -> None:
        """Move a request from the line to `running`, to prefill the tokens that it has."""
        self._queue_of(request).remove(request)
        self.backlog_tokens -= request.backlog_tokens
        request.phase = RequestPhase.RUNNING
        request.row = row
        request.prefill_len = request.num_to_prefill
        request.num_rejected, request.is_rewound = 0, False
        insort(self.running, request, key=_by_arrival)

    def preempt_youngest(self) -> RequestState:
        """Move the youngest running request to the line, before all waiting ones.

        The caller frees its row and blocks.
        """
        request = self.running.pop()
        request.phase = RequestPhase.PREEMPTED
        request.row, request.is_rewound = NO_ROW, False
        request.num_scheduled = request.prefill_len = request.num_named = request.num_unproven = 0
        insort(self.preempted, request, key=_by_arrival)
        self.backlog_tokens += request.backlog_tokens
        return request

    def note_token(self, request: RequestState, token_id: int) -> None:
        """Append a returned token."""
        request.token_ids.append(token_id)
        if request.phase is RequestPhase.PREEMPTED:
            self.backlog_tokens += 1

    def remove(self, request: RequestState) -> None:
        """Forget a live request, wherever it is; the caller has freed its row and blocks."""
        self._queue_of(request).remove(request)
        if request.phase is not RequestPhase.RUNNING:
            self.backlog_tokens -= request.backlog_tokens
        request.phase = RequestPhase.FINISHED
        request.row, request.is_rewound = NO_ROW, False
        del self._by_id[request.request_id]

    def _queue_of(self, request: RequestState) -> list[RequestState] | deque[RequestState]:
        if request.phase is RequestPhase.RUNNING:
            return self.running
        return self.waiting if request.phase is RequestPhase.WAITING else self.preempted

    def check_invariants(self) -> None:
        for queue in (self.running, self.preempted, self.waiting):
            arrivals = [request.arrival for request in queue]
            assert arrivals == sorted(set(arrivals)), f"requests are out of order: {arrivals}"
        everybody = sorted([*self.running, *self.line()], key=_by_arrival)
        assert everybody == list(self._by_id.values()), "a live request is in no queue, or in two"
        assert self.backlog_tokens == sum(request.backlog_tokens for request in self.line())
        for queue, phase in (
            (self.running, RequestPhase.RUNNING),
            (self.preempted, RequestPhase.PREEMPTED),
            (self.waiting, RequestPhase.WAITING),
        ):
            assert all(request.phase is phase for request in queue), f"a request in {phase} is not so"
