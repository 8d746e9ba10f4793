"""Ends requests: each lets go of all that it holds, and gets one last update unless its client aborted it.

A request may hold a row, blocks and a grammar while it runs, and keeps its session from being idle while it
lives. Where a stage had no memory for a step, the keys and values of its tokens are not all there:

    plan     a: tokens of its 3rd block     b: a token of its 5th block       the step fails: a and b end
    others   c began with a's 3rd block, which was findable as soon as the plan was issued: c ends, too

Called by all parts of `scheduler.scheduler` that can end a request; they decide which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.errors import ErrorInfo
from penstock.kvcache.allocator import BlockAllocator
from penstock.request import RequestUpdate
from penstock.scheduler.grammars import GrammarBuilds
from penstock.scheduler.plan_builder import PlanBuilder
from penstock.scheduler.preemption import release
from penstock.scheduler.prefix_reuse import PrefixReuse
from penstock.scheduler.queues import RequestPhase, RequestQueues, RequestState
from penstock.scheduler.rows import RowPool
from penstock.scheduler.updates import failed
from penstock.scheduler.windows import NoWindows


class RequestEndings:
    """Ends requests, waiting or running: frees what they hold, and makes their last updates.

    Args:
        queues: all live requests.
        rows, allocator, prefixes, grammars, windows: the parts of which a request may hold something.

    Attributes:
        num_failed_steps: steps for which a stage had no memory.
    """

    def __init__(
        self,
        queues: RequestQueues,
        rows: RowPool,
        allocator: BlockAllocator,
        prefixes: PrefixReuse,
        grammars: GrammarBuilds,
        windows: NoWindows,
    ) -> None:
        self._queues = queues
        self._rows = rows
        self._allocator = allocator
        self._prefixes = prefixes
        self._grammars = grammars
        self._windows = windows
        self.num_failed_steps = 0

    def remove(self, request: RequestState) -> None:
        """Forget a live request and free what it holds; results in flight for it will be dropped."""
        self._prefixes.leave(request)
        self._windows.forget(request)
        if request.phase is RequestPhase.RUNNING:
            self._grammars.leave(request)
            release(request, self._rows, self._allocator)
        self._queues.remove(request)

    def fail(self, request: RequestState, error: ErrorInfo) -> RequestUpdate:
        """End a request with `error`, and return its last update."""
        self.remove(request)
        return failed(request, error)

    def fail_step(self, issued: PlanBuilder, error: ErrorInfo) -> list[RequestUpdate]:
        """End with `error` the requests of a step that was not computed, and the requests that build on it.

        A request builds on the step if it began with blocks that the step was to compute. These blocks are
        not found any more. Other preempted requests go on, but their ids in flight are dropped.

        Args:
            issued: the plan of the step.

        Returns:
            The last updates of the requests that were ended.
        """
        self.num_failed_steps += 1
        void: set[int] = set()
        for request, size in zip(issued.sampling, issued.window_sizes, strict=True):
            request.num_pending -= size
            if request.num_void:  # its tokens in this step are void already, so it loses nothing
                request.num_void -= size
                void.add(request.arrival)
        failed: list[RequestState] = []
        missing: set[int] = set()
        for request, start in zip(issued.requests, issued.start_positions, strict=True):
            if request.arrival not in void:
                missing |= self._blocks_from(request, start - request.num_rejected)
                failed.append(request)
        followers = self._holders_of(missing, failed)
        # What is in flight for a preempted request may rest on the failed step. It is dropped: when the
        # request runs again it computes the same tokens from its known ones.
        for request in self._queues.preempted:
            request.num_void, request.num_windows_ahead = request.num_pending, 0
            request.guessed_ids.clear()
        for request in failed + followers:
            self._prefixes.distrust(request)
        return [
            self.fail(request, error)
            for request in failed + followers
            if request.phase is not RequestPhase.FINISHED
        ]

    def _blocks_from(self, request: RequestState, position: int) -> set[int]:
        """Return a request's blocks with tokens from `position` on; of an ended one those still findable."""
        first = max(0, position) // self._allocator.block_size
        named = self._allocator.find(request.block_hashes)
        return {*self._allocator.table(request.arrival)[first:], *named[first:]}

    def _holders_of(self, missing: set[int], known: Sequence[RequestState]) -> list[RequestState]:
        """Return the running requests that began with missing blocks, without the `known` ones.

        The blocks of such a request from its first missing one on count as missing too.
        """
        tables = {
            request: self._allocator.table(request.arrival)
            for request in self._queues.running
            if request not in known
        }
        found: list[RequestState] = []
        while holders := [one for one, table in tables.items() if missing.intersection(table)]:
            for holder in holders:
                table = tables.pop(holder)
                missing = missing.union(table[min(map(table.index, missing.intersection(table))) :])
            found += holders
        return found

    def fail_each(self, error: ErrorInfo, concerns: Callable[[RequestState], bool]) -> list[RequestUpdate]:
        """End with `error` all live requests for which `concerns` returns True; return their last updates."""
        return [self.fail(request, error) for request in list(self._queues) if concerns(request)]
