"""How a request ends: it lets go of all that it holds, and its client gets one last update.

A request may hold a row, blocks, a grammar and the attention of its session; where it waits it holds none of
the first three. Called by all parts of `scheduler.scheduler` that can end a request; they decide which.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import ErrorInfo
from penstock.kvcache.allocator import BlockAllocator
from penstock.request import RequestUpdate
from penstock.scheduler.grammars import GrammarBuilds
from penstock.scheduler.preemption import release
from penstock.scheduler.prefix_reuse import PrefixReuse
from penstock.scheduler.queues import RequestPhase, RequestQueues, RequestState
from penstock.scheduler.rows import RowPool
from penstock.scheduler.updates import failed
from penstock.scheduler.windows import NoWindows


class RequestEndings:
    """Ends requests, wherever they are.

    Args:
        queues: of all live requests.
        rows, allocator, prefixes, grammars, windows: what a request may hold something of.
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

    def remove(self, request: RequestState) -> None:
        """Forget a live request and free what it holds; results in flight for it are dropped."""
        self._prefixes.leave(request)
        self._windows.forget(request)
        if request.phase is RequestPhase.RUNNING:
            self._grammars.leave(request)
            release(request, self._rows, self._allocator)
        self._queues.remove(request)

    def fail(self, request: RequestState, error: ErrorInfo) -> RequestUpdate:
        """End a request with `error`; returns its last update."""
        self.remove(request)
        return failed(request, error)

    def fail_each(self, error: ErrorInfo, concerns: Callable[[RequestState], bool]) -> list[RequestUpdate]:
        """End with `error` all live requests that it concerns."""
        return [self.fail(request, error) for request in list(self._queues) if concerns(request)]
