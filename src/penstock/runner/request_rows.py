"""The row table: what a rank knows about every running request, in arrays indexed by row.

Every rank keeps the same table and changes it in the same order: by the plans, and by the samples that come
back. The last stage writes its samples at once, the others when a plan consumes them; at rest all tables are
equal (rows D3, E6), but for the token ids, which a stage that neither embeds nor samples does not keep.
`runner.forward_batch` reads it to build a step; `pipeline.token_return` and the last stage's sink write
samples through `post_update`, or `post_counts` where no ids are kept. Decides nothing and holds no tensor.

Two clocks: `num_computed` counts tokens that have been *scheduled* (all drafts taken as accepted until their
rejection is consumed), `total_len` counts tokens that are *known*.

Steps go through the rows in plain loops over arrays of machine words. Every step streams all weights through
the caches, so that code is cold when it runs, and a loop over few rows is a fraction of what as many calls of
numpy need (docs/perf-log.md).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.batch import GUESSED, KNOWN, NewRow, RewoundRow, ScheduledBatch
from penstock.errors import ProtocolError
from penstock.kernels.views import KeptViews, words_of
from penstock.runner.block_tables import BlockTables
from penstock.runner.row_state import NO_STATE, RowState

_FREE = -1  # generation of a row that no request holds
_NOT_STARTED = -1  # num_computed until the first plan says where the request starts


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSnapshot:
    """The rows of a step with the requests that held them: the address of samples that come later.

    It is never changed.
    """

    rows: NDArray[np.int64]  # [num_rows]
    places: tuple[int, ...]  # [num_rows] the same rows
    generations: tuple[int, ...]  # [num_rows]
    request_ids: list[str]  # [num_rows]
    prompt_len: tuple[int, ...]  # [num_rows]
    num_changes: int  # of hands, of any row, that the row table had seen then

    def __len__(self) -> int:
        return len(self.places)

    def select(self, indices: Sequence[int]) -> RowSnapshot:
        """Return some of the rows, by their indices in this snapshot."""
        return RowSnapshot(
            rows=self.rows[indices],
            places=tuple(self.places[index] for index in indices),
            generations=tuple(self.generations[index] for index in indices),
            request_ids=[self.request_ids[index] for index in indices],
            prompt_len=tuple(self.prompt_len[index] for index in indices),
            num_changes=self.num_changes,
        )


class TokenIds(Protocol):
    """The token ids of all rows, where a stage keeps them."""

    @property
    def by_row(self) -> NDArray[np.int64]:
        """The ids as [num_rows, width]; width 0 where none are kept."""
        ...

    def write(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        """Write ids to a row, from the position `start` on."""
        ...

    def read(self, row: int, start: int, end: int) -> Sequence[int]:
        """Return the ids of a row at positions from `start` to before `end`."""
        ...

    def is_other(self, row: int, position: int, token_id: int) -> bool:
        """Return whether the known id at a position differs; False where none are kept."""
        ...


class KeptIds:
    """The ids on the first stage, which embeds them, and on the last, which counts and scores them."""

    def __init__(self, num_rows: int, width: int) -> None:
        # zeros, not empty: untouched pages of a long context cost no memory, and stay valid token ids.
        self.by_row = np.zeros((num_rows, width), dtype=np.int64)
        self._words, self._width = words_of(self.by_row), width

    def write(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        first = row * self._width + start
        self._words[first : first + len(token_ids)] = array("q", token_ids)

    def read(self, row: int, start: int, end: int) -> Sequence[int]:
        first = row * self._width
        return self._words[first + start : first + end]

    def is_other(self, row: int, position: int, token_id: int) -> bool:
        return self._words[row * self._width + position] != token_id


class NoIds:
    """The stand-in for ids on a stage between the first and the last, which reads none."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.by_row = np.zeros((num_rows, 0), dtype=np.int64)

    def write(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        """Do nothing."""

    def read(self, row: int, start: int, end: int) -> Sequence[int]:
        raise AssertionError("this stage keeps no token ids")

    def is_other(self, row: int, position: int, token_id: int) -> bool:
        return False


class RequestRows:
    """The state of all rows of one rank.

    Args:
        num_rows: requests that hold a row at once.
        max_model_len: longest prompt + output in tokens.
        block_size: tokens per KV block.
        max_drafts: speculative tokens that one row may have beyond its known ones.
        ids: makes what keeps the token ids, given the rows and the width: `KeptIds` or `NoIds`.
        state: that rows carry besides, if any layer has one.
    """

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        max_drafts: int = 0,
        ids: Callable[[int, int], TokenIds] = KeptIds,
        state: RowState = NO_STATE,
    ) -> None:
        width = max_model_len + 1 + max_drafts
        self._ids = ids(num_rows, width)
        self._state = state
        self.tables = BlockTables(num_rows, -(-width // block_size), block_size)
        self.prompt_len = np.zeros(num_rows, dtype=np.int64)
        self.total_len = array("q", [0]) * num_rows  # known tokens
        self.num_computed = array("q", [_NOT_STARTED]) * num_rows  # scheduled tokens
        self.num_rejected = array("q", [0]) * num_rows  # drafts rejected since the row was added
        self.generation = array("q", [_FREE]) * num_rows
        self.sampled_step = array("q", [KNOWN]) * num_rows  # step whose sample was consumed last
        self.request_ids = [""] * num_rows
        self._live_from = array("q", [0]) * num_rows  # samples of earlier steps are void
        self._strayed: set[int] = set()  # rows with a wrong guess, until they go on from what was sampled
        self._has_rejected = False  # whether drafts of any row were rejected, ever
        self._num_changes = 0  # of hands, of any row
        self._snapshots: KeptViews[tuple[int, ...], RowSnapshot] = KeptViews(self._snapshot)

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The known tokens at their positions, [num_rows, width], on a stage that keeps them."""
        return self._ids.by_row

    def reset(self) -> None:
        """Free all rows, as at the start.

        Steps may be counted anew: another core does not know how many there were.
        """
        for row in range(len(self.generation)):
            self.generation[row] = _FREE
            self._live_from[row] = 0
        self._has_rejected = False
        self._strayed.clear()
        self._changes_hands()

    def apply(self, plan: ScheduledBatch) -> None:
        """Apply the first parts of a plan: freed rows, then new ones, then those that are rewound."""
        for row in plan.freed_rows:
            self.free(row)
        for new_row in plan.new_rows:
            self.add(new_row)
        for rewound in plan.rewound:
            self._rewind(rewound, plan.step_id)

    def free(self, row: int) -> None:
        """Free a row whose request has ended; samples that are still to come for it are dropped (row E7)."""
        self.generation[row] = _FREE
        self._state.drop(row)
        self._changes_hands()

    def add(self, new: NewRow) -> None:
        """Add a request, or one that enters again with what it had generated before a preemption."""
        row = new.row
        self._ids.write(row, 0, new.token_ids)
        self.tables.set(row, new.blocks)
        self.prompt_len[row] = new.prompt_len
        self.total_len[row] = len(new.token_ids)
        self.num_computed[row] = new.start if new.blocks else _NOT_STARTED
        self.num_rejected[row] = 0
        self.generation[row] = new.generation
        self.sampled_step[row] = KNOWN
        self.request_ids[row] = new.request_id
        self._state.begin(row)
        self._changes_hands()

    def _rewind(self, rewound: RewoundRow, step_id: int) -> None:
        """Let the row go on from here; awaited samples of steps before `step_id` are dropped."""
        row, num_tokens = rewound.row, rewound.num_tokens
        self._ids.write(row, num_tokens - len(rewound.newest_ids), rewound.newest_ids)
        self.total_len[row] = num_tokens
        self.num_computed[row] = num_tokens - 1
        self.num_rejected[row] = 0
        self.sampled_step[row] = rewound.step
        self._live_from[row] = step_id
        self._state.rewind(row, num_tokens - 1)
        self._changes_hands()

    def _changes_hands(self) -> None:
        self._num_changes += 1
        self._snapshots.clear()

    def append_blocks(self, plan: ScheduledBatch) -> None:
        """Add the plan's new blocks to the ends of the block tables."""
        for row, blocks in zip(plan.rows, plan.new_blocks, strict=True):
            if blocks:
                self.tables.append(row, blocks)

    def known_ids(self, row: int, start: int, end: int) -> Sequence[int]:
        """Return the ids of a row, drafts included, at positions from `start` to before `end`."""
        return self._ids.read(row, start, end)

    def snapshot(self, rows: Sequence[int]) -> RowSnapshot:
        """Return which requests hold these rows now; it is reused until a row gets another request."""
        return self._snapshots.of(tuple(rows))

    def _snapshot(self, places: tuple[int, ...]) -> RowSnapshot:
        rows = np.array(places, dtype=np.int64)
        return RowSnapshot(
            rows=rows,
            places=places,
            generations=tuple(self.generation[row] for row in places),
            request_ids=[self.request_ids[row] for row in places],
            prompt_len=tuple(self.prompt_len[rows].tolist()),
            num_changes=self._num_changes,
        )

    def names_of(self, plan: ScheduledBatch) -> list[str]:
        """Return the requests of a plan that may not be applied yet, and may be wrong.

        Rows that do not exist or hold no request are left out.
        """
        entering = {new.row: new.request_id for new in plan.new_rows}
        known = dict(enumerate(self.request_ids)) | entering
        return [known[row] for row in plan.rows if known.get(row)]

    def span_of(self, plan: ScheduledBatch) -> tuple[list[int], list[int]]:
        """Return what `accepted_span_of` does; raise `ProtocolError` if core and rank disagree on a row."""
        starts, ends = self.accepted_span_of(plan)
        self._check(plan, starts, ends)
        return starts, ends

    def accepted_span_of(self, plan: ScheduledBatch) -> tuple[list[int], list[int]]:
        """Return the true position of each row's first token, and behind its last.

        Both are [num_rows]: the plan's positions, less the rejections consumed.
        """
        starts = plan.start_positions
        if self._has_rejected:
            starts = [start - self.num_rejected[row] for row, start in zip(plan.rows, starts, strict=True)]
        return starts, [start + count for start, count in zip(starts, plan.num_tokens, strict=True)]

    def fitted(self, plan: ScheduledBatch, starts: list[int]) -> list[int]:
        """Return the positions, or, of rows without the blocks for them, the last ones that fit.

        Rejections that are to be consumed may bring a row back to where it has blocks: the core knew of them
        when it made the plan. What is built meanwhile with other positions is built anew then.
        """
        rooms = [self.tables.room(row) for row in plan.rows]
        spans = zip(starts, plan.num_tokens, rooms, strict=True)
        return [max(0, min(start, room - count)) for start, count, room in spans]

    def check_room(self, plan: ScheduledBatch, ends: Sequence[int]) -> None:
        """Raise `ProtocolError` unless each row has the blocks of its tokens."""
        for index, row in enumerate(plan.rows):
            if ends[index] > (room := self.tables.room(row)):
                raise self._refusal(plan, index, "has no KV block for its last token", ends[index], room)

    def check_sources(self, plan: ScheduledBatch) -> None:
        """Raise `ProtocolError` unless each row's newest sample is that of the step which the plan names."""
        for index, step in enumerate(plan.token_from):
            newest = self.sampled_step[plan.rows[index]]
            if step not in (KNOWN, GUESSED, newest):
                raise self._refusal(plan, index, "needs the sample of a different step", step, newest)

    def advance(self, plan: ScheduledBatch, ends: Sequence[int]) -> None:
        """Count the tokens of a plan as scheduled, up to these positions."""
        for row, end in zip(plan.rows, ends, strict=True):
            self.num_computed[row] = end

    def run(self, plan: ScheduledBatch, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Note that the tokens of a plan are computed now, at these true positions."""
        self._state.step(plan.rows, starts, ends, plan.need_sampled)

    def put_drafts(self, row: int, end: int, draft_ids: Sequence[int]) -> None:
        """Place speculative tokens behind a row's known ones and before `end`.

        What is sampled in their places overwrites them (row D7).
        """
        self._ids.write(row, end - len(draft_ids), draft_ids)

    def is_void(self, plan: ScheduledBatch, starts: Sequence[int]) -> bool:
        """Return whether the plan is a window behind a wrong guess.

        Its input was guessed then, and is not what was sampled, or follows what was not.

        The last stage finds out in any case, and before the core does: samples of all earlier steps are in
        its table. Other stages do if another row had them consume these.

        Args:
            starts: [num_rows] true positions of the first tokens.
        """
        if self._strayed:
            on_course = [row for row, step in zip(plan.rows, plan.token_from, strict=True) if step != GUESSED]
            self._strayed.difference_update(on_course)
        if GUESSED not in plan.token_from:
            return False
        if len(plan.rows) > 1:
            raise self._refusal(
                plan,
                plan.token_from.index(GUESSED),
                "has a guessed input but shares the plan with other rows",
            )
        row, start = plan.rows[0], starts[0]
        if start < self.total_len[row] and self._ids.is_other(row, start, plan.drafts[0][0]):
            self._strayed.add(row)
        return row in self._strayed

    def last_tokens(self, rows: Sequence[int]) -> list[int]:
        """Return the newest known token of each row, [num_rows]."""
        return [int(self.token_ids[row, self.total_len[row] - 1]) for row in rows]

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
            token_ids: accepted and sampled ids of each; [-1] where nothing could be sampled; none of a window
                that was void.
            num_rejected: drafts rejected of each.

        Rows that have changed hands since are skipped.
        """
        for index, row in self._still_held(step_id, addressed):
            for token_id in token_ids[index]:
                if token_id >= 0:
                    self._ids.write(row, self.total_len[row], (token_id,))
                    self.total_len[row] += 1
            self._settle(step_id, row, num_rejected[index])
        self._has_rejected = self._has_rejected or any(num_rejected)

    def post_counts(
        self, step_id: int, addressed: RowSnapshot, num_ids: Sequence[int], num_rejected: Sequence[int]
    ) -> None:
        """Write the counts of what a step sampled, as `post_update` does, where no ids are kept.

        Args:
            num_ids: how many ids were accepted and sampled of each.
        """
        for index, row in self._still_held(step_id, addressed):
            self.total_len[row] += num_ids[index]
            self._settle(step_id, row, num_rejected[index])
        self._has_rejected = self._has_rejected or any(num_rejected)

    def _still_held(self, step_id: int, addressed: RowSnapshot) -> Iterator[tuple[int, int]]:
        """Yield the rows that still belong to the snapshot's requests, each behind its index there.

        Rows that were rewound since the step are left out.
        """
        if addressed.num_changes == self._num_changes:
            yield from enumerate(addressed.places)
            return
        for index, (row, generation) in enumerate(zip(addressed.places, addressed.generations, strict=True)):
            if self.generation[row] == generation and step_id >= self._live_from[row]:
                yield index, row

    def _settle(self, step_id: int, row: int, num_rejected: int) -> None:
        """Take back what was scheduled on rejected drafts, and note the step."""
        self.num_computed[row] -= num_rejected
        self.num_rejected[row] += num_rejected
        self._state.commit(row, num_rejected)
        if num_rejected:
            self._strayed.add(row)
        self.sampled_step[row] = step_id

    def _check(self, plan: ScheduledBatch, starts: Sequence[int], ends: Sequence[int]) -> None:
        for index, row in enumerate(plan.rows):
            start, end, computed = starts[index], ends[index], self.num_computed[row]
            if self.generation[row] == _FREE:
                raise self._refusal(plan, index, "holds no request")
            if computed not in (start, _NOT_STARTED):
                raise self._refusal(plan, index, "starts at a wrong position", start, computed)
            known = self.total_len[row]
            if end > known and plan.token_from[index] == KNOWN:
                raise self._refusal(plan, index, "has tokens that are not known yet", end, known)

    def _refusal(self, plan: ScheduledBatch, index: int, complaint: str, *pair: int) -> ProtocolError:
        row = plan.rows[index]
        numbers = f" (plan: {pair[0]}, row table: {pair[1]})" if pair else ""
        note = f" Residency of core and stage {plan.residency:#018x}." if plan.residency else ""  # they agree
        return ProtocolError(
            f"step {plan.step_id}: row {row} of request {self.request_ids[row]!r} {complaint}{numbers}.{note}"
        )
