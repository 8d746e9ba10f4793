"""The guard around a drafter, which keeps a faulty one from harming requests.

Drafts change no token, so no request may fail for them. A drafter that raises, takes too long or guesses ids
that are not tokens is switched off until the engine starts again, with one line in the log. Requests go on
without drafts. (A call cannot be interrupted. If one never returns, the core hangs, and the supervisor
notices its missing heartbeat.)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from penstock.speculation.drafter import NO_DRAFT, Draft, Drafter, Question

LONGEST_CALL_S = 0.5  # a step of a large model takes as long; `suffix` needs 5 ms at most

Result = TypeVar("Result")

_logger = logging.getLogger(__name__)


class GuardedDrafter:
    """Calls a drafter until it misbehaves.

    Args:
        drafter: the drafter that is called.
        vocab_size: the number of ids that the model has; a guess that is not below it is a fault.
        clock: monotonic seconds.
    """

    def __init__(self, drafter: Drafter, vocab_size: int, clock: Callable[[], float]) -> None:
        self.name = drafter.name
        self._drafter: Drafter | None = drafter
        self._is_at_tail = drafter.is_at_tail
        self._vocab_size = vocab_size
        self._clock = clock
        self._promised: set[int] = set()  # requests for which the drafter has promised more guesses

    def propose(self, question: Question) -> Draft:
        draft = self._call(lambda drafter: drafter.propose(question))
        if draft is None:
            return NO_DRAFT
        token_ids, most = draft.token_ids, question.most
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._vocab_size):
            return self._switch_off(f"it guessed {list(token_ids)[:8]}, not all of which are token ids")
        if len(token_ids) > most or not 0.0 <= draft.chance <= 1.0:
            return self._switch_off(f"it guessed {len(token_ids)} of {most} tokens at {draft.chance}")
        if draft.more_s != math.inf:
            self._promised.add(question.request)
        elif self._promised:
            self._promised.discard(question.request)
        return draft

    @property
    def is_at_tail(self) -> bool:
        return self._is_at_tail and self._drafter is not None

    def wants(self, question: Question, num_busy: int) -> int | None:
        wanted = self._call(lambda drafter: drafter.wants(question, num_busy))
        if wanted is not None and not 1 <= wanted <= question.most:
            self._switch_off(f"it asked for {wanted} of {question.most} tokens")
            return None
        return wanted

    def hear(self, request: int, num_known: int, token_ids: Sequence[int]) -> None:
        self._call(lambda drafter: drafter.hear(request, num_known, token_ids))

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        self._call(lambda drafter: drafter.accept(request, num_drafted, num_accepted))

    def forget(self, request: int) -> None:
        self._promised.discard(request)
        self._call(lambda drafter: drafter.forget(request))

    def poll(self) -> Collection[int]:
        news = self._call(lambda drafter: drafter.poll())
        if news is not None:
            return news
        # Nothing more will come; as news, this lets the requests that wait for guesses go on.
        promised, self._promised = self._promised, set()
        return promised

    def wait_sources(self) -> Sequence[int]:
        return () if self._drafter is None else self._drafter.wait_sources()

    def close(self) -> None:
        drafter, self._drafter = self._drafter, None
        if drafter is None:
            return
        try:
            drafter.close()
        except Exception as error:  # such as no thread that could await the end of its process
            _logger.warning("the drafter %r could not be closed: %r", self.name, error)

    def _call(self, call: Callable[[Drafter], Result]) -> Result | None:
        """Return the drafter's answer; None if it is switched off, or if this call switches it off."""
        if self._drafter is None:
            return None
        began = self._clock()
        try:
            result = call(self._drafter)
        except Exception as error:
            self._switch_off(f"{type(error).__name__}: {error}")
            return None
        took = self._clock() - began
        if took > LONGEST_CALL_S:
            self._switch_off(f"a call took {took:.1f} s")
            return None
        return result

    def _switch_off(self, why: str) -> Draft:
        self.close()
        _logger.warning("the drafter %r is switched off until the engine restarts: %s.", self.name, why)
        return NO_DRAFT
