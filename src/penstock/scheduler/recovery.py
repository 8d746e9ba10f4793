"""Puts running requests back in line after a loss of ranks, and ends those that may be the reason.

The ranks of the next epoch know no rows, blocks or grammars, so the core forgets which ones the ranks had.
The tokens of the requests stay. Called by `scheduler.scheduler`.
"""

from __future__ import annotations

from penstock.kvcache.allocator import BlockAllocator
from penstock.request import RequestUpdate
from penstock.scheduler.grammars import GrammarBuilds
from penstock.scheduler.issued_steps import IssuedSteps
from penstock.scheduler.preemption import preempt_youngest
from penstock.scheduler.prefix_reuse import PrefixReuse
from penstock.scheduler.queues import NO_STEP, RequestQueues
from penstock.scheduler.request_endings import RequestEndings
from penstock.scheduler.rows import RowPool
from penstock.scheduler.updates import quarantined


class Recovery:
    """Puts requests back in line when ranks are lost, and takes their rows, blocks and grammars back.

    Attributes:
        num_requeued: requests that a loss has interrupted, counted once for each loss.
    """

    def __init__(
        self,
        queues: RequestQueues,
        rows: RowPool,
        allocator: BlockAllocator,
        prefixes: PrefixReuse,
        grammars: GrammarBuilds,
        endings: RequestEndings,
    ) -> None:
        self._queues = queues
        self._rows = rows
        self._allocator = allocator
        self._prefixes = prefixes
        self._grammars = grammars
        self._endings = endings
        self.num_requeued = 0

    def requeue(self, issued: IssuedSteps) -> list[RequestUpdate]:
        """Put all running requests first in line, and forget the steps in flight.

        A request may be the reason for the loss if it was in a step in flight, or its grammar was being
        built, at this loss and at the one before, and it has gained no token between. Such a request ends
        with an error.

        Args:
            issued: the steps in flight, which will not return; it is emptied.

        Returns:
            The last updates of the requests that were ended.
        """
        updates = []
        in_flight = issued.rows()
        for request in [
            request for request in self._queues.running if request.awaits_grammar or request.row in in_flight
        ]:
            if request.lost_at == request.progress:
                updates.append(self._endings.fail(request, quarantined(request)))
            request.lost_at = request.progress
        self.num_requeued += len(self._queues.running)
        while self._queues.running:
            preempt_youngest(self._queues, self._rows, self._allocator)
        for request in self._queues:
            request.num_pending, request.num_void, request.last_sampled_step = 0, 0, NO_STEP
            request.num_windows_ahead = 0
            request.guessed_ids.clear()
            request.num_scores_planned = request.num_scores
        issued.give_up()
        self._rows.announce_freed()  # the new ranks know no rows: no plan may name freed ones
        self._grammars.forget_all()
        self._prefixes.lose_all()  # a rank that replaces a lost one has an empty cache
        return updates
