"""Checks new requests, puts them in line, and ends those that have waited too long.

    request ──admission──▶ line ──▶ (`scheduler.placement` starts requests)
                             └── longer than `queue_timeout_s` without a start ──▶ error

Called by `scheduler.scheduler`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.errors import UnavailableError
from penstock.request import GenerationRequest, RequestUpdate
from penstock.scheduler.admission import Admission
from penstock.scheduler.prefix_reuse import PrefixReuse
from penstock.scheduler.queues import RequestQueues
from penstock.scheduler.request_endings import RequestEndings


class Intake:
    """The entrance of the scheduler: puts new requests in line, and ends those that wait too long to start.

    Args:
        admission: refuses requests that can never run here.
        queues: gets the accepted requests.
        prefixes: looks for the prefix of each request that joins; it has the sessions.
        endings: ends the requests that have waited too long.
        queue_timeout_s: seconds that a request may wait for its first start.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        admission: Admission,
        queues: RequestQueues,
        prefixes: PrefixReuse,
        endings: RequestEndings,
        queue_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._admission = admission
        self._queues = queues
        self._prefixes = prefixes
        self._endings = endings
        self._queue_timeout_s = queue_timeout_s
        self._clock = clock

    @property
    def max_len(self) -> int:
        """The most tokens (prompt + output) of a request: the model's limit or the KV pool's, if smaller."""
        return self._admission.max_len

    def add_request(
        self, request: GenerationRequest, output_ids: Sequence[int] | None = None, num_scores: int = 0
    ) -> None:
        """Check a request and its followers (further sequences of the same prompt), and queue them.

        The session of a new request, if it names one, must be open. Arguments and errors are those of
        `Scheduler.add_request`.
        """
        if output_ids is None:
            self._prefixes.sessions.require(request.sampling.session_id)
        for state in self._admission.accept(request, self._queues, self._clock(), output_ids, num_scores):
            self._queues.add(state)
            self._prefixes.enter(state)

    def expire_requests(self) -> list[RequestUpdate]:
        """End requests that have waited longer than `queue_timeout_s` to start, and close idle sessions.

        Returns:
            The last update of each request that was ended, with the error.
        """
        now = self._clock()
        limit = self._queue_timeout_s
        updates = []
        self._prefixes.sessions.expire()
        while (request := self._queues.first_new()) is not None and now - request.arrival_time >= limit:
            request.queue_seconds = now - request.arrival_time
            error = UnavailableError(
                f"the request waited {request.queue_seconds:.1f} s to start; the limit is {limit:g} s.",
                remedy="Try again later.",
                code="queue_timeout",
            )
            updates.append(self._endings.fail(request, error.info()))
        return updates

    def next_expiry(self) -> float | None:
        """Return the clock time at which the next waiting request times out; None if no new request waits."""
        request = self._queues.first_new()
        return None if request is None else request.arrival_time + self._queue_timeout_s
