"""The turns of a draft model: the texts that it computes next, and its guesses.

Each turn is one step of the model over all texts that have work: those that lag behind compute some of their
tokens, those that do not guess one more. Guesses that turn out right stay as they are, with their keys and
values, so that a text which is guessed well costs one token for each guess:

    known     a b c                    a b c d e              a b c d e
    guessed         d e f g                    f g                    f x     one was wrong: what follows it
    computed  ^^^^^^^^^^^ (all but g)                                        is guessed anew

A text has a row and blocks while there is room; the one asked about longest ago loses both first, and
computes its tokens again when it is asked about.

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
        token_ids: the known ones, and behind them the guesses.
        num_computed: number of these whose keys and values are in its blocks.
        wanted: guesses that there should be.
        is_cut: more were asked for than there is room for behind its tokens.
        is_foreign: it has ids that this model does not have.
        asked_at: number of the newest ask.
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
        """Take the tokens that have come behind the known ones; guesses that were right stay."""
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
        forward: runs a plan: [sampled rows] the id of each; -1: none could be sampled.
        allocator: allocator of the model's blocks.
        num_rows: rows of its row table.
        max_len: tokens of a text, guesses included.
        max_tokens: tokens of a plan.
        vocab_size: ids of the model that is guessed; larger ids cannot be guesses.
        own_vocab_size: ids of this model; texts with larger ids are not guessed. None: the same.
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
        self._new_blocks: dict[int, list[int]] = {}  # by request: for the next plan
        self._refused: list[Guess] = []
        self._num_asks = 0
        self._step = 0

    @property
    def has_work(self) -> bool:
        return any(text.has_work for text in self._texts.values())

    def take(self, asked: Asked) -> None:
        """Take a message of the core."""
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
        """Return the guesses of texts that were refused more since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def turn(self) -> tuple[list[Guess], int]:
        """Run one step; return the guesses of each text that has one more now, and the tokens computed."""
        running = self._choose()
        if not running:  # none of them fits
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
        """Return the texts of the next step, and how many tokens of each: those that guess come first."""
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

        Other texts lose theirs for it, but for those kept.
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
        """Take row and blocks from another text; return whether there was one."""
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
