"""The ids that each row may get next where its request asked for structured output; on the last stage.

A small state object of `runner.model_runner`, which calls `add` when a request enters a row, `constrained`
before the head runs, `accept` once tokens are drawn, and `free` when the row is freed. A matcher follows the
text of a row through its grammar. Matchers are on the last stage, beside the sampler, so that no trip to the
core lies between two tokens, and any number of steps may be in flight.

      step n            pipe           step n + 1
    ── sample ──┬────────────────────┬─ constrained ▶ head ▶ sample ──
                └▶ accept, mask ─────┘
                   (another thread)

The mask of a row's next token is made as soon as the token before is known, while the pipe computes. When the
first row with a grammar enters, the grammar is built (compiled) beside the steps. `collect` reports to the
core when that is done (`scheduler.grammars`). The core lets no step sample the row before, so that no step
waits for a build. A built grammar is kept, and copied for further rows, until a plan drops it: the core
decides how many are kept.

A token that is sampled behind the end of a text, or for a row that the core has ended, is dropped by the core
and ignored here.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.batch import NO_GRAMMAR, GrammarsBuilt, NewRow
from penstock.errors import PenstockError, ProtocolError, WaitTimeoutError
from penstock.kernels.candidates import NO_ID, WORD_BITS, HeadRequest
from penstock.request import StructuredOutputs

if TYPE_CHECKING:  # else every rank of every stage would load the library
    from penstock.grammar.matcher import Matcher, Vocabulary

NOTHING_LEFT = "its constraints allow no token"


class NoGrammars:
    """The grammars of a rank that does not sample, or whose requests may generate anything.

    It is also the interface of `GrammarRows`: here the methods change nothing, there they do what they say.
    """

    def add(self, new: NewRow) -> None:
        """Take a request that enters a row, perhaps with outputs from before a preemption or a loss."""

    def free(self, row: int) -> None:
        """Free a row that its request has left."""

    def drop(self, numbers: Iterable[int]) -> None:
        """Drop grammars that no row will have any more."""

    def reset(self) -> None:
        """Free all rows, as at the start."""

    @property
    def is_building(self) -> bool:
        """Whether `collect` still has outcomes of grammars to report."""
        return False

    def collect(self) -> GrammarsBuilt | None:
        """Return the outcomes of builds since the last call; None: there are none."""
        return None

    def expect(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Take the drafts of the step that is sampled next, by row; rows that are left out have none."""

    def constrained(self, request: HeadRequest, rows: NDArray[np.int64]) -> HeadRequest:
        """Return the request with the ids that each of `rows` may get next.

        It waits for masks that are being made.

        Args:
            rows: [len(request)] the row of each sample; a row with n drafts is there n + 1 times.
        """
        return request

    def reach(self, rows: NDArray[np.int64], num_drafts: Sequence[int]) -> Sequence[int]:
        """Return how many drafts of each row may be accepted.

        Behind the others there is no mask, because the grammar ends there or does not allow the draft.

        Args:
            rows: [num_rows].
            num_drafts: [num_rows] number of drafts of each row; the result is of the same length.
        """
        return num_drafts

    def accept(self, rows: NDArray[np.int64], token_ids: Sequence[Sequence[int]]) -> None:
        """Take the tokens that rows have got, one or more for each of `rows`.

        The last token of a row is `NO_ID` if nothing could be drawn.
        """

    def reason(self, row: int) -> str:
        """Return why the row may have been left without a token, if its logits were finite."""
        return NOTHING_LEFT

    def close(self) -> None:
        """Close the grammars, as the rank ends."""


