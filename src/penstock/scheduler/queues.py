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

Owned by `scheduler.scheduler`; its parts call it. It decides nothing, and holds neither blocks nor rows.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from operator import attrgetter

from penstock.batch import NO_GRAMMAR, RowSampling
from penstock.config.engine import Pooling

NO_ROW = -1
NO_STEP = -1

_by_arrival = attrgetter("arrival")
_by_last_sample = attrgetter("last_sampled_step")


class RequestPhase(Enum):
    """The phase of a request: waiting, running (with a row and blocks), preempted, or finished."""

    WAITING = "waiting"  # never ran
    RUNNING = "running"  # holds a row and blocks
    PREEMPTED = "preempted"  # lost them; keeps its tokens
    FINISHED = "finished"  # results in flight for it are dropped


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """The state of one request. Only the parts of the scheduler write to it.

    Drafts are guessed tokens, which a step verifies. A window is a row with drafts. "Scheduled" means in
    plans that were issued; "returned" means that the result of the step has come.

    Attributes:
        arrival: 0, 1, 2, ...; never used again; the KV blocks of the request are owned under this number.
        stop_ids: token ids that end it with "stop".
        max_len: the number of tokens (prompt + output) at which it ends with "length".
        row: its index in the tables of the ranks while it runs; else `NO_ROW`.
        num_scheduled: positions whose keys and values are written by the plans issued so far, if all drafts
            that are in flight are right.
        num_rejected: drafts that were wrong since it got its row.
        prefill_len: its `num_to_prefill` when it last started; while `num_scheduled` is less, it is
            prefilling.
        num_pending: ids sampled by steps in flight, if all drafts are right.
        guessed_ids: drafts in flight, in order: what is guessed to follow the known tokens.
        num_windows_ahead: steps in flight whose first token is one of the `guessed_ids`.
        num_told: the number of its tokens when a plan last ran it. The stages get these tokens in any case,
            so a plan that rewinds its row brings only the later ones (`RewoundRow`).
        is_rewound: a guess was wrong; the next plan tells the stages to continue from the newest token.
        last_sampled_step: the step of its newest sample, returned or pending. When it may decode again counts
            from that step (`scheduler.placement`).
        num_scores_planned, num_scores: scores (log-probabilities) of its prompt's tokens, from the second on:
            asked for by the plans issued so far, and returned (`scheduler.prompt_scores`).
        lost_at: its `progress` at the last loss of ranks at which it was in a step or waited for its grammar;
            -1: there was none.
        queue_seconds: time from arrival to first start; None before that start.
        cache_root, block_hashes: the hash that its chain of block names begins with, and the names of its
            first blocks, as many as were computed so far (`kvcache.block_hash`).
        num_named: leading blocks that were given their names, so that other requests find them.
        num_unproven: blocks behind the named ones that are still being loaded. Until they have come it
            prefills its known tokens but does not decode, and none of its blocks is named.
        num_void: how many of the pending ids are to be dropped, the oldest first: they rest on blocks that
            failed to load, on a step that failed, or on a wrong guess.
        num_cached_tokens: tokens of its prompt that were found when it first started.
        priority: of its blocks; with the eviction policy "priority" the cache evicts low ones first.
        session_id: the session that keeps its blocks when it has ended; "": none.
        leader: the request that has the same prompt, and computes it first.
        num_shared: tokens of the prompt that it will find when the leader has computed them.
        grammar: number of the grammar that constrains its samples, while it has a row.
        awaits_grammar: the grammar is being built, and no step may sample the row yet (`scheduler.grammars`).
        pooling: it ends with the vector of its prompt, and samples nothing (`scheduler.pooled`).
        may_draft: its next tokens may be guessed (`scheduler.windows`).
        awaits_result: no plan takes it before its newest token is known, because drafts may then follow;
            while prompts run it does not wait.
        awaits_drafts: no plan takes it before a drafter has guessed, or has taken too long; while prompts run
            it does not wait.
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
        """The number of positions scheduled so far as plans count them, with rejected drafts (guesses)."""
        return self.num_scheduled + self.num_rejected

    @property
    def num_awaited(self) -> int:
        """The number of tokens that steps in flight will yield for it, if all drafts (guesses) are right."""
        return self.num_pending - self.num_void

    @property
    def is_guessed(self) -> bool:
        """Whether all tokens in flight but the last have been guessed, so that more guesses can follow."""
        return self.num_awaited == len(self.guessed_ids) + 1

    def follow(self, token_ids: Sequence[int], step_id: int) -> int:
        """Compare the tokens that step `step_id` has yielded with the guesses that later steps rest on.

        If a guess was wrong, those steps (windows ahead) become void, and the request goes on from these
        tokens. Call it before the tokens are appended.

        Returns:
            The number of tokens in flight that have become void; 0 if the guesses were right.
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
        """The number of output tokens that the core knows; those that a lost core had got count, too.

        Tokens of steps in flight do not count.
        """
        return len(self.token_ids) - self.prompt_len

    @property
    def progress(self) -> int:
        """The number of output tokens and of prompt scores (log-probabilities) got back so far, added up.

        It never falls.
        """
        return self.num_outputs + self.num_scores

    @property
    def wants_scores(self) -> bool:
        """Whether prompt tokens remain whose log-probabilities are wanted and that no plan scores yet."""
        return self.sampling.num_prompt_logprobs >= 0 and self.num_scores_planned < self.prompt_len - 1

    @property
    def num_to_prefill(self) -> int:
        """The number of tokens to run when the request starts, or starts again.

        These are all tokens known now. Only the last token that `max_len` allows need not be run, since none
        follows; it is run if its hidden state is wanted. The number is at least one, so that there is a step
        that ends the request.
        """
        return max(1, min(len(self.token_ids), self.max_len - (self.pooling is None)))

    @property
    def backlog_tokens(self) -> int:
        """The number of tokens to prefill when it starts, without those that it shares with its leader.

        The leader is the request with the same prompt that computes it first.
        """
        return len(self.token_ids) - self.num_shared

    @property
    def is_prefilling(self) -> bool:
        return self.num_scheduled < self.prefill_len

    @property
    def num_runnable(self) -> int:
        """The number of tokens to prefill that may run now.

        The last known token waits while the request's grammar is being built: the step that runs this token
        samples the next one.
        """
        return self.prefill_len - self.num_scheduled - self.awaits_grammar

    @property
    def has_started(self) -> bool:
        """Whether the request has ever run, in this core process or in a lost one before it.

        A request also counts as started when its leader (the request with the same prompt that runs first)
        has a row, had one, or has got tokens or scores, because leader and followers begin as one.
        """
        if self.queue_seconds is not None or self.progress > 0:
            return True
        leader = self.leader
        return leader is not None and (
            leader.phase in (RequestPhase.RUNNING, RequestPhase.PREEMPTED) or leader.progress > 0
        )


