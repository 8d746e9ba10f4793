"""Sends the requests of a load at their times, over HTTP or to an engine, and checks the answers.

If all requests arrive at once and the requests in flight are bounded, this is a closed loop: as many clients
as the bound says, each of which sends its next request when its last one has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.cli.bench.ledger import StreamAccount, audit
from penstock.cli.bench.results import RunResult
from penstock.workloads.requests import BenchRequest


class LoadSender(Protocol):
    """Sends requests and writes the account of each answer.

    Attributes:
        clock: returns seconds; all times of accounts are by it.
    """

    clock: Callable[[], float]

    async def send(self, request: BenchRequest) -> StreamAccount:
        """Send one request, and return the account of the answer. A failure of it goes into the account."""


async def replay(
    sender: LoadSender, requests: Sequence[BenchRequest], max_concurrency: int | None = None
) -> RunResult:
    """Send every request at its arrival time, at most `max_concurrency` at once, and audit the answers."""
    gate = asyncio.Semaphore(max_concurrency or len(requests))
    started = sender.clock()

    async def one(request: BenchRequest) -> StreamAccount:
        await asyncio.sleep(max(0.0, started + request.arrival_s - sender.clock()))
        async with gate:
            return await sender.send(request)

    accounts = await asyncio.gather(*(one(request) for request in requests))
    return RunResult(
        requests=requests,
        accounts=accounts,
        duration_s=sender.clock() - started,
        audit=audit(requests, accounts),
    )
