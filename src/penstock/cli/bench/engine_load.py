"""The sender of a load to an engine without HTTP: it calls `penstock.AsyncLLM`.

Called by `cli.bench.replaying`. Each answer gets an account, and is audited, as an answer of a server.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from penstock.cli.bench.ledger import StreamAccount, Usage
from penstock.engine.client.outputs import RequestOutput
from penstock.errors import PenstockError, describe
from penstock.request import SamplingParams
from penstock.workloads.requests import BenchRequest


class StreamingEngine(Protocol):
    """The part of `AsyncLLM` that a load needs."""

    def generate(
        self, prompt: Any, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs while tokens come, each with all that was generated so far."""


class EngineSender:
    """Sends requests to an engine and writes the account of each answer. Holds no state between requests.

    Args:
        engine: the engine.
        clock: returns seconds; all times of accounts are by it.
    """

    def __init__(self, engine: StreamingEngine, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._engine = engine

    async def send(self, request: BenchRequest) -> StreamAccount:
        """Send one request, and return the account of the answer. A `PenstockError` goes into the account."""
        account = StreamAccount(index=request.index, started_s=self.clock())
        prompt = {"prompt_token_ids": request.prompt_token_ids}
        try:
            async with contextlib.aclosing(self._engine.generate(prompt, sampling_of(request))) as outputs:
                async for output in outputs:
                    self._book(account, output)
        except PenstockError as error:
            account.error = describe(error)
        account.ended_s = self.clock()
        return account

    def _book(self, account: StreamAccount, output: RequestOutput) -> None:
        (choice,) = output.outputs
        new_ids = list(choice.token_ids[len(account.token_ids) :])
        if new_ids:
            account.add_tokens(new_ids, self.clock())
        if output.finished:
            account.finish_reasons.append(choice.finish_reason or "none")
            account.dones += 1
            account.usage = Usage(
                prompt_tokens=len(output.prompt_token_ids), completion_tokens=len(choice.token_ids)
            )


def sampling_of(request: BenchRequest) -> SamplingParams:
    """Return the sampling of a request of a load: exactly `output_len` tokens, and no text."""
    return SamplingParams(
        temperature=0.0, max_tokens=request.output_len, ignore_eos=True, detokenize=False, seed=request.index
    )