@dataclass(slots=True)
class _Turns:
    """The running requests by what plans do with them next, kept from one plan to the next.

    Attributes:
        decoding: those that may sample another token, by arrival number; the longest unsampled come first,
            and of those sampled in one step the oldest.
        prefilling: those with tokens to prefill, oldest first.
        attended: positions that the next tokens of `decoding` attend to, all together.
    """

    decoding: OrderedDict[int, RequestState]
    prefilling: list[RequestState]
    attended: int

    @classmethod
    def of(cls, running: Iterable[RequestState]) -> _Turns:
        """Return the turns of the running requests, which come oldest first."""
        decoding, prefilling = [], []
        for request in running:
            if request.num_scheduled < request.prefill_len:
                prefilling.append(request)
            elif request.num_scheduled < request.max_len - 1 and not request.num_unproven:
                decoding.append(request)
        decoding.sort(key=_by_last_sample)
        attended = sum(request.num_scheduled for request in decoding) + len(decoding)
        return cls(OrderedDict((request.arrival, request) for request in decoding), prefilling, attended)


class RequestQueues:
    """The queues of all live requests (waiting, running, preempted), oldest first in each.

    Running requests are older than all preempted ones, and preempted ones are older than all waiting ones.
    The exception are requests that others may pass (`scheduler.start_order`): they start later, and then take
    their place by age. When blocks run out, the youngest running request is preempted. So the oldest always
    gets its blocks, and none starves.
    """

    def __init__(self) -> None:
        self.running: list[RequestState] = []  # oldest first
        self.preempted: deque[RequestState] = deque()  # oldest first
        self.waiting: deque[RequestState] = deque()  # oldest first
        self.backlog_tokens = 0  # tokens that preempted and waiting requests have to prefill
        self._by_id: dict[str, RequestState] = {}
        self._turns: _Turns | None = None  # None: to be made anew, since a request has changed its turn

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
        """Return the preempted and then the waiting requests, in the order in which they should start."""
        return chain(self.preempted, self.waiting)

    def decoding(self) -> Collection[RequestState]:
        """Return the running requests whose prompts are scheduled and that may sample another token.

        The longest unsampled come first, and of those sampled in one step the oldest. Left out are requests
        whose prefix is still being loaded from the store, and requests whose tokens up to `max_len` are all
        planned.
        """
        return self._kept_turns().decoding.values()

    def prefilling(self) -> Sequence[RequestState]:
        """Return the running requests that have tokens to prefill, oldest first."""
        return self._kept_turns().prefilling

    @property
    def attended(self) -> int:
        """The number of positions that the next tokens of the decoding requests attend to, all together."""
        return self._kept_turns().attended

    def decoded(self, requests: Iterable[RequestState]) -> None:
        """Move requests of `decoding` to its end, since a plan has just got a decode of each."""
        turns = self._turns
        if turns is None:
            return
        for request in sorted(requests, key=_by_arrival):
            if request.num_scheduled < request.max_len - 1:
                turns.decoding.move_to_end(request.arrival)
                turns.attended += 1
            else:
                del turns.decoding[request.arrival]
                turns.attended -= request.num_scheduled

    def turns_changed(self) -> None:
        """Forget which requests decode and which prefill, so that the next plan looks at all running ones.

        Call it when a running request ends its prompt, goes back to an earlier token, or no longer waits for
        blocks from the store. A decode alone changes no turn but its own (`decoded`), and most plans are
        decodes, so that few plans look at all running requests.
        """
        self._turns = None

    def _kept_turns(self) -> _Turns:
        if self._turns is None:
            self._turns = _Turns.of(self.running)
        return self._turns

    def first_new(self) -> RequestState | None:
        """Return the oldest waiting request that has never run, in this core or another; None if all have."""
        return next((request for request in self.waiting if not request.has_started), None)

    def followers_in_line(self, leader: RequestState) -> list[RequestState]:
        """Return the requests in line (without a row) that share the prompt of `leader` and follow it."""
        return [request for request in (*self.preempted, *self.waiting) if request.leader is leader]

    def admit(self, request: RequestState, row: int) -> None:
        """Move a request from the line to the running ones, to prefill its known tokens in row `row`."""
        self._queue_of(request).remove(request)
        self.backlog_tokens -= request.backlog_tokens
        request.phase = RequestPhase.RUNNING
        request.row = row
        request.prefill_len = request.num_to_prefill
        request.num_rejected, request.is_rewound = 0, False
        insort(self.running, request, key=_by_arrival)
        self.turns_changed()

    def preempt_youngest(self) -> RequestState:
        """Move the youngest running request back to the line, before all waiting ones, and return it.

        It keeps its tokens, and has none scheduled. The caller frees its row and blocks.
        """
        request = self.running.pop()
        self.turns_changed()
        request.phase = RequestPhase.PREEMPTED
        request.row, request.is_rewound = NO_ROW, False
        request.num_scheduled = request.prefill_len = request.num_named = request.num_unproven = 0
        insort(self.preempted, request, key=_by_arrival)
        self.backlog_tokens += request.backlog_tokens
        return request

    def note_token(self, request: RequestState, token_id: int) -> None:
        """Append a token that has come back from the stages to the request's known ones."""
        request.token_ids.append(token_id)
        if request.phase is RequestPhase.PREEMPTED:
            self.backlog_tokens += 1

    def remove(self, request: RequestState) -> None:
        """Forget a live request, wherever it is; the caller has freed its row and blocks."""
        self._queue_of(request).remove(request)
        if request.phase is RequestPhase.RUNNING:
            self.turns_changed()
        else:
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
        if self._turns is not None:
            turns, anew = self._turns, _Turns.of(self.running)
            assert list(turns.decoding) == list(anew.decoding), "who decodes, or when, is out of date"
            assert (turns.prefilling, turns.attended) == (anew.prefilling, anew.attended)
        for queue, phase in (
            (self.running, RequestPhase.RUNNING),
            (self.preempted, RequestPhase.PREEMPTED),
            (self.waiting, RequestPhase.WAITING),
        ):
            assert all(request.phase is phase for request in queue), f"a request in {phase} is not so"
