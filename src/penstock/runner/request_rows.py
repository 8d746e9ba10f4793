"""The row table: what a rank knows about every running request, in arrays indexed by row.

Every rank keeps the same table and changes it in the same order: by the plans, and by the samples that come
back. The last stage writes its samples at once, the others when a plan consumes them; at rest all tables are
equal (rows D3, E6), but for the token ids, which a stage that neither embeds nor samples does not keep.
`runner.forward_batch` reads it to build a step; `pipeline.token_return` and the last stage's sink write
samples through `post_update`, or `post_counts` where no ids are kept. Decides nothing and holds no tensor.

Two clocks: `num_computed` counts tokens that have been *scheduled* (all drafts taken as accepted until their
rejection is consumed), `total_len` counts tokens that are *known*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.batch import KNOWN, NewRow, ScheduledBatch
from penstock.errors import ProtocolError
from penstock.kernels.views import KeptViews

_FREE = -1  # generation of a row that no request holds
_NOT_STARTED = -1  # num_computed until the first plan says where the request starts


@dataclass(frozen=True, kw_only=True)  # no slots: `is_held` is worked out once
class RowSnapshot:
    """Rows, and who held them at the time: the address of samples that come back later. Never changed."""

    rows: NDArray[np.int64]  # [num_rows]
    generations: NDArray[np.int64]  # [num_rows]
    request_ids: list[str]  # [num_rows]
    prompt_len: NDArray[np.int64]  # [num_rows]
    num_changes: int  # of hands, of any row, that the row table had seen then

    @cached_property
    def is_held(self) -> bool:
        """Whether a request held each of them."""
        return bool((self.generations != _FREE).all())

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: NDArray[np.int64]) -> RowSnapshot:
        """Some of the rows, by their places in this snapshot."""
        return RowSnapshot(
            rows=self.rows[indices],
            generations=self.generations[indices],
            request_ids=[self.request_ids[index] for index in indices.tolist()],
            prompt_len=self.prompt_len[indices],
            num_changes=self.num_changes,
        )


class TokenIds(Protocol):
    """The token ids of all rows, where a stage keeps them."""

    @property
    def by_row(self) -> NDArray[np.int64]:
        """[num_rows, width]; width 0 where none are kept."""
        ...

    def write(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        """Write ids to a row, from the position `start` on."""
        ...


class KeptIds:
    """The ids of the first stage, which embeds them, and of the last, which counts and scores them."""

    def __init__(self, num_rows: int, width: int) -> None:
        # zeros, not empty: untouched pages of a long context cost no memory, and stay valid token ids.
        self.by_row = np.zeros((num_rows, width), dtype=np.int64)

    def write(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        self.by_row[row, start : start + len(token_ids)] = token_ids


class NoIds:
    """In place of the ids on a stage between the first and the last, which reads none."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.by_row = np.zeros((num_rows, 0), dtype=np.int64)

    def write(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        """They are not kept."""


class RequestRows:
    """State of all rows of one rank.

    Args:
        num_rows: requests that hold a row at once.
        max_model_len: longest prompt + output in tokens.
        block_size: tokens per KV block.
        max_drafts: speculative tokens that one row may have beyond its known ones.
        ids: makes what keeps the token ids, given the rows and the width: `KeptIds` or `NoIds`.
    """

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        max_drafts: int = 0,
        ids: Callable[[int, int], TokenIds] = KeptIds,
    ) -> None:
        self.block_size = block_size
        width = max_model_len + 1 + max_drafts
        self._ids = ids(num_rows, width)
        # zeros, not empty, as for token ids.
        self.block_tables = np.zeros((num_rows, -(-width // block_size)), dtype=np.int64)
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)  # blocks of the row's table
        self.prompt_len = np.zeros(num_rows, dtype=np.int64)
        self.total_len = np.zeros(num_rows, dtype=np.int64)  # known tokens
        self.num_computed = np.full(num_rows, _NOT_STARTED, dtype=np.int64)  # scheduled tokens
        self.num_rejected = np.zeros(num_rows, dtype=np.int64)  # drafts rejected since the row was added
        self.generation = np.full(num_rows, _FREE, dtype=np.int64)
        self.sampled_step = np.full(num_rows, KNOWN, dtype=np.int64)  # step whose sample was consumed last
        self.request_ids = [""] * num_rows
        self.num_rejections = 0  # steps consumed that rejected drafts, of any row
        self._num_changes = 0  # of hands, of any row
        self._snapshots: KeptViews[tuple[int, ...], RowSnapshot] = KeptViews(self._snapshot)

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """[num_rows, width] known tokens at their positions, on a stage that keeps them."""
        return self._ids.by_row

    @property
    def max_blocks_per_row(self) -> int:
        return self.block_tables.shape[1]

    def reset(self) -> None:
        """No row is held, as at the start."""
        self.generation[:] = _FREE
        self.num_rejections = 0
        self._changes_hands()

    def apply(self, plan: ScheduledBatch) -> None:
        """The first two parts of a plan: freed rows, then new ones."""
        for row in plan.freed_rows:
            self.free(row)
        for new_row in plan.new_rows:
            self.add(new_row)

    def free(self, row: int) -> None:
        """The request of a row has ended; samples of it that are still to come will be dropped (row E7)."""
        self.generation[row] = _FREE
        self._changes_hands()

    def add(self, new: NewRow) -> None:
        """A request enters, or enters again with what it had generated before it was preempted."""
        row, known, held = new.row, len(new.token_ids), len(new.blocks)
        self._ids.write(row, 0, new.token_ids)
        self.block_tables[row, :held] = new.blocks
        self.num_blocks[row] = held
        self.prompt_len[row] = new.prompt_len
        self.total_len[row] = known
        self.num_computed[row] = new.start if held else _NOT_STARTED
        self.num_rejected[row] = 0
        self.generation[row] = new.generation
        self.sampled_step[row] = KNOWN
        self.request_ids[row] = new.request_id
        self._changes_hands()

    def _changes_hands(self) -> None:
        self._num_changes += 1
        self._snapshots.clear()

    def append_blocks(self, plan: ScheduledBatch) -> None:
        """Add the plan's new blocks to the ends of the block tables."""
        for row, blocks in zip(plan.rows, plan.new_blocks, strict=True):
            if blocks:
                held = self.num_blocks[row]
                self.block_tables[row, held : held + len(blocks)] = blocks
                self.num_blocks[row] = held + len(blocks)

    def snapshot(self, rows: Sequence[int]) -> RowSnapshot:
        """Address samples to the requests that hold these rows now; kept while no row changes hands."""
        return self._snapshots.of(tuple(rows))

    def _snapshot(self, places: tuple[int, ...]) -> RowSnapshot:
        rows = np.array(places, dtype=np.int64)
        return RowSnapshot(
            rows=rows,
            generations=self.generation[rows],
            request_ids=[self.request_ids[row] for row in places],
            prompt_len=self.prompt_len[rows],
            num_changes=self._num_changes,
        )

    def names_of(self, plan: ScheduledBatch) -> list[str]:
        """The requests of a plan that may not be applied yet, and may be wrong: rows that are none are left
        out."""
        entering = {new.row: new.request_id for new in plan.new_rows}
        known = dict(enumerate(self.request_ids)) | entering
        return [known[row] for row in plan.rows if known.get(row)]

    def span_of(self, plan: ScheduledBatch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `accepted_span_of`; raises `ProtocolError` if core and rank do not agree about a row."""
        starts, ends = self.accepted_span_of(plan)
        self._check(plan, starts, ends)
        return starts, ends

    def accepted_span_of(self, plan: ScheduledBatch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """True position of each row's first token, and behind its last, two [num_rows]: the plan's, less the
        rejections consumed."""
        starts = np.array(plan.start_positions, dtype=np.int64)
        if self.num_rejections:
            starts -= self.num_rejected[plan.rows]
        return starts, starts + np.array(plan.num_tokens, dtype=np.int64)

    def check_sources(self, plan: ScheduledBatch) -> None:
        """Raise `ProtocolError` unless each row's newest sample is that of the step which the plan names."""
        token_from = np.array(plan.token_from, dtype=np.int64)
        newest = self.sampled_step[self.snapshot(plan.rows).rows]
        wrong = (token_from != KNOWN) & (token_from != newest)
        self._refuse(plan, wrong, "needs the sample of another step", token_from, newest)

    def advance(self, plan: ScheduledBatch, ends: NDArray[np.int64]) -> None:
        """Count the tokens of a plan as scheduled, up to these positions."""
        self.num_computed[self.snapshot(plan.rows).rows] = ends

    def put_drafts(self, row: int, draft_ids: Sequence[int]) -> None:
        """Speculative tokens, placed behind a row's known ones; the next sample overwrites them (row D7)."""
        self._ids.write(row, int(self.total_len[row]), draft_ids)

    def last_tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The newest known token of each row. [num_rows]"""
        return self.token_ids[rows, self.total_len[rows] - 1]

    def post_update(
        self,
        step_id: int,
        addressed: RowSnapshot,
        token_ids: Sequence[Sequence[int]],
        num_rejected: Sequence[int],
    ) -> None:
        """Write what a step sampled to its rows (row D6): ids, known length, scheduled length, rejections.

        Args:
            step_id: the step that sampled.
            addressed: its sampled rows, as they were when the plan was prepared.
            token_ids: accepted and sampled ids of each; [-1] where nothing could be sampled.
            num_rejected: drafts rejected of each.

        Rows that have changed hands since are skipped.
        """
        alive = self._still_held(addressed)
        rows, ids = addressed.rows[alive], _padded(token_ids)[alive]
        for column in ids.T:  # one column unless drafts were accepted
            known = rows
            if -1 in column.tolist():
                known, column = rows[column >= 0], column[column >= 0]
            positions = self.total_len[known]
            self.token_ids[known, positions] = column
            self.total_len[known] = positions + 1
        self._settle(step_id, rows, alive, num_rejected)

    def post_counts(
        self, step_id: int, addressed: RowSnapshot, num_ids: Sequence[int], num_rejected: Sequence[int]
    ) -> None:
        """Do the same as `post_update` where no ids are kept.

        Args:
            num_ids: how many ids were accepted and sampled of each.
        """
        alive = self._still_held(addressed)
        rows = addressed.rows[alive]
        self.total_len[rows] += np.array(num_ids, dtype=np.int64)[alive]
        self._settle(step_id, rows, alive, num_rejected)

    def _still_held(self, addressed: RowSnapshot) -> slice | NDArray[np.bool_]:
        """Return which rows the requests of the snapshot still hold: all, or one by one."""
        if addressed.num_changes == self._num_changes:
            return slice(None)
        alive: NDArray[np.bool_] = self.generation[addressed.rows] == addressed.generations
        return alive

    def _settle(
        self,
        step_id: int,
        rows: NDArray[np.int64],
        alive: slice | NDArray[np.bool_],
        num_rejected: Sequence[int],
    ) -> None:
        """Take back what was scheduled on rejected drafts, and note the step in the rows that are alive."""
        if any(num_rejected):
            rejected = np.array(num_rejected, dtype=np.int64)[alive]
            self.num_computed[rows] -= rejected
            self.num_rejected[rows] += rejected
            self.num_rejections += 1
        self.sampled_step[rows] = step_id

    def _check(self, plan: ScheduledBatch, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        held = self.snapshot(plan.rows)
        computed, room = self.num_computed[held.rows], self.num_blocks[held.rows] * self.block_size
        goes_on = held.is_held and KNOWN not in plan.token_from
        if goes_on and (computed == starts).all() and (ends <= room).all():
            return  # as at most steps
        self._refuse(plan, held.generations == _FREE, "holds no request")
        wrong = (computed != _NOT_STARTED) & (computed != starts)
        self._refuse(plan, wrong, "starts at a wrong position", starts, computed)
        known = self.total_len[held.rows]
        wrong = (np.array(plan.token_from, dtype=np.int64) == KNOWN) & (ends > known)
        self._refuse(plan, wrong, "has tokens that nobody knows yet", ends, known)
        self._refuse(plan, ends > room, "has no KV block for its last token", ends, room)

    def _refuse(
        self, plan: ScheduledBatch, wrong: NDArray[np.bool_], complaint: str, *pair: NDArray[np.int64]
    ) -> None:
        if not wrong.any():
            return
        index = int(np.argmax(wrong))
        row = plan.rows[index]
        numbers = f" (plan: {pair[0][index]}, row table: {pair[1][index]})" if pair else ""
        note = f" Residency of core and stage {plan.residency:#018x}." if plan.residency else ""  # they agree
        raise ProtocolError(
            f"step {plan.step_id}: row {row} of request {self.request_ids[row]!r} {complaint}{numbers}.{note}"
        )


def _padded(token_ids: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Ragged lists as [num_rows, longest], filled up with -1."""
    if all(len(ids) == 1 for ids in token_ids):
        return np.array(token_ids, dtype=np.int64).reshape(-1, 1)
    width = max(map(len, token_ids))
    padded = np.full((len(token_ids), width), -1, dtype=np.int64)
    for row, ids in enumerate(token_ids):
        padded[row, : len(ids)] = ids
    return padded
