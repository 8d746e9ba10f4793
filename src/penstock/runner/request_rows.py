"""The row table: what a rank knows about every running request, in arrays indexed by row.

Every rank keeps the same table and changes it in the same order: by the plans, and by the samples that come
back. The last stage writes its samples at once, the others when a plan consumes them. Once all samples are
consumed, all tables are equal [D3] [E6], except for the token ids: stages between the first and the last do
not keep them. `runner.forward_batch` reads the table to build a step. On the last stage `runner.model_runner`
writes the samples (`post_update`), on every other one `pipeline.token_return` (`post_update`, or
`post_counts` where no ids are kept). The table decides nothing and holds no tensor.

A row has two counts: `num_computed` counts tokens that have been *scheduled* (all drafts taken as accepted
until their rejection is consumed), `total_len` counts tokens that are *known*.

Steps go through the rows in plain loops over arrays of machine words. Every step streams all weights through
the CPU's caches, so that code is not in them when it runs. A loop over few rows then takes a fraction of the
time that calls of numpy take (docs/perf-log.md).
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
    """The rows of a step with the requests that held them, for samples that come later.

    Samples are written only to rows that the same requests still hold. A snapshot is never changed.
    """

    rows: NDArray[np.int64]  # [num_rows]
    places: tuple[int, ...]  # [num_rows] the same numbers, for plain loops
    generations: tuple[int, ...]  # [num_rows]
    request_ids: list[str]  # [num_rows]
    prompt_len: tuple[int, ...]  # [num_rows]
    num_changes: int  # how often a row of the table had got, lost or rewound a request by then

    def __len__(self) -> int:
        return len(self.places)

    def select(self, indices: Sequence[int]) -> RowSnapshot:
        """Return a snapshot of some of the rows, by their indices in this one."""
        return RowSnapshot(
            rows=self.rows[indices],
            places=tuple(self.places[index] for index in indices),
            generations=tuple(self.generations[index] for index in indices),
            request_ids=[self.request_ids[index] for index in indices],
            prompt_len=tuple(self.prompt_len[index] for index in indices),
            num_changes=self.num_changes,
        )


class TokenIds(Protocol):
    """The token ids of all rows; a stage that needs none keeps none."""

    @property
    def by_row(self) -> NDArray[np.int64]:
        """The ids by row and position, [num_rows, width] int64; width is 0 where none are kept."""
        ...

    def write(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        """Write ids to a row, from the position `start` on; where none are kept, do nothing."""
        ...

    def read(self, row: int, start: int, end: int) -> Sequence[int]:
        """Return the ids of a row at positions from `start` to before `end`; an error where none are kept."""
        ...

    def is_other(self, row: int, position: int, token_id: int) -> bool:
        """Return whether the id at a row's position differs from `token_id`; False where none are kept."""
        ...


