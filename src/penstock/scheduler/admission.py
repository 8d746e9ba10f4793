"""Checks requests when they arrive, and again before they start.

A request that arrives is refused if it could never finish here, or if too many wait already. Before it starts
and gets a row (its index on every rank), all its known tokens must fit the free KV blocks. One more block
must stay free for each running request. So the running ones can go on for a while before one of them must be
preempted. `scheduler.queues` keeps the order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.batch import LogitChanges, RowSampling
from penstock.config.engine import SchedulerConfig
from penstock.errors import InvalidRequestError, OverloadedError
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_hash import root_hash
from penstock.request import GenerationRequest, SamplingParams
from penstock.scheduler.queues import RequestQueues, RequestState

POOLS_IN_QUEUE = 8  # unless a limit is set, this many times the tokens of the KV pool may wait
_MASK64 = 2**64 - 1


class Admission:
    """Turns new requests into `RequestState`s, and decides whether one may start.

    Args:
        config: bounds on the number of waiting requests and tokens.
        allocator: the allocator of KV blocks; read, never changed.
        max_model_len: longest prompt + output, in tokens, that the model takes.
        eos_token_ids: the model's own end-of-sequence ids.
        seed: seed of the engine, from which requests without a seed derive theirs.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: BlockAllocator,
        *,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        seed: int,
    ) -> None:
        self._config = config
        self._allocator = allocator
        self._eos_token_ids = frozenset(eos_token_ids)
        self._seed = seed
        self._num_arrivals = 0
        # The last token of a sequence needs no KV: nothing attends to it.
        self.max_len = min(max_model_len, allocator.capacity_tokens + 1)
        self._max_model_len = max_model_len

    def accept(
        self,
        request: GenerationRequest,
        queues: RequestQueues,
        now: float,
        output_ids: Sequence[int] | None = None,
        num_scores: int = 0,
    ) -> list[RequestState]:
        """Check a request and its followers, and return a `RequestState` for each; all are accepted or none.

        Followers are further sequences of the same prompt (`n` above 1). No state is put into a queue here.

        Args:
            queues: the live requests; only read.
            now: the time of arrival, in seconds of the scheduler's clock.
            output_ids: tokens that a lost core process had generated for the request; None: the request is
                new.
            num_scores: prompt tokens whose log-probabilities that core had returned.

        Raises:
            InvalidRequestError: a sequence could never finish here (`receive`), its id is in use, or there
                are more sequences than may wait and run.
            OverloadedError: the request is new, and too much waits already (`refuse_overload`).
        """
        sequences = request.alone()
        for sequence in sequences:
            if sequence.request_id in queues:
                raise InvalidRequestError(
                    f"request id {sequence.request_id!r} is in use.", param="request_id", code="duplicate_id"
                )
        self._refuse_too_many(len(sequences))
        if output_ids is None:
            prompt_len = len(request.prompt_token_ids)
            own = prompt_len - self._num_shared(request)
            self.refuse_overload(queues, prompt_len + own * len(request.followers), len(sequences))
        first, *others = (self.receive(sequence, now, output_ids or (), num_scores) for sequence in sequences)
        first.leader = queues.get(request.follows)
        for other in others:
            other.leader = first
        for state in (first, *others):
            state.num_shared = 0 if state.leader is None else self._num_shared(request)
        return [first, *others]

    def _num_shared(self, request: GenerationRequest) -> int:
        """Return how many prompt tokens a follower can reuse: the whole blocks before the last token."""
        if not self._allocator.pool.cache.is_on:
            return 0
        return (len(request.prompt_token_ids) - 1) // self._allocator.block_size * self._allocator.block_size

    def _refuse_too_many(self, num_requests: int) -> None:
        most = self._config.max_num_seqs + self._config.max_waiting_requests
        if num_requests > most:
            raise InvalidRequestError(
                f"n is {num_requests}; the limit of running and waiting sequences is {most}.",
                remedy="Ask for fewer, or raise --max-waiting-requests.",
                param="n",
                code="out_of_range",
            )

    def refuse_overload(self, queues: RequestQueues, num_tokens: int, num_requests: int = 1) -> None:
        """Raise `OverloadedError` if the queue has no room for `num_requests` more, with `num_tokens` in all.

        Requests that would find a free row (an index on the ranks) at once do not count against the bound on
        requests. The bound on waiting tokens does not apply while none wait.
        """
        limit = self._config.max_waiting_requests
        free_rows = self._config.max_num_seqs - len(queues.running)  # for those about to start
        if len(queues.waiting) + num_requests > limit + free_rows:
            raise OverloadedError(
                f"{limit} requests wait already, which is the limit.",
                remedy="Try again later, or raise --max-waiting-requests.",
            )
        waiting = queues.backlog_tokens
        limit = self._config.max_waiting_tokens or POOLS_IN_QUEUE * self._allocator.capacity_tokens
        if waiting and waiting + num_tokens > limit:
            raise OverloadedError(
                f"{waiting} tokens of other requests wait already; with the {num_tokens} of this one they "
                f"exceed the limit of {limit}.",
                remedy="Try again later, or raise --max-waiting-tokens.",
            )

    def receive(
        self, request: GenerationRequest, now: float, output_ids: Sequence[int] = (), num_scores: int = 0
    ) -> RequestState:
        """Check the lengths of a request, and return the scheduler's state of it, with a new arrival number.

        The request is new, or a lost core process had begun it. It is not put into a queue here.

        Args:
            now: the time of arrival, in seconds of the scheduler's clock.
            output_ids: tokens that the lost core had generated for it, which are not checked; empty if the
                request is new.
            num_scores: prompt tokens whose scores (log-probabilities) the lost core had returned.

        Raises:
            InvalidRequestError: the prompt is empty, or too long for the model or for the KV cache; or
                `max_tokens` is negative.
        """
        prompt_len = len(request.prompt_token_ids)
        self._check_lengths(request)
        arrival = self._num_arrivals
        self._num_arrivals += 1
        return RequestState(
            request_id=request.request_id,
            arrival=arrival,
            arrival_time=now,
            prompt_len=prompt_len,
            max_len=prompt_len if request.pooling else self._longest(prompt_len, request.sampling),
            stop_ids=self._stop_ids(request.sampling),
            sampling=self._row_sampling(request.sampling, arrival),
            token_ids=[*request.prompt_token_ids, *output_ids],
            cache_root=root_hash(request.sampling.cache_salt),
            priority=request.sampling.priority,
            session_id=request.sampling.session_id,
            num_scores_planned=num_scores,
            num_scores=num_scores,
            pooling=request.pooling,
            may_draft=request.sampling.speculative,
        )

    def may_start(self, request: RequestState, num_running: int, cached_blocks: Sequence[int] = ()) -> bool:
        """Return whether the free KV blocks suffice for the waiting `request` to start now.

        They must hold its known tokens, and leave one block for each running request. A preempted request may
        not start while its last tokens are still being computed.

        Args:
            num_running: the number of running requests.
            cached_blocks: ids of blocks that hold its first tokens already.
        """
        if request.num_pending:
            return False  # preempted; its last tokens are still under way
        return self._allocator.has_room(request.num_to_prefill, cached_blocks, num_running)

    def _longest(self, prompt_len: int, sampling: SamplingParams) -> int:
        """Return the length, prompt and output, at which a request ends."""
        wanted = sampling.max_tokens
        return self.max_len if wanted is None else min(self.max_len, prompt_len + wanted)

    def _check_lengths(self, request: GenerationRequest) -> None:
        """Raise `InvalidRequestError` unless the prompt has room, and one token more if any is generated.

        The very last token of a request needs no place in the KV cache, except where the prompt is pooled.
        """
        prompt_len, sampling = len(request.prompt_token_ids), request.sampling
        is_pooled = request.pooling is not None
        least = 0 if is_pooled or sampling.max_tokens == 0 else 1
        room, capacity = self._max_model_len, self._allocator.capacity_tokens
        if prompt_len == 0:
            raise InvalidRequestError("the prompt has no tokens.", param="prompt", code="empty_prompt")
        if prompt_len + least > room:
            share = "" if is_pooled else f" tokens in all, with at least {least} of them for the output"
            raise InvalidRequestError(
                f"the prompt has {prompt_len} tokens; the model takes {room}{share}.",
                remedy=f"Shorten the prompt to {room - least} tokens.",
                param="prompt",
                code="context_length_exceeded",
            )
        if prompt_len + least > (capacity if is_pooled else capacity + 1):
            raise InvalidRequestError(
                f"the prompt has {prompt_len} tokens; the KV cache holds {capacity}.",
                remedy="Shorten the prompt or start the engine with more KV blocks.",
                param="prompt",
                code="kv_capacity_exceeded",
            )
        if sampling.max_tokens is not None and sampling.max_tokens < 0:
            raise InvalidRequestError(
                f"max_tokens must be at least 0, got {sampling.max_tokens}.",
                param="max_tokens",
                code="out_of_range",
            )

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        own = frozenset(sampling.stop_token_ids)
        return own if sampling.ignore_eos else own | self._eos_token_ids

    def _row_sampling(self, sampling: SamplingParams, arrival: int) -> RowSampling:
        suppressed = self._eos_token_ids.union(sampling.stop_token_ids) if sampling.min_tokens else ()
        return RowSampling(
            temperature=sampling.temperature,
            top_k=max(sampling.top_k, 0),
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=derive_seed(self._seed, arrival) if sampling.seed is None else sampling.seed,
            min_tokens=sampling.min_tokens,
            suppressed_ids=sorted(suppressed),
            num_logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
            changes=_logit_changes(sampling),
            num_prompt_logprobs=-1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs,
            structured=sampling.structured_outputs,
        )


def _logit_changes(sampling: SamplingParams) -> LogitChanges | None:
    changes = LogitChanges(
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        bias=sampling.logit_bias,
        allowed_ids=sampling.allowed_token_ids,
        bad_words=sampling.bad_word_ids,
    )
    return None if changes == LogitChanges() else changes


def derive_seed(engine_seed: int, arrival: int) -> int:
    """Return a seed in [0, 2**63) for the `arrival`-th request of an engine, by SplitMix64.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    mixed = (engine_seed + (arrival + 1) * 0x9E3779B97F4A7C15) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (mixed ^ (mixed >> 31)) >> 1
