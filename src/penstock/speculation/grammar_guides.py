"""Guides for the drafts of requests with a grammar: forced text is guessed, forbidden text is cut.

    schema     {"name": …, "age": …}
    text       {"name": "Ada"              what may follow is     , "age":     and nothing else

The keys of an object, its punctuation and the rest of a choice of which one option is left are known before
any layer runs. So the core keeps a matcher for each request that drafts and has a grammar. It cuts a
drafter's guess before the first token that the grammar forbids. Where the grammar forces a text, that text
can be the guess instead. A forced guess is always right, because the last stage allows a forced text in its
usual tokens alone, too.

The last stage has a matcher of its own, which decides (`sample.grammar_rows`); guides change no token. A
grammar is built in a thread beside the core, once for all requests that have it; until then nothing is
guessed for them. If a matcher fails here, its request gets no drafts any more.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec

from penstock.request import StructuredOutputs
from penstock.speculation.drafter import NO_DRAFT, Draft

if TYPE_CHECKING:  # else every core would load the library
    from penstock.grammar.matcher import Matcher, Vocabulary

MOST_KEPT = 32  # grammars, in use or for the next request that has them; a megabyte or two each
FORCED_CHANCE = 0.99  # of a forced token

_logger = logging.getLogger(__name__)


class NoGuides:
    """Leaves drafts as they are, so that only the last stage finds tokens that a grammar forbids."""

    def guided(
        self,
        request: int,
        structured: StructuredOutputs,
        prompt_len: int,
        token_ids: Sequence[int],
        draft: Draft,
        most: int,
    ) -> Draft:
        """Return the draft of a request with a grammar.

        Args:
            request: its number in questions to the drafter.
            structured: its grammar.
            prompt_len: tokens of the prompt, to which the grammar does not apply.
            token_ids: all tokens that it has. They only grow between two calls.
            draft: the drafter's guess.
            most: the most tokens to guess.
        """
        return draft

    def forget(self, request: int) -> None:
        """Forget a request, which has ended."""


NO_GUIDES = NoGuides()


class GrammarGuides(NoGuides):
    """The guides for the drafts of all requests with a grammar.

    Args:
        open_vocabulary: reads the vocabulary of the tokenizer, which may take seconds in which no other
            thread runs; called with the first grammar, unless `open` was called before.
        vocab_size: ids that the model has; a tokenizer may have more.
    """

    def __init__(self, open_vocabulary: Callable[[], Vocabulary], vocab_size: int) -> None:
        self._building = _builder()
        self._open_vocabulary = cache(open_vocabulary)
        self._vocab_size = vocab_size
        self._built: OrderedDict[bytes, Future[Matcher]] = OrderedDict()  # requests get copies of these
        self._guides: dict[int, _Guide] = {}

    def open(self) -> None:
        """Read the vocabulary now."""
        self._open_vocabulary()

    def guided(
        self,
        request: int,
        structured: StructuredOutputs,
        prompt_len: int,
        token_ids: Sequence[int],
        draft: Draft,
        most: int,
    ) -> Draft:
        guide = self._guides.get(request)
        if guide is None:
            guide = self._guides[request] = _Guide(self._grammar(structured), prompt_len)
        try:
            return self._better(guide, token_ids, draft, most)
        except BaseException as error:  # a panic of the library is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            guide.is_lost = True
            _logger.info("the grammar of a request is not used for drafts: %r", error)
            return NO_DRAFT

    def _better(self, guide: _Guide, token_ids: Sequence[int], draft: Draft, most: int) -> Draft:
        """Return the draft that promises more tokens: the forced text, or the allowed part of a guess."""
        if not guide.is_ready:
            return NO_DRAFT
        guide.read(token_ids)
        known = takewhile(lambda token_id: token_id < self._vocab_size, guide.forced(most))
        forced = Draft(list(known), FORCED_CHANCE, is_forced=True)
        allowed_ids = guide.allowed(draft.token_ids)
        more_s = draft.more_s if len(allowed_ids) == len(draft.token_ids) else math.inf
        better = max(Draft(allowed_ids, draft.chance, more_s), forced, key=_promise)
        return better if better.token_ids or better.more_s < math.inf else NO_DRAFT

    def _grammar(self, structured: StructuredOutputs) -> Future[Matcher]:
        key = msgspec.msgpack.encode(structured)
        built = self._built.pop(key, None)
        if built is None:
            try:
                built = self._building.submit(self._build, structured)
            except RuntimeError as error:  # no thread can be started; a later request tries again
                self._building = _builder()  # the work waits in the one before, and would be done for nobody
                failed: Future[Matcher] = Future()
                failed.set_exception(error)
                return failed
        self._built[key] = built
        if len(self._built) > MOST_KEPT:
            self._built.popitem(last=False)
        return built

    def _build(self, structured: StructuredOutputs) -> Matcher:
        from penstock.grammar.matcher import Matcher

        return Matcher(self._open_vocabulary(), structured)

    def forget(self, request: int) -> None:
        self._guides.pop(request, None)


def _builder() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="draft-grammar")


class _Guide:
    """The matcher of one request.

    Args:
        built: a matcher at the beginning of a text, once it is built.
        num_read: tokens of the prompt, to which the grammar does not apply.

    Attributes:
        is_lost: the matcher has failed, or the text has ended, so it cannot say what follows.
    """

    def __init__(self, built: Future[Matcher], num_read: int) -> None:
        self.is_lost = False
        self._built = built
        self._num_read = num_read
        self._matcher: Matcher | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is built and the matcher can say what follows."""
        if self._matcher is None and not self.is_lost and self._built.done():
            self._matcher = self._built.result().copy()
        return self._matcher is not None and not self.is_lost

    def read(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that are new."""
        assert self._matcher is not None
        new = token_ids[self._num_read :]
        self._num_read = len(token_ids)
        self._matcher.accept(new)
        self.is_lost = bool(self._matcher.error)  # for example, tokens came behind the end of the text

    def forced(self, most: int) -> Sequence[int]:
        """Return the tokens that must follow, at most `most`; none if there is a choice."""
        assert self._matcher is not None
        return () if self.is_lost else self._matcher.forced()[:most]

    def allowed(self, draft_ids: Sequence[int]) -> Sequence[int]:
        """Return the first tokens of a draft, up to one that the grammar forbids."""
        assert self._matcher is not None
        return () if self.is_lost or not draft_ids else draft_ids[: self._matcher.num_allowed(draft_ids)]


def _promise(draft: Draft) -> float:
    """Return how many tokens of a draft are right on average."""
    chance, length = min(draft.chance, 0.999), len(draft.token_ids)
    return chance * (1.0 - chance**length) / (1.0 - chance)