class KeptIds:
    """The token ids of all rows, on stages that need them.

    The first stage embeds them; the last one counts them for penalties, and scores those of prompts.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        # Zeros: untouched pages of a long context take no memory, and zero is a valid token id.
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
    """A stand-in that keeps no token ids, for stages between the first and the last, which read none."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.by_row = np.zeros((num_rows, 0), dtype=np.int64)

    def write(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        """Do nothing: this stage keeps no token ids."""

    def read(self, row: int, start: int, end: int) -> Sequence[int]:
        raise AssertionError("this stage keeps no token ids")

    def is_other(self, row: int, position: int, token_id: int) -> bool:
        return False


class RequestRows:
    """The row table of one rank: the state of each running request, in arrays indexed by row.

    Args:
        num_rows: most requests that hold a row at once.
        max_model_len: longest prompt + output in tokens.
        block_size: tokens per KV block.
        max_drafts: most drafts (guessed tokens) that one row may have beyond its known tokens.
        ids: class of the object that keeps the token ids: `KeptIds` or `NoIds`.
        state: state besides the KV cache that layers carry for each row.
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
        self.num_rejected = array("q", [0]) * num_rows  # drafts rejected since the row was added or rewound
        self.generation = array("q", [_FREE]) * num_rows
        self.sampled_step = array("q", [KNOWN]) * num_rows  # step whose sample was consumed last
        self.request_ids = [""] * num_rows
        self._live_from = array("q", [0]) * num_rows  # samples of earlier steps are void
        self._strayed: set[int] = set()  # rows with a wrong guess, until a plan goes on from a sampled token
        self._has_rejected = False  # whether drafts of any row were rejected in this epoch
        self._num_changes = 0  # how often any row got, lost or rewound a request
        self._snapshots: KeptViews[tuple[int, ...], RowSnapshot] = KeptViews(self._snapshot)

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The ids of each row's tokens by position, [num_rows, width] int64; width 0 where none are kept."""
        return self._ids.by_row

    def reset(self) -> None:
        """Free all rows, as at the start, since another epoch begins.

        Step numbers may be lower in it: a new core does not know how many steps there were.
        """
        for row in range(len(self.generation)):
            self.generation[row] = _FREE
            self._live_from[row] = 0
        self._has_rejected = False
        self._strayed.clear()
        self._changes_hands()

    def apply(self, plan: ScheduledBatch) -> None:
        """Apply a plan's freed rows, then its new ones, then those that it rewinds after a wrong guess."""
        for row in plan.freed_rows:
            self.free(row)
        for new_row in plan.new_rows:
            self.add(new_row)
        for rewound in plan.rewound:
            self._rewind(rewound, plan.step_id)

    def free(self, row: int) -> None:
        """Free the row of a request that has left it; samples still to come for it are dropped [E7]."""
        self.generation[row] = _FREE
        self._state.drop(row)
        self._changes_hands()

    def add(self, new: NewRow) -> None:
        """Add a request in its row, with its known tokens: its prompt, and outputs if it starts again."""
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
        """Set the row back to its newest sampled token; samples of steps before `step_id` no longer count."""
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
        """Append the plan's new KV blocks to the block tables of its rows."""
        for row, blocks in zip(plan.rows, plan.new_blocks, strict=True):
            if blocks:
                self.tables.append(row, blocks)

    def known_ids(self, row: int, start: int, end: int) -> Sequence[int]:
        """Return a row's ids, guesses included, from position `start` to before `end`: all are known."""
        return self._ids.read(row, start, end)

    def snapshot(self, rows: Sequence[int]) -> RowSnapshot:
        """Return which requests hold these rows now.

        The same object is returned until any row gets, loses or rewinds a request.
        """
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
        """Return the ids of the requests that a plan runs.

        The plan may not be applied yet, and may be wrong: rows that do not exist or hold no request are left
        out.
        """
        entering = {new.row: new.request_id for new in plan.new_rows}
        known = dict(enumerate(self.request_ids)) | entering
        return [known[row] for row in plan.rows if known.get(row)]

    def span_of(self, plan: ScheduledBatch) -> tuple[list[int], list[int]]:
        """Return `accepted_span_of`; raise `ProtocolError` if core and rank disagree on a row's tokens."""
        starts, ends = self.accepted_span_of(plan)
        self._check(plan, starts, ends)
        return starts, ends

    def accepted_span_of(self, plan: ScheduledBatch) -> tuple[list[int], list[int]]:
        """Return the true positions of the plan's tokens: of each row's first one, and behind its last one.

        The core makes plans as if all drafts (guessed tokens) were accepted. This subtracts the rejected
        drafts of which the rank knows. Returns two lists, [num_rows].
        """
        starts = plan.start_positions
        if self._has_rejected:
            starts = [start - self.num_rejected[row] for row, start in zip(plan.rows, starts, strict=True)]
        return starts, [start + count for start, count in zip(starts, plan.num_tokens, strict=True)]

    def fitted(self, plan: ScheduledBatch, starts: list[int]) -> list[int]:
        """Return the first positions `starts` of the rows, lowered where a row lacks KV blocks for them.

        A row lacks blocks if the core knew of rejected drafts (wrong guesses) before this rank did: the true
        position is lower. The inputs are built anew once the rank has consumed the rejection.
        """
        rooms = [self.tables.room(row) for row in plan.rows]
        spans = zip(starts, plan.num_tokens, rooms, strict=True)
        return [max(0, min(start, room - count)) for start, count, room in spans]

    def check_room(self, plan: ScheduledBatch, ends: Sequence[int]) -> None:
        """Raise `ProtocolError` if a row lacks KV blocks for a position below its one in `ends`."""
        for index, row in enumerate(plan.rows):
            if ends[index] > (room := self.tables.room(row)):
                raise self._refusal(plan, index, "has no KV block for its last token", ends[index], room)

    def check_sources(self, plan: ScheduledBatch) -> None:
        """Raise `ProtocolError` if the plan lets a row consume a sample other than the row's newest."""
        for index, step in enumerate(plan.token_from):
            newest = self.sampled_step[plan.rows[index]]
            if step not in (KNOWN, GUESSED, newest):
                raise self._refusal(plan, index, "needs the sample of a different step", step, newest)

    def advance(self, plan: ScheduledBatch, ends: Sequence[int]) -> None:
        """Count the tokens of a plan as scheduled: each row's positions below its one in `ends`."""
        for row, end in zip(plan.rows, ends, strict=True):
            self.num_computed[row] = end

    def run(self, plan: ScheduledBatch, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Tell the rows' other state (`RowState`) that the plan's tokens are computed, at these positions."""
        self._state.step(plan.rows, starts, ends, plan.need_sampled)

    def put_drafts(self, row: int, end: int, draft_ids: Sequence[int]) -> None:
        """Write drafts (guesses) to a row's last positions before `end`; samples overwrite them [D7]."""
        self._ids.write(row, end - len(draft_ids), draft_ids)

    def is_void(self, plan: ScheduledBatch, starts: Sequence[int]) -> bool:
        """Return whether the plan rests on a wrong guess, so that its results mean nothing.

        That is so if the plan's input is a guess and another token was sampled in its place, or if the plan
        follows such a plan.

        The last stage always finds that out, and before the core does, since its table has the samples of all
        earlier steps. Another stage finds it out only if a plan of another row made it consume these samples.

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

    def post_update(
        self,
        step_id: int,
        addressed: RowSnapshot,
        token_ids: Sequence[Sequence[int]],
        num_rejected: Sequence[int],
    ) -> None:
        """Write what a step sampled to its rows [D6]: ids, known length, scheduled length, rejections.

        Rows that have got another request since, or were rewound after a wrong guess, are skipped.

        Args:
            step_id: the step that sampled.
            addressed: its sampled rows, as they were when the plan was prepared.
            token_ids: accepted and sampled ids of each row; [-1]: nothing could be sampled; []: the step was
                void.
            num_rejected: drafts (guessed tokens) of each row that were rejected.
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
            num_ids: how many ids of each row were accepted and sampled.
        """
        for index, row in self._still_held(step_id, addressed):
            self.total_len[row] += num_ids[index]
            self._settle(step_id, row, num_rejected[index])
        self._has_rejected = self._has_rejected or any(num_rejected)

    def _still_held(self, step_id: int, addressed: RowSnapshot) -> Iterator[tuple[int, int]]:
        """Yield (index in the snapshot, row) of the rows that the snapshot's requests still hold.

        Rows that were rewound since the step are left out.
        """
        if addressed.num_changes == self._num_changes:
            yield from enumerate(addressed.places)
            return
        for index, (row, generation) in enumerate(zip(addressed.places, addressed.generations, strict=True)):
            if self.generation[row] == generation and step_id >= self._live_from[row]:
                yield index, row

    def _settle(self, step_id: int, row: int, num_rejected: int) -> None:
        """Subtract the rejected drafts of a row from its scheduled tokens, and note the step."""
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
