"""Keeps the unfinished requests of one client with their tokens, so that it can send them to a new core.

If a core is lost, its scheduler's knowledge is lost with it. So this module keeps what another core needs to
continue a request: the request, the tokens that have come, and the number of *scores* (log-probabilities of
the prompt's tokens) that have come. `engine.client.async_engine` owns one `LiveRequests`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.engine.ipc import AddRequest
from penstock.errors import QuarantinedError
from penstock.request import GenerationRequest, RequestUpdate


@dataclass(slots=True)
class _Live:
    number: int
    request: GenerationRequest
    output_ids: list[int] = field(default_factory=list)
    num_scores: int = 0  # log-probabilities of prompt tokens that have come
    is_sent: bool = True  # whether the sequence was sent to a core that is not lost
    lost_at: int = -1  # `progress` at the last loss of a core that had the sequence, or -1

    @property
    def progress(self) -> int:
        """The number of tokens and scores that have come."""
        return len(self.output_ids) + self.num_scores


class LiveRequests:
    """The sequences of one client that have not ended, by id, in the order in which they were added.

    Each sequence has a number, counted from 0. A request for several outputs has one sequence for each.

    Attributes:
        num_asked: how many sequences were ever added, which is also the number of the next one.
    """

    def __init__(self) -> None:
        self._live: dict[str, _Live] = {}
        self.num_asked = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def ids(self) -> list[str]:
        return list(self._live)

    def add(self, request: GenerationRequest) -> None:
        """Add the sequences of a request that is sent to the core now.

        If the core is lost, each sequence is sent to the next core as a request of its own.
        """
        self._add(request, is_sent=True)

    def hold(self, request: GenerationRequest) -> None:
        """Add the sequences of a request while there is no core; `again` returns them for the next core."""
        self._add(request, is_sent=False)

    def _add(self, request: GenerationRequest, *, is_sent: bool) -> None:
        for sequence in request.alone():
            self._live[sequence.request_id] = _Live(self.num_asked, sequence, is_sent=is_sent)
            self.num_asked += 1

    def note(self, update: RequestUpdate) -> None:
        """Add an update to its sequence, tokens and scores; remove the sequence if the update ends it."""
        live = self._live.get(update.request_id)
        if live is None:
            return
        live.output_ids += update.token_ids
        live.num_scores += len(update.prompt_logprobs)
        if update.finish_reason is not None:
            del self._live[update.request_id]

    def forget(self, request_id: str) -> bool:
        """Remove a sequence that was aborted, and return whether it was there."""
        return self._live.pop(request_id, None) is not None

    def forget_all(self) -> None:
        """Remove all sequences, because they have ended."""
        self._live.clear()

    def core_lost(self) -> list[RequestUpdate]:
        """Record that the core is lost, so that its sequences are sent to the next core.

        A sequence is given up if an earlier core that had it was lost too, and no token or score of it came
        between the two losses: the sequence may be the reason for both.

        Returns:
            The last update, with an error, of each sequence that is given up.
        """
        given_up = []
        for request_id, live in list(self._live.items()):
            if not live.is_sent:
                continue
            live.is_sent = False
            if live.lost_at == live.progress:
                del self._live[request_id]
                error = QuarantinedError(
                    f"two engine cores were lost while they had request {request_id}, at output token "
                    f"{len(live.output_ids)}; the request is not retried."
                ).info()
                given_up.append(RequestUpdate(request_id=request_id, finish_reason="error", error=error))
            live.lost_at = live.progress
        return given_up

    def again(self) -> list[tuple[int, AddRequest]]:
        """Return the sequences that were not sent to the present core, with their numbers.

        From now on they count as sent.
        """
        unsent = [live for live in self._live.values() if not live.is_sent]
        for live in unsent:
            live.is_sent = True
        return [(live.number, AddRequest(live.request, live.output_ids, live.num_scores)) for live in unsent]
