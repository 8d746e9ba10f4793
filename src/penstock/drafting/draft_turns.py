"""Decides for which requests a draft model computes next, and keeps the tokens that it guesses.

The model computes in turns. Each turn is one step over the texts (requests) that have work. A text computes
tokens that it lacks keys and values for; if these are all, the step also guesses the next token. Guesses that
turn out right stay as they are, with their keys and values, so that a text which is guessed well costs one
token for each guess:

    known     a b c                    a b c d e              a b c d e h
    guessed         d e f g                    f g                        …   f was wrong: what follows h
    computed  ^^^^^^^^^^^ (all but g)                                        is guessed again

A text has a row and blocks while there is room. If there is none, the text that was asked about longest ago
loses both, and its tokens are computed again when it is next asked about.

Called by `drafting.drafter_process`, which has the model. Pure bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

from penstock.batch import GREEDY, KNOWN, LogitChanges, NewRow, RowSampling, ScheduledBatch
from penstock.drafting.draft_wire import Ask, Asked, Guess
from penstock.kvcache.allocator import BlockAllocator

_NO_ROW = -1


@dataclass(slots=True, kw_only=True, eq=False)
class _Text:
    """The text of one request.

    Attributes:
        request: its arrival number.
        prompt_len: tokens of its prompt.
        sampling: how its guesses are chosen.
        token_ids: the known tokens, and behind them the guesses.
        num_known: how many of `token_ids` are known.
        num_computed: how many of `token_ids` have their keys and values in its blocks.
        wanted: how many guesses it should have.
        is_cut: more guesses were asked for than fit behind its tokens.
        is_foreign: it has ids that this model does not have, so nothing is guessed for it.
        asked_at: number of the newest `Ask` about it.
        row: row in the row table, or `_NO_ROW`.
        blocks: blocks that hold its keys and values.
        is_entered: the row table has all of its tokens.
    """

    request: int
    prompt_len: int
    sampling: RowSampling
    token_ids: list[int] = field(default_factory=list)
    num_known: int = 0
    num_computed: int = 0
    wanted: int = 0
    is_cut: bool = False
    is_foreign: bool = False
    asked_at: int = 0
    row: int = _NO_ROW
    blocks: list[int] = field(default_factory=list)
    is_entered: bool = False

    @property
    def num_missing(self) -> int:
        """The number of tokens to compute until the next one can be guessed."""
        return len(self.token_ids) - self.num_computed

    @property
    def guesses(self) -> list[int]:
        return self.token_ids[self.num_known :]

    @property
    def has_work(self) -> bool:
        return self.num_known > 0 and len(self.token_ids) - self.num_known < self.wanted

    def learn(self, token_ids: list[int]) -> None:
        """Take the tokens that have come behind the known ones; right guesses keep their keys and values."""
        guessed, end = self.guesses, self.num_known + len(token_ids)
        right = 0
        while right < min(len(guessed), len(token_ids)) and guessed[right] == token_ids[right]:
            right += 1
        if right < len(token_ids):
            del self.token_ids[self.num_known + right :]
            self.token_ids += token_ids[right:]
            self.num_computed = min(self.num_computed, self.num_known + right)
            self.is_entered = False
        self.num_known = end


class DraftTurns:
    """The texts of one draft model.

    Args:
        forward: runs a plan, and returns the id sampled for each sampled row; -1: none could be sampled.
        allocator: gives out the draft model's blocks.
        num_rows: rows of the draft model's row table.
        max_len: most tokens of a text, guesses included.
        max_tokens: most tokens of a plan.
        vocab_size: number of ids of the model whose tokens are guessed; a guess must be below it.
        own_vocab_size: number of ids of the draft model; nothing is guessed for a text with an id that is not
            below it. None: as `vocab_size`.
    """

    def __init__(
        self,
        forward: Callable[[ScheduledBatch], list[int]],
        allocator: BlockAllocator,
        *,
        num_rows: int,
        max_len: int,
        max_tokens: int,
        vocab_size: int,
        own_vocab_size: int | None = None,
    ) -> None:
        self._own_vocab_size = own_vocab_size or vocab_size
        self._forward = forward
        self._allocator = allocator
        self._max_len = min(max_len, allocator.capacity_tokens)
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._texts: dict[int, _Text] = {}
        self._free_rows = list(range(num_rows))
        self._new_blocks: dict[int, list[int]] = {}  # by request: blocks that the next plan announces
        self._refused: list[Guess] = []
        self._num_asks = 0
        self._step = 0

    @property
    def has_work(self) -> bool:
        return any(text.has_work for text in self._texts.values())

    def take(self, asked: Asked) -> None:
        """Take a message of the core: its questions, and the requests that have ended."""
        for ask in asked.asks:
            self._take(ask)
        for request in asked.forgotten:
            if (text := self._texts.pop(request, None)) is not None:
                self._vacate(text)

    def _take(self, ask: Ask) -> None:
        text = self._texts.get(ask.request)
        if text is None:
            sampling = ask.sampling or GREEDY
            text = _Text(request=ask.request, prompt_len=ask.prompt_len, sampling=sampling)
            text.is_foreign = _largest_id(sampling) >= self._own_vocab_size
            self._texts[ask.request] = text
        assert text.num_known == ask.start, "the core reports every token once"
        text.learn(list(ask.token_ids))
        if max(ask.token_ids, default=0) >= self._own_vocab_size:
            text.is_foreign = True
        if text.is_foreign:
            self._refuse(text)
            self._vacate(text)
            return
        self._num_asks += 1
        text.asked_at = self._num_asks
        room = self._max_len - text.num_known - 1
        text.wanted, text.is_cut = min(ask.wanted, room), ask.wanted > room
        if text.is_cut and not text.has_work:
            self._refuse(text)
            if room <= 0:
                self._vacate(text)

    def _refuse(self, text: _Text) -> None:
        text.wanted = 0
        self._refused.append(Guess(text.request, text.num_known, text.guesses, is_all=True))

    def take_refused(self) -> list[Guess]:
        """Return the guesses of texts for which no more will be guessed, since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def turn(self) -> tuple[list[Guess], int]:
        """Run one step; return the guesses of each text that has got one more, and how many tokens ran."""
        running = self._choose()
        if not running:  # no text has room for a token
            for text in self._texts.values():
                if text.has_work:
                    self._refuse(text)
            return [], 0
        plan = self._plan(running)
        sampled = iter(self._forward(plan))
        guesses = []
        for text, count in running:
            text.num_computed += count
            if text.num_missing:
                continue
            token_id = next(sampled)
            if not 0 <= token_id < self._vocab_size:
                text.is_entered = False
                self._refuse(text)
                continue
            text.token_ids.append(token_id)
            is_all = text.is_cut and not text.has_work
            guesses.append(Guess(text.request, text.num_known, text.guesses, is_all))
        return guesses, plan.total_tokens

    def _choose(self) -> list[tuple[_Text, int]]:
        """Return the texts of the next step, with how many tokens each runs.

        Texts with the fewest tokens to compute come first, since they guess soonest.
        """
        waiting = sorted(
            (text for text in self._texts.values() if text.has_work),
            key=lambda text: (text.num_missing, text.asked_at),
        )
        chosen: list[tuple[_Text, int]] = []
        room = self._max_tokens
        for text in waiting:
            count = min(text.num_missing, room)
            if count and self._has_room(text, text.num_computed + count, [other for other, _ in chosen]):
                chosen.append((text, count))
                room -= count
        return chosen

    def _has_room(self, text: _Text, num_tokens: int, kept: list[_Text]) -> bool:
        """Give a text a row, and blocks for so many tokens; return whether there was room.

        If there is too little, other texts lose their rows and blocks, except those in `kept`.
        """
        while not self._free_rows and text.row == _NO_ROW:
            if not self._vacate_oldest([text, *kept]):
                return False
        if text.row == _NO_ROW:
            text.row = self._free_rows.pop()
        while (blocks := self._allocator.grow(text.request, num_tokens)) is None:
            if not self._vacate_oldest([text, *kept]):
                return False
        text.blocks += blocks
        self._new_blocks[text.request] = blocks
        return True

    def _vacate_oldest(self, kept: list[_Text]) -> bool:
        """Take row and blocks from the text asked about longest ago, but none of `kept`.

        Returns whether there was one.
        """
        others = [text for text in self._texts.values() if text.row != _NO_ROW and text not in kept]
        if others:
            self._vacate(min(others, key=lambda text: text.asked_at))
        return bool(others)

    def _vacate(self, text: _Text) -> None:
        if text.row == _NO_ROW:
            return
        self._free_rows.append(text.row)
        if text.blocks:
            self._allocator.free(text.request)
        text.row, text.blocks, text.num_computed, text.is_entered = _NO_ROW, [], 0, False

    def _plan(self, running: list[tuple[_Text, int]]) -> ScheduledBatch:
        step, self._step = self._step, self._step + 1
        new_blocks, self._new_blocks = self._new_blocks, {}
        entering = [text for text, _ in running if not text.is_entered]
        plan = ScheduledBatch(
            step_id=step,
            rows=[text.row for text, _ in running],
            num_tokens=[count for _, count in running],
            start_positions=[text.num_computed for text, _ in running],
            new_blocks=[new_blocks[text.request] if text.is_entered else [] for text, _ in running],
            need_sampled=[count == text.num_missing for text, count in running],
            token_from=[KNOWN] * len(running),
            new_rows=[
                NewRow(
                    row=text.row,
                    generation=step,
                    request_id=str(text.request),
                    prompt_len=text.prompt_len,
                    token_ids=text.token_ids,
                    sampling=text.sampling,
                    blocks=text.blocks,
                    start=text.num_computed,
                )
                for text in entering
            ],
        )
        for text in entering:
            text.is_entered = True
        return plan


def _largest_id(sampling: RowSampling) -> int:
    """Return the largest id that a request's sampling names."""
    changes = sampling.changes or LogitChanges()
    named = (
        *sampling.suppressed_ids,
        *changes.bias,
        *(changes.allowed_ids or ()),
        *chain(*changes.bad_words),
    )
    return max(named, default=0)
