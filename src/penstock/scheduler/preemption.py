"""Chooses the request that gives way when the KV pool is empty, and takes its row and blocks.

The youngest running request does. It loses its row and its blocks, keeps its tokens, and comes back as the
first in line, prefilling prompt and output again [D10]. Why nothing livelocks:

- Only a younger request ever gives way, so the oldest always gets its block; it fits the pool alone,
  as `scheduler.admission` has seen to.
- A request for which no younger one can make room keeps what it has and skips the plan.
- A preempted request is admitted before all that wait. They are younger, unless their grammar waits for
  room; then they start behind it, and it can give way to them.
"""

from __future__ import annotations

from penstock.kvcache.allocator import BlockAllocator
from penstock.scheduler.queues import RequestQueues, RequestState
from penstock.scheduler.rows import RowPool


def choose_victim(running: list[RequestState], needy: RequestState, step_id: int) -> RequestState | None:
    """Return the running request to preempt so that `needy` gets a KV block; None if no request may be.

    That is the youngest, unless it is `needy` itself or has a decode in the plan being made (`step_id`),
    where its blocks are in use. With None, `needy` skips this plan. Requests are placed in the order of their
    last sample, so it comes before the other in the next plan.
    """
    youngest = running[-1]
    if youngest is needy or youngest.last_sampled_step == step_id:
        return None
    return youngest


def preempt_youngest(queues: RequestQueues, rows: RowPool, allocator: BlockAllocator) -> None:
    """Take the row (slot) and the KV blocks from the youngest running request, and put it first in line."""
    release(queues.running[-1], rows, allocator)
    queues.preempt_youngest()


def release(request: RequestState, rows: RowPool, allocator: BlockAllocator) -> None:
    """Free the row (slot) and the KV blocks of a running request; the next plan announces the freed row."""
    rows.give_back(request.row)
    allocator.free(request.arrival)
