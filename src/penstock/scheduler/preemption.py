"""Chooses the request that gives way when the KV pool is empty, and takes its row and blocks.

The youngest running request gives way. It loses its row and its blocks, keeps its tokens, and becomes the
first in line. When it starts again it prefills prompt and output [D10]. Requests cannot preempt each other
for ever:

- Only a younger request ever gives way, so the oldest always gets its block. It fits the pool alone:
  `scheduler.admission` refuses a request that does not.
- A request for which no younger one can make room keeps what it has and skips the plan.
- A preempted request starts before all that have never run. These are younger. The exception is a request
  that was passed because its grammar had no room: it starts later, and the younger one can give way to it.
"""

from __future__ import annotations

from penstock.kvcache.allocator import BlockAllocator
from penstock.scheduler.queues import RequestQueues, RequestState
from penstock.scheduler.rows import RowPool


def choose_victim(running: list[RequestState], needy: RequestState, step_id: int) -> RequestState | None:
    """Return the running request to preempt so that `needy` gets a KV block; None if no request may be.

    That is the youngest. It may not be preempted if it is `needy` itself, or has a decode in the plan being
    made (`step_id`), which uses its blocks. Then `needy` skips this plan. In the next plan `needy` comes
    before the youngest, since requests are placed in the order of their last samples.
    """
    youngest = running[-1]
    if youngest is needy or youngest.last_sampled_step == step_id:
        return None
    return youngest


def preempt_youngest(queues: RequestQueues, rows: RowPool, allocator: BlockAllocator) -> None:
    """Take the row and the KV blocks from the youngest running request, and put it first in line."""
    release(queues.running[-1], rows, allocator)
    queues.preempt_youngest()


def release(request: RequestState, rows: RowPool, allocator: BlockAllocator) -> None:
    """Free the row and the KV blocks of a running request; the next plan announces the freed row."""
    rows.give_back(request.row)
    allocator.free(request.arrival)