class GrammarRows(NoGrammars):
    """The grammars of all rows of a rank.

    Args:
        vocab_size: number of ids that the head has logits for.
        open_vocabulary: returns the vocabulary; called when that is first needed, perhaps in another thread.
        timeout_s: longest wait for a mask; also the longest time in which a grammar must be built.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        vocab_size: int,
        open_vocabulary: Callable[[], Vocabulary],
        *,
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_words = -(-vocab_size // WORD_BITS)
        self._tail = np.int32((1 << vocab_size % WORD_BITS) - 1) if vocab_size % WORD_BITS else np.int32(-1)
        self._vocabulary = _OpenOnce(open_vocabulary)
        self._timeout_s, self._clock = timeout_s, clock
        self._grammars: dict[int, _Grammar] = {}  # by number
        self._untold: dict[int, _Grammar] = {}  # by number: not reported yet, even if dropped meanwhile
        self._rows: dict[int, _Row] = {}
        # Two threads: the masks of running rows do not queue behind a grammar that is being built.
        self._building = ThreadPoolExecutor(1, thread_name_prefix="grammar-build")
        self._masking = ThreadPoolExecutor(1, thread_name_prefix="grammar-mask")
        self._are_threads_started = False

    def open(self) -> None:
        """Open the vocabulary before the first request needs it, which may take a second.

        If that fails, the next build tries again, and each request with a grammar gets the error.
        """
        with contextlib.suppress(PenstockError):
            self._vocabulary.get()

    def add(self, new: NewRow) -> None:
        self.free(new.row)
        if new.grammar == NO_GRAMMAR:
            return
        grammar = self._grammars.get(new.grammar) or self._begun(new)
        row = _Row(grammar, self._num_words, self._tail, new.token_ids[new.prompt_len :])
        self._rows[new.row] = row
        if new.grammar not in self._untold and not grammar.error:
            row.pending = self._masking.submit(row.enter)

    def _begun(self, new: NewRow) -> _Grammar:
        """Begin to build the grammar of a row that is the first to have it."""
        structured = new.sampling.structured
        if structured is None:
            raise ProtocolError(f"row {new.row} has grammar {new.grammar}, which the plan does not define.")
        grammar = _Grammar(structured, due=self._clock() + self._timeout_s)
        self._grammars[new.grammar] = self._untold[new.grammar] = grammar
        try:
            self._start_threads()
        except RuntimeError as error:
            grammar.give_up(f"no thread can be started for it ({error})")
        else:
            grammar.built = self._building.submit(grammar.build, self._vocabulary.get)
        return grammar

    def _start_threads(self) -> None:
        """Start both threads, unless they run; the rows of a built grammar then never lack one.

        Raises:
            RuntimeError: the system lets no thread start now.
        """
        if self._are_threads_started:
            return
        for pool in (self._building, self._masking):
            # A pool starts its thread with its first work, and keeps it. If the start fails, the work stays
            # in the pool's queue for a later thread; this one does nothing.
            pool.submit(int)
        self._are_threads_started = True

    def free(self, row: int) -> None:
        self._rows.pop(row, None)

    def drop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            grammar = self._grammars.pop(number, None)
            if grammar is not None:
                grammar.built.cancel()  # has an effect if the build has not begun
                grammar.is_dropped = True

    def reset(self) -> None:
        self._rows.clear()
        self.drop(list(self._grammars))
        self._untold.clear()

    @property
    def is_building(self) -> bool:
        return bool(self._untold)

    def collect(self) -> GrammarsBuilt | None:
        if not self._untold:
            return None
        now, report = self._clock(), GrammarsBuilt(built=[], failed={}, unable={})
        for number, grammar in self._untold.items():
            if grammar.is_dropped:
                report.unable[number] = "it was dropped"
            elif grammar.built.done() and not grammar.error:
                report.built.append(number)
            elif grammar.built.done():
                (report.unable if grammar.may_be_good else report.failed)[number] = grammar.error
            elif now >= grammar.due:
                report.unable[number] = f"it was not ready within {self._timeout_s:g} s"
        for number in (*report.built, *report.failed, *report.unable):
            del self._untold[number]
        there = [self._grammars[number] for number in report.built]
        for row in self._rows.values():
            if row.grammar in there:
                row.pending = self._masking.submit(row.enter)
        return report if report.built or report.failed or report.unable else None

    def constrained(self, request: HeadRequest, rows: NDArray[np.int64]) -> HeadRequest:
        held = self._held(rows)
        if not held:
            return request
        before = request.allowed
        if before is None:
            allowed = np.full((len(rows), self._num_words), -1, dtype=np.int32)
        else:
            allowed = before.copy()
        depths: Counter[int] = Counter()  # samples of each row so far
        for index, row in held:
            if row.pending is None:
                raise ProtocolError(f"row {rows[index]} is to be sampled, but its grammar is not built here.")
            _wait(row.pending, self._timeout_s)
            number = int(rows[index])
            depth, depths[number] = depths[number], depths[number] + 1
            allowed[index] &= row.masks[depth] if depth < len(row.masks) else 0
        return replace(request, allowed=allowed)

    def reach(self, rows: NDArray[np.int64], num_drafts: Sequence[int]) -> Sequence[int]:
        held = dict(self._held(rows))
        return [
            min(count, len(held[index].masks) - 1) if index in held else count
            for index, count in enumerate(num_drafts)
        ]

    def expect(self, drafts: Mapping[int, Sequence[int]]) -> None:
        for number, draft_ids in drafts.items():
            row = self._rows.get(number)
            if row is not None:
                row.pending = self._masking.submit(row.look_ahead, draft_ids)

    def accept(self, rows: NDArray[np.int64], token_ids: Sequence[Sequence[int]]) -> None:
        drawn = [(row, token_ids[index]) for index, row in self._held(rows)]
        if drawn:
            pending = self._masking.submit(_advance, drawn)
            for row, _ in drawn:
                row.pending = pending

    def reason(self, row: int) -> str:
        held = self._rows.get(row)
        return held.error if held is not None and held.error else NOTHING_LEFT

    def close(self) -> None:
        for pool in (self._building, self._masking):
            pool.shutdown(wait=False, cancel_futures=True)

    def _held(self, rows: NDArray[np.int64]) -> list[tuple[int, _Row]]:
        """Return the rows that have a grammar, each with its index in `rows`."""
        if not self._rows:
            return []
        return [(index, self._rows[row]) for index, row in enumerate(rows.tolist()) if row in self._rows]


class _OpenOnce:
    """The vocabulary, opened when it is first needed. Only one thread at a time may use it.

    Args:
        open_vocabulary: returns the vocabulary; called again only if it has raised an error.
    """

    def __init__(self, open_vocabulary: Callable[[], Vocabulary]) -> None:
        self._open_vocabulary = open_vocabulary
        self._vocabulary: Vocabulary | None = None

    def get(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = self._open_vocabulary()
        return self._vocabulary


def new_matcher(vocabulary: Vocabulary, structured: StructuredOutputs) -> Matcher:
    from penstock.grammar.matcher import Matcher  # here: a rank without such requests does not load it

    return Matcher(vocabulary, structured)


class _Grammar:
    """A matcher at the beginning of its text: it is built once, and only copied from then on.

    Args:
        structured: the texts that it allows.
        due: clock time after which the build is reported as too late.
    """

    def __init__(self, structured: StructuredOutputs, due: float) -> None:
        self.structured, self.due = structured, due
        self.built: Future[None]
        self.error = ""  # why it could not be built
        self.may_be_good = False  # the error is this rank's: the grammar may be good all the same
        self.is_dropped = False
        self.vocabulary: Vocabulary
        self._matcher: Matcher

    def build(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """Build the matcher, in the building thread, and its first mask, so that copies share its results."""
        try:
            self.vocabulary = vocabulary()
            self._matcher = new_matcher(self.vocabulary, self.structured)
            self._matcher.mask()
            self.error = self._matcher.error
        except BaseException as error:  # a panic of the library is not an `Exception`
            self.error, self.may_be_good = _said(error), isinstance(error, MemoryError | OSError)

    def give_up(self, why: str) -> None:
        """Give up the build, which has not begun, since this rank cannot do it now."""
        self.error, self.may_be_good = why, True
        self.built = Future()
        self.built.set_result(None)

    def copy(self) -> Matcher:
        """Return a matcher at the beginning of its text."""
        return self._matcher.copy()


class _Row:
    """One request's matcher, and the mask of its next token.

    Only one thread at a time may use a row: whoever reads it waits for `pending` first.

    Matchers of the same grammar share state in the library, which other rows may drive to its limits. If a
    matcher fails, it is therefore built anew for this row alone, and given the row's tokens. The row ends
    only if the new matcher fails too. So the end of a row depends on its grammar and its tokens alone.

    Args:
        num_words: words of a mask.
        tail: mask of the ids in the last word that the head has.
        outputs: tokens that the request has generated already.
    """

    def __init__(self, grammar: _Grammar, num_words: int, tail: np.int32, outputs: Sequence[int]) -> None:
        self.grammar = grammar
        # The mask of the next token, then one behind each draft. Ids that the tokenizer lacks stay forbidden.
        self.masks = [np.zeros(num_words, dtype=np.int32)]
        self.error = ""
        self.pending: Future[None] | None = None  # the newest mask; None until the grammar is there
        self._tail = tail
        self._outputs = list(outputs)
        self._matcher: Matcher | None = None  # None: the row has ended
        self._filled = self.masks[0]  # what the matcher writes, in as many words as it has

    def enter(self) -> None:
        """Make the matcher, and let it take the tokens that the request has generated already."""
        try:
            self._filled = np.zeros(self.grammar.vocabulary.num_words, dtype=np.int32)
            self._matcher = self.grammar.copy()
            self._go_on(self._outputs)
        except BaseException as error:
            self._give_up(error)

    def look_ahead(self, draft_ids: Sequence[int]) -> None:
        """Make the masks behind drafts, as if these had been sampled.

        It stops at a draft that is forbidden, that ends the text, or behind which the matcher fails. The
        drafts behind the last mask are rejected, and the row goes on from what was sampled in their place.
        """
        masks, ends = self.masks[:1], self.grammar.vocabulary.ends
        with contextlib.suppress(BaseException):  # a panic of the library is not an `Exception`
            matcher = None if self._matcher is None else self._matcher.copy()
            for token_id in draft_ids:
                if matcher is None or token_id in ends or not _allows(masks[-1], token_id):
                    break
                mask = np.zeros_like(masks[0])
                if not self._fill(matcher, [token_id], mask):
                    break
                masks.append(mask)
        self.masks = masks

    def advance(self, token_id: int) -> None:
        """Take the token that the row has got."""
        del self.masks[1:]
        if self._matcher is None or token_id == NO_ID:
            return
        if token_id in self.grammar.vocabulary.ends:
            self._matcher = None
            return
        self._outputs.append(token_id)
        try:
            self._go_on([token_id])
        except BaseException as error:
            self._give_up(error)

    def _go_on(self, token_ids: Sequence[int]) -> None:
        assert self._matcher is not None
        if not self._fill(self._matcher, token_ids, self.masks[0]):
            self._matcher = new_matcher(self.grammar.vocabulary, self.grammar.structured)
            if not self._fill(self._matcher, self._outputs, self.masks[0]):
                self._end(self._matcher.error)

    def _fill(self, matcher: Matcher, token_ids: Sequence[int], mask: NDArray[np.int32]) -> bool:
        """Let a matcher take tokens, and write to `mask` which ids may come next; return whether it could."""
        matcher.accept(token_ids)
        matcher.fill(self._filled.ctypes.data, self._filled.nbytes)
        if matcher.error:  # its mask would let the text end here, as if it were complete
            return False
        size = min(len(mask), len(self._filled))
        mask[:size] = self._filled[:size]
        mask[-1] &= self._tail
        return True

    def _give_up(self, error: BaseException) -> None:
        self._end(_said(error))

    def _end(self, why: str) -> None:
        """End this row alone: no id is allowed from here on."""
        self.error = why
        self.masks[0][:] = 0
        self._matcher = None


def _allows(mask: NDArray[np.int32], token_id: int) -> bool:
    word, bit = divmod(token_id, WORD_BITS)
    return word < len(mask) and bool(int(mask[word]) >> bit & 1)


def _advance(drawn: Sequence[tuple[_Row, Sequence[int]]]) -> None:
    for row, token_ids in drawn:
        for token_id in token_ids:
            row.advance(token_id)


def _said(error: BaseException) -> str:
    return error.message.rstrip(".") if isinstance(error, PenstockError) else repr(error)[:200]


def _wait(pending: Future[None], timeout_s: float) -> None:
    try:
        pending.result(timeout_s)
    except TimeoutError as error:
        raise WaitTimeoutError(f"the mask of a grammar was not ready within {timeout_s:g} s.") from error
