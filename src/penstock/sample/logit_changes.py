"""The penalties and biases of all rows on the last stage, as a sparse list of changes to logits.

For a token with logit l, which has been generated `count` times:

    l'  = l / repetition if l > 0, else l * repetition, if it is in the prompt or was generated; otherwise l
    l'' = l' + bias - frequency * count - presence * (count > 0)

and minus infinity for an id that `min_tokens` suppresses, or that would complete a bad word. The repetition
penalty is that of Keskar et al., "CTRL" (2019), as transformers and vLLM have it. The other two penalties are
OpenAI's, and count generated tokens alone. In transformers and vLLM a bias is added first, and then divided
or multiplied by the repetition penalty. Here it is added after that penalty, so that it has the same effect
on every token. l' is rounded to float32; what is added to it is summed in double precision and rounded once.

Generated tokens are counted by the row table, up to the token that is being sampled. So a request that starts
again, after a preemption or on another core, gets the same counts. Drafts (`sample.windows`) count as if they
had been generated, for the samples behind them alone. A small state object of `sample.sampling_rows`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.batch import LogitChanges, RowSampling
from penstock.kernels.candidates import SparseBias
from penstock.sample.bad_words import BadWords

# A lower repetition penalty counts as this one: it makes a token as good as certain, and with a lower one the
# logit could overflow.
LEAST_REPETITION_PENALTY = 1e-6
_UNCHANGED = LogitChanges()
_FIRST_ROOM = 64  # least number of entries for which a row has memory

# (ids, what is added, what the logit is divided or multiplied by), each [num_entries]
Entries = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHistory:
    """The arrays of the row table itself, not copies: prompts and generated tokens, by row."""

    token_ids: NDArray[np.int64]  # [num_rows, width]
    prompt_len: NDArray[np.int64]  # [num_rows]


class ChangedRow:
    """The changes of one request's logits, as an entry for each token id whose logit may change.

    Args:
        changes: what the request asked for.
        suppressed_ids: ids that are forbidden until `min_tokens` tokens are generated.
    """

    def __init__(self, changes: LogitChanges, suppressed_ids: Sequence[int]) -> None:
        self._changes = changes
        self._suppressed = np.unique(np.array(suppressed_ids, dtype=np.int64))
        self._repetition = np.float32(max(changes.repetition_penalty, LEAST_REPETITION_PENALTY))
        penalties = changes.repetition_penalty, changes.presence_penalty, changes.frequency_penalty
        self._bad_words = BadWords(changes.bad_words)
        self._forbidden = self._bad_words.forbidden(np.zeros(0, dtype=np.int64))
        self._has_penalties = penalties != (1.0, 0.0, 0.0)
        self._counts: Counter[int] = Counter()  # by id: generated tokens, and the drafts in `_drafts`
        self._in_prompt: frozenset[int] = frozenset()  # ids of the prompt, if there is a repetition penalty
        self._num_read = 0  # tokens of the history that are counted
        self._drafts: list[int] = []  # drafts that are counted beside them, until the next `read`
        self._set_entries(set())

    @property
    def always_counts(self) -> bool:
        """Whether logits are changed even after `min_tokens` tokens."""
        return self._changes is not _UNCHANGED

    def read(self, known: NDArray[np.int64], prompt_len: int, num_drafts: int = 0) -> None:
        """Count the tokens that have come since the last call.

        Args:
            known: [num_known] prompt, then output, then drafts.
            num_drafts: number of drafts at the end of `known`; the next call takes them back.
        """
        self._forbidden = self._bad_words.forbidden(known[prompt_len:])
        if not self._has_penalties:
            return
        num_certain = len(known) - num_drafts
        for token_id in self._drafts:
            self._note(token_id, -1)
        fresh = known[self._num_read : num_certain].tolist()
        if self._num_read == 0:
            self._counts.update(fresh[prompt_len:])
            self._in_prompt = frozenset(fresh[:prompt_len] if self._repetition != 1 else ())
            self._set_entries(self._counts.keys() | self._in_prompt)
        else:
            for token_id in fresh:
                self._note(token_id, 1)
        self._num_read, self._drafts = num_certain, known[num_certain:].tolist()
        for token_id in self._drafts:
            self._note(token_id, 1)

    def entries(self, *, is_early: bool) -> Entries:
        """Return the entries for the tokens that were read; views until the next call.

        Args:
            is_early: fewer than `min_tokens` tokens are generated.
        """
        ids, values = self._ids[: self._num], self._values[: self._num]
        suppressed = self._suppressed if is_early else self._suppressed[:0]
        if len(suppressed) or len(self._forbidden):
            values = values.copy()
            values[ids.searchsorted(suppressed)] = -np.inf
            values[ids.searchsorted(self._forbidden)] = -np.inf
        return ids, values, self._scales[: self._num]

    def _set_entries(self, seen: Iterable[int]) -> None:
        """Make an entry for each id that was seen, that has a bias, or that may be forbidden."""
        seen = set(seen)
        others = self._changes.bias.keys() | set(self._suppressed.tolist()) | set(self._bad_words.last_ids)
        ids = sorted(seen | others)
        self._num = len(ids)
        room = max(_FIRST_ROOM, 2 * self._num)
        self._ids = np.zeros(room, dtype=np.int64)
        self._values = np.zeros(room, dtype=np.float32)
        self._scales = np.ones(room, dtype=np.float32)
        self._ids[: self._num] = ids
        self._values[: self._num] = [self._value(token_id) for token_id in ids]
        self._scales[: self._num] = [self._repetition if token_id in seen else 1 for token_id in ids]

    def _note(self, token_id: int, times: int) -> None:
        """Add `times`, 1 or -1, to the count of a generated token or a draft."""
        self._counts[token_id] += times
        index = bisect_left(self._ids, token_id, 0, self._num)
        if index == self._num or self._ids[index] != token_id:
            self._make_room(index)
            self._ids[index] = token_id
        is_seen = self._counts[token_id] > 0 or token_id in self._in_prompt
        self._values[index] = self._value(token_id)
        self._scales[index] = self._repetition if is_seen else 1

    def _make_room(self, index: int) -> None:
        """Make room for one more entry, before the entry at `index`."""
        end = self._num
        if end == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._values = np.concatenate([self._values, np.zeros_like(self._values)])
            self._scales = np.concatenate([self._scales, np.zeros_like(self._scales)])
        for array in (self._ids, self._values, self._scales):
            array[index + 1 : end + 1] = array[index:end]
        self._num += 1

    def _value(self, token_id: int) -> float:
        changes, count = self._changes, self._counts[token_id]
        bias = changes.bias.get(token_id, 0.0)
        return bias - changes.frequency_penalty * count - changes.presence_penalty * (count > 0)


class LogitChangesOfRows:
    """The changes of the logits of all rows of a rank.

    Args:
        history: tokens of the same rows; read when a row is sampled.
    """

    def __init__(self, num_rows: int, history: TokenHistory) -> None:
        self._history = history
        self._rows: list[ChangedRow | None] = [None] * num_rows

    def add(self, row: int, sampling: RowSampling) -> bool:
        """Take a request that enters `row`; return whether its logits are changed even after `min_tokens`."""
        changed = None
        if sampling.changes is not None or sampling.min_tokens > 0:
            changed = ChangedRow(sampling.changes or _UNCHANGED, sampling.suppressed_ids)
        self._rows[row] = changed
        return changed is not None and changed.always_counts

    def bias(
        self, rows: NDArray[np.int64], output_index: NDArray[np.int64], is_early: NDArray[np.bool_]
    ) -> SparseBias:
        """Return the changes of the logits of `rows`.

        Args:
            rows: [num_samples] the row of each sample; a row with drafts is there several times in a row.
            output_index: [num_samples] tokens that the request has generated before, drafts counted in.
            is_early: [num_samples] whether these are fewer than its `min_tokens`.
        """
        starts = np.zeros(len(rows) + 1, dtype=np.int64)
        parts = []
        table, num_known = self._history, self._history.prompt_len[rows] + output_index
        num_certain: dict[int, int] = {}  # by row: the known tokens before its first sample, without drafts
        for index, row in enumerate(rows.tolist()):
            changed, early = self._rows[row], bool(is_early[index])
            if changed is None or not (early or changed.always_counts):
                continue
            end = int(num_known[index])
            num_drafts = end - num_certain.setdefault(row, int(table.prompt_len[row] + output_index[index]))
            changed.read(table.token_ids[row, :end], int(table.prompt_len[row]), num_drafts)
            entries = changed.entries(is_early=early)
            parts.append(entries if len(num_certain) == len(rows) else tuple(map(np.copy, entries)))
            starts[index + 1] = len(parts[-1][0])
        if not parts:
            return SparseBias.none(len(rows))
        ids, values, scales = (np.concatenate(part) for part in zip(*parts, strict=True))
        return SparseBias(starts=starts.cumsum(), ids=ids, values=values, scales=scales)
