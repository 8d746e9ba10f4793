"""Records the answers of a drafter, and of the guides that apply grammars to its guesses."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.decisions.core_call import HeardDraft
from penstock.decisions.recorded_executor import CurrentCall
from penstock.request import StructuredOutputs
from penstock.speculation.drafter import Draft, Drafter, Question
from penstock.speculation.grammar_guides import NoGuides


class RecordedDrafter:
    """A drafter that answers as another one does, and notes the answers.

    Args:
        drafter: the drafter that answers.
        current: returns the call that the core is in; None: it is in none.
    """

    def __init__(self, drafter: Drafter, current: CurrentCall) -> None:
        self.name = drafter.name
        self._drafter, self._current = drafter, current

    @property
    def is_at_tail(self) -> bool:
        return self._drafter.is_at_tail

    def propose(self, question: Question) -> Draft:
        """Return the drafter's guess of a request's next tokens, and note it; note None if it raises."""
        draft = None
        try:
            draft = self._drafter.propose(question)
            return draft
        finally:
            if (call := self._current()) is not None:
                call.drafts.append(HeardDraft(question.request, len(question.token_ids), draft))

    def wants(self, question: Question, num_busy: int) -> int | None:
        """Return how many tokens the last stage is to guess of a request, and note the number."""
        wanted = self._drafter.wants(question, num_busy)
        if (call := self._current()) is not None:
            call.wants.append(wanted)
        return wanted

    def hear(self, request: int, num_known: int, token_ids: Sequence[int]) -> None:
        """Pass guesses of the last stage on to the drafter."""
        self._drafter.hear(request, num_known, token_ids)

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        """Report to the drafter how many tokens of its last guess were tried, and how many were right."""
        self._drafter.accept(request, num_drafted, num_accepted)

    def forget(self, request: int) -> None:
        """Let the drafter forget a request, which has ended."""
        self._drafter.forget(request)

    def poll(self) -> Collection[int]:
        """Return the requests of which the drafter has guessed more, and note them."""
        news = self._drafter.poll()
        if (call := self._current()) is not None:
            call.news.append(list(news))
        return news

    def wait_sources(self) -> Sequence[int]:
        """Return the drafter's descriptors, which become readable when `poll` has something to do."""
        return self._drafter.wait_sources()

    def close(self) -> None:
        """Close the drafter."""
        self._drafter.close()


class RecordedGuides(NoGuides):
    """Guides of a drafter that answer as other guides do, and note the answers.

    Args:
        guides: the guides that answer.
        current: returns the call that the core is in; None: it is in none.
    """

    def __init__(self, guides: NoGuides, current: CurrentCall) -> None:
        self._guides, self._current = guides, current

    def guided(
        self,
        request: int,
        structured: StructuredOutputs,
        prompt_len: int,
        token_ids: Sequence[int],
        draft: Draft,
        most: int,
    ) -> Draft:
        """Return the draft that the guides make of the drafter's guess, and note it."""
        guided = self._guides.guided(request, structured, prompt_len, token_ids, draft, most)
        if (call := self._current()) is not None:
            call.guided.append(HeardDraft(request, len(token_ids), guided))
        return guided

    def forget(self, request: int) -> None:
        """Let the guides forget a request, which has ended."""
        self._guides.forget(request)
