"""Which ids each row may get next where its request asked for structured output; on the last stage.

A small state object of `runner.model_runner`: `add` when a request enters a row, `constrained` before the
head runs, `accept` once tokens are drawn, `free` when the row is freed. Matchers live here, beside the
sampler, so that no trip to the core lies between two tokens and any number of steps may be in flight.

      step n            pipe           step n + 1
    ── sample ──┬────────────────────┬─ constrained ▶ head ▶ sample ──
                └▶ accept, mask ─────┘
                   (another thread)

The mask of a row is made as soon as its token before it is known, while the pipe computes. A matcher is built
when its row is added, and first needed when its prompt is through. The front has found out beforehand that it
can be built, and in how much work (`grammar.proving`): nobody has to be asked whether it is ready.

Whatever is sampled behind the end of a text, or of a row that the core has ended, is nobody's: it is dropped
by the core, and means nothing here.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.batch import NewRow
from penstock.errors import PenstockError, WaitTimeoutError
from penstock.kernels.candidates import NO_ID, WORD_BITS, HeadRequest
from penstock.request import StructuredOutputs

if TYPE_CHECKING:  # else every rank of every stage would load the library
    from penstock.grammar.matcher import Matcher, Vocabulary

KEPT_GRAMMARS = 64  # whose matchers are copied: more than are in use at once, as a rule
NOTHING_LEFT = "its constraints leave none"


class NoGrammars:
    """Of a rank that does not sample, or whose requests may generate anything."""

    def add(self, new: NewRow) -> None:
        """A request enters a row, perhaps with outputs that it had before."""

    def free(self, row: int) -> None:
        """The request of a row has ended."""

    def reset(self) -> None:
        """No row is held, as at the start."""

    def constrained(self, request: HeadRequest, rows: NDArray[np.int64]) -> HeadRequest:
        """The request, with what each of `rows` may get next. Waits for masks that are being made."""
        return request

    def accept(self, rows: NDArray[np.int64], token_ids: Sequence[int]) -> None:
        """These were drawn; `NO_ID` where nothing could be."""

    def reason(self, row: int) -> str:
        """Why the row may have been left without a token, if its logits were finite."""
        return NOTHING_LEFT

    def close(self) -> None:
        """The rank ends."""


class GrammarRows(NoGrammars):
    """The grammars of all rows of a rank.

    Args:
        vocab_size: ids that the head gives.
        open_vocabulary: called once, when it is first needed; perhaps in another thread.
        timeout_s: longest wait for a mask.
    """

    def __init__(
        self, vocab_size: int, open_vocabulary: Callable[[], Vocabulary], *, timeout_s: float = 60.0
    ) -> None:
        self._num_words = -(-vocab_size // WORD_BITS)
        self._tail = np.int32((1 << vocab_size % WORD_BITS) - 1) if vocab_size % WORD_BITS else np.int32(-1)
        self._builder = _Builder(open_vocabulary)
        self._timeout_s = timeout_s
        self._rows: dict[int, _Row] = {}
        # Two threads: the masks of running rows do not queue behind a grammar that is being built.
        self._building = ThreadPoolExecutor(1, thread_name_prefix="grammar-build")
        self._masking = ThreadPoolExecutor(1, thread_name_prefix="grammar-mask")

    def open(self) -> None:
        """Open the vocabulary before the first request needs it, which may take a second. Where that cannot
        be done, each request will be told why."""
        with contextlib.suppress(PenstockError):
            self._builder.open()

    def add(self, new: NewRow) -> None:
        self.free(new.row)
        structured = new.sampling.structured
        if structured is None:
            return
        row = self._rows[new.row] = _Row(self._num_words, self._tail)
        outputs = new.token_ids[new.prompt_len :]
        row.pending = row.built = self._building.submit(row.build, self._builder, structured, outputs)

    def free(self, row: int) -> None:
        held = self._rows.pop(row, None)
        if held is not None:
            held.built.cancel()  # nobody waits for what has not begun

    def reset(self) -> None:
        for row in list(self._rows):
            self.free(row)

    def constrained(self, request: HeadRequest, rows: NDArray[np.int64]) -> HeadRequest:
        held = self._held(rows)
        if not held:
            return request
        before = request.allowed
        if before is None:
            allowed = np.full((len(rows), self._num_words), -1, dtype=np.int32)
        else:
            allowed = before.copy()
        for place, row in held:
            row.wait(self._timeout_s)
            allowed[place] &= row.mask
        return replace(request, allowed=allowed)

    def accept(self, rows: NDArray[np.int64], token_ids: Sequence[int]) -> None:
        drawn = [(row, token_ids[place]) for place, row in self._held(rows)]
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
        """Places in `rows` of those that have a grammar."""
        if not self._rows:
            return []
        return [(place, self._rows[row]) for place, row in enumerate(rows.tolist()) if row in self._rows]


class _Builder:
    """Builds matchers; of the newest grammars one is kept unused, to be copied. Belongs to one thread.

    Args:
        open_vocabulary: called once.
    """

    def __init__(self, open_vocabulary: Callable[[], Vocabulary]) -> None:
        self._open_vocabulary = open_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._unused: OrderedDict[bytes, Matcher] = OrderedDict()

    def open(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = self._open_vocabulary()
        return self._vocabulary

    def copy(self, structured: StructuredOutputs) -> Matcher:
        """A matcher at the beginning of its text."""
        key = msgspec.msgpack.encode(structured)
        matcher = self._unused.pop(key, None) or new_matcher(self.open(), structured)
        self._unused[key] = matcher
        if len(self._unused) > KEPT_GRAMMARS:
            self._unused.popitem(last=False)
        return matcher.copy()


def new_matcher(vocabulary: Vocabulary, structured: StructuredOutputs) -> Matcher:
    from penstock.grammar.matcher import Matcher  # here: a rank without such requests does not load it

    return Matcher(vocabulary, structured)


class _Row:
    """One request's matcher, and the mask of its next token. One thread at a time works with it: who would
    read waits for `pending`.

    What matchers of the same grammar share may reach the library's limits by the doing of other rows. A
    matcher that fails is therefore built anew, for this row alone, and given the row's tokens: only if that
    one fails too does the row end. So its end depends on its grammar and its tokens, and on nothing else.
    """

    def __init__(self, num_words: int, tail: np.int32) -> None:
        self.mask = np.zeros(num_words, dtype=np.int32)  # ids that the tokenizer does not have stay forbidden
        self.error = ""
        self.built: Future[None]
        self.pending: Future[None]  # that, or the newest mask
        self._tail = tail
        self._structured: StructuredOutputs
        self._vocabulary: Vocabulary
        self._outputs: list[int] = []
        self._matcher: Matcher | None = None  # None: the row has ended
        self._filled = self.mask  # what the matcher writes, in as many words as it has

    def wait(self, timeout_s: float) -> None:
        try:
            self.pending.result(timeout_s)
        except TimeoutError as error:
            raise WaitTimeoutError(f"the mask of a grammar was not there after {timeout_s:g} s.") from error

    def build(self, builder: _Builder, structured: StructuredOutputs, outputs: Sequence[int]) -> None:
        """The matcher, up to the tokens that there are."""
        try:
            self._structured, self._outputs = structured, list(outputs)
            self._vocabulary = builder.open()
            self._filled = np.zeros(self._vocabulary.num_words, dtype=np.int32)
            self._matcher = builder.copy(structured)
            self._go_on(outputs)
        except BaseException as error:  # a panic of the library is no Exception
            self._give_up(error)

    def advance(self, token_id: int) -> None:
        """The row has got this token."""
        if self._matcher is None or token_id == NO_ID:
            return
        if token_id in self._vocabulary.ends:
            self._matcher = None
            return
        self._outputs.append(token_id)
        try:
            self._go_on([token_id])
        except BaseException as error:
            self._give_up(error)

    def _go_on(self, token_ids: Sequence[int]) -> None:
        assert self._matcher is not None
        if not self._fill(self._matcher, token_ids):
            self._matcher = new_matcher(self._vocabulary, self._structured)
            if not self._fill(self._matcher, self._outputs):
                self._end(self._matcher.error)

    def _fill(self, matcher: Matcher, token_ids: Sequence[int]) -> bool:
        """Whether it has taken the tokens, and said what may come next."""
        matcher.accept(token_ids)
        matcher.fill(self._filled.ctypes.data, self._filled.nbytes)
        if matcher.error:  # the library would end the text here, as if it were complete
            return False
        size = min(len(self.mask), len(self._filled))
        self.mask[:size] = self._filled[:size]
        self.mask[-1] &= self._tail
        return True

    def _give_up(self, error: BaseException) -> None:
        self._end(error.message.rstrip(".") if isinstance(error, PenstockError) else repr(error)[:200])

    def _end(self, why: str) -> None:
        """The row ends, alone: no id is allowed from here on."""
        self.error = why
        self.mask[:] = 0
        self._matcher = None


def _advance(drawn: Sequence[tuple[_Row, int]]) -> None:
    for row, token_id in drawn:
        row.advance(token_id)
