"""Asserts what must hold between any two calls of the scheduler; called by tests and by an idle engine."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kvcache.allocator import BlockAllocator
from penstock.scheduler.queues import RequestPhase, RequestQueues, RequestState
from penstock.scheduler.rows import RowPool


def check_consistency(
    queues: RequestQueues,
    rows: RowPool,
    allocator: BlockAllocator,
    pending: Sequence[RequestState],
) -> None:
    """Assert that queues, rows (indices on the ranks), KV blocks and token counts agree with each other.

    Args:
        pending: for each sampled token that is still in flight, the request that it is for.
    """
    queues.check_invariants()
    rows.check_invariants([request.row for request in queues.running])
    allocator.check_invariants()
    assert allocator.owners() == {request.arrival for request in queues.running}, "blocks without a row"
    for request in queues:
        assert request.num_pending == pending.count(request), f"{request} has lost or doubled a result"
        assert len(request.token_ids) + request.num_awaited <= request.max_len, f"{request} overshoots"
    for request in queues.running:
        _check_running(request, len(allocator.table(request.arrival)) * allocator.block_size)


def _check_running(request: RequestState, held_tokens: int) -> None:
    assert request.phase is RequestPhase.RUNNING
    assert request.num_scheduled <= held_tokens, f"{request} runs beyond its blocks"
    if not request.is_prefilling:
        # No step has written the newest token's keys and values, unless its hidden state is wanted.
        planned = max(1, len(request.token_ids) + request.num_awaited - (request.pooling is None))
        assert request.num_scheduled == planned, f"{request}: the two clocks disagree"
