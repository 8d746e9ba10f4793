"""A plan while the scheduler is writing it: the columns of `batch.ScheduledBatch`, filled row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from penstock.batch import (
    GUESSED,
    KNOWN,
    NewRow,
    RewoundRow,
    ScheduledBatch,
    ScoredTokens,
    TierOrder,
    window_sizes,
)
from penstock.scheduler.chunking import yields_sample
from penstock.scheduler.cost_model import attended_by
from penstock.scheduler.prompt_scores import plan_scores
from penstock.scheduler.queues import RequestState

T = TypeVar("T")


class PlanBuilder:
    """A plan (the work of one step) that is being written, request by request.

    Each request has a row in it: its tokens in this step. Adding the row also counts these tokens as
    scheduled in the state of the request.
    """

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.requests: list[RequestState] = []  # whose rows they are
        self.rows: list[int] = []
        self.num_tokens: list[int] = []
        self.start_positions: list[int] = []
        self.new_blocks: list[list[int]] = []
        self.need_sampled: list[bool] = []
        self.token_from: list[int] = []
        self.new_rows: list[NewRow] = []
        self.entering: list[RequestState] = []  # requests of `new_rows` that have no tokens in the plan
        self.sampling: list[RequestState] = []  # aligned with the True entries of need_sampled
        self.drafts: dict[int, list[int]] = {}  # by row index
        self.awaited: list[int] = []
        self.scoring: list[tuple[RequestState, ScoredTokens]] = []
        self.ending: list[RequestState] = []  # requests that this step ends without sampling a token

    @property
    def num_decodes(self) -> int:
        return len(self.token_from) - self.token_from.count(KNOWN)

    @property
    def window_sizes(self) -> list[int]:
        """The number of positions that the step samples of each sampled request, in plan order.

        For a row with drafts (guessed tokens, which the step verifies) it is the number of the row's tokens;
        else it is 1.
        """
        return window_sizes(self.need_sampled, self.num_tokens, self.drafts)

    @property
    def attended(self) -> int:
        """The number of positions that all tokens of the plan attend to, added up.

        Drafts (guessed tokens) of earlier steps that were rejected are left out, although plans count their
        positions.
        """
        rows = zip(self.requests, self.start_positions, self.num_tokens, strict=True)
        return sum(attended_by(start - request.num_rejected, count) for request, start, count in rows)

    @property
    def prefill_tokens(self) -> int:
        """The number of tokens that the plan prefills: neither decodes nor drafts (guessed tokens)."""
        rows = zip(self.num_tokens, self.token_from, strict=True)
        return sum(count for count, source in rows if source == KNOWN)

    @property
    def all_rows(self) -> list[int]:
        """The row numbers of the plan's requests, and of those that enter with it, with tokens or without.

        The row of a request that enters with tokens occurs twice.
        """
        return [*self.rows, *(new.row for new in self.new_rows)]

    def add_decode(self, request: RequestState, blocks: list[int]) -> None:
        """Add a row with one token of a request: the one that the last step to sample the request yields.

        That token need not be known yet: the plan names the step that yields it.

        Args:
            blocks: ids of the KV blocks that the request gets in addition, often none.
        """
        self.token_from.append(request.last_sampled_step)
        self._add(request, 1, blocks, True)

    def add_drafts(self, index: int, draft_ids: Sequence[int], blocks: list[int]) -> None:
        """Add drafts (guessed tokens, to be verified) behind the token of the decode row `index`.

        All rows so far must be decodes.

        Args:
            index: the row's place in the plan.
            blocks: ids of the KV blocks that the request gets in addition.
        """
        request, num_drafts = self.requests[index], len(draft_ids)
        self.drafts[index] = list(draft_ids)
        self.num_tokens[index] += num_drafts
        self.add_blocks(index, blocks)
        request.num_scheduled += num_drafts
        request.num_pending += num_drafts
        request.guessed_ids = list(draft_ids)

    def add_guessed_window(self, request: RequestState, draft_ids: Sequence[int], blocks: list[int]) -> None:
        """Add a row of guessed tokens alone, which follow on guesses of the request that are still in flight.

        The first of `draft_ids` guesses the token that the newest step in flight yields behind its own
        drafts. The row must be the only one of the plan, so that stages can skip the plan if a guess was
        wrong.

        Args:
            blocks: ids of the KV blocks that the request gets in addition.
        """
        assert not self.rows, "a guessed window needs its own plan"
        self.token_from.append(GUESSED)
        self.drafts[0] = list(draft_ids)
        self._add(request, len(draft_ids), blocks, True)
        request.num_pending += len(draft_ids) - 1
        request.guessed_ids += draft_ids
        request.num_windows_ahead += 1

    def add_blocks(self, index: int, blocks: Sequence[int]) -> None:
        """Append KV blocks (ids) to the new blocks that the request of the plan's row `index` gets."""
        self.new_blocks[index] = [*self.new_blocks[index], *blocks]

    def put_windows_last(self) -> None:
        """Move rows with drafts (guessed tokens) behind the rows of a single token.

        All rows so far must be decodes. Attention treats the single tokens at the front together
        (`attention.metadata`).
        """
        if not self.drafts:
            return
        order = sorted(range(len(self.rows)), key=self.drafts.__contains__)
        self.requests, self.sampling = _sorted(self.requests, order), _sorted(self.sampling, order)
        self.rows, self.num_tokens = _sorted(self.rows, order), _sorted(self.num_tokens, order)
        self.start_positions = _sorted(self.start_positions, order)
        self.new_blocks, self.token_from = _sorted(self.new_blocks, order), _sorted(self.token_from, order)
        self.drafts = {place: self.drafts[index] for place, index in enumerate(order) if index in self.drafts}

    def add_chunk(self, request: RequestState, num_tokens: int, blocks: list[int]) -> None:
        """Add a row that prefills the next `num_tokens` tokens of a request.

        The step samples the row if the chunk reaches the request's last known token and another may follow.
        The plan also notes the prompt tokens whose log-probabilities are wanted.

        Args:
            blocks: ids of the KV blocks that the request gets in addition.
        """
        self.token_from.append(KNOWN)
        scored = plan_scores(request, len(self.rows), num_tokens)
        if scored is not None:
            self.scoring.append((request, scored))
        end = request.num_scheduled + num_tokens
        is_sampled = yields_sample(end, len(request.token_ids), request.max_len)
        if end >= request.prefill_len and not is_sampled:
            self.ending.append(request)
        self._add(request, num_tokens, blocks, is_sampled)

    def _add(self, request: RequestState, num_tokens: int, blocks: list[int], sampled: bool) -> None:
        self.requests.append(request)
        self.rows.append(request.row)
        self.num_tokens.append(num_tokens)
        self.start_positions.append(request.num_planned)
        self.new_blocks.append(blocks)
        self.need_sampled.append(sampled)
        request.num_scheduled += num_tokens
        request.num_told = len(request.token_ids)
        if sampled:
            request.num_pending += 1
            request.last_sampled_step = self.step_id
            self.sampling.append(request)

    def finish(
        self,
        *,
        consume_through: int,
        freed_rows: list[int],
        dropped_grammars: list[int],
        rewound: Sequence[RewoundRow] = (),
        mtp: Mapping[int, int] = MappingProxyType({}),
        given_up: Sequence[bytes] = (),
        orders: Sequence[TierOrder] = (),
        residency: int = 0,
    ) -> ScheduledBatch:
        """Return the finished plan; the arguments are those of its fields that are known only now."""
        return ScheduledBatch(
            step_id=self.step_id,
            rows=self.rows,
            num_tokens=self.num_tokens,
            start_positions=self.start_positions,
            new_blocks=self.new_blocks,
            need_sampled=self.need_sampled,
            token_from=self.token_from,
            drafts=self.drafts,
            mtp=dict(mtp),
            pooled=[request.row for request in self.ending if request.pooling is not None],
            consume_through=consume_through,
            freed_rows=freed_rows,
            new_rows=self.new_rows,
            rewound=list(rewound),
            dropped_grammars=dropped_grammars,
            given_up=list(given_up),
            orders=list(orders),
            residency=residency,
            awaited=self.awaited,
            scored=[scored for _, scored in self.scoring],
        )


def _sorted(column: list[T], order: Sequence[int]) -> list[T]:
    return [column[index] for index in order]
