"""An engine in processes of its own for `LLM`: the synchronous face of `engine.client.async_engine`.

The client of the core runs on an event loop in a thread, which makes the text too. The calling thread sleeps
until all of its requests have ended: no token wakes it. `benchmarks/offline_client.py` measures this.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from penstock.config.engine import EngineConfig
from penstock.engine.client.streams import RequestStream
from penstock.engine.ipc import AWAY_S
from penstock.engine.stats import CoreStats
from penstock.engine.supervisor.launch import LaunchPlan
from penstock.engine.supervisor.reports import Reporter
from penstock.llm.engine_client import OfflineRequest, RequestResult
from penstock.llm.loop_thread import LoopThread
from penstock.llm.progress import ProgressDisplay
from penstock.llm.prompt_preparer import PromptPreparer
from penstock.llm.supervised_engine import SupervisedEngine, engine_info
from penstock.llm.supervisor_process import SupervisorProcess


class ProcessClient:
    """An engine in processes of its own, which end at `close` or with this process, even if it is killed.

    Args:
        plan: the plan of the engine's launch.
        text: makes the text of outputs.
        reporter: gets the supervisor's events.

    Raises:
        PenstockError: the engine could not be started; the error is the first cause.
    """

    def __init__(
        self, config: EngineConfig, plan: LaunchPlan, text: PromptPreparer, reporter: Reporter
    ) -> None:
        self._supervisor = SupervisorProcess(config, reporter)
        try:
            address = self._supervisor.wait_until_ready()
            self._thread = LoopThread("penstock engine client")
            try:
                info = engine_info(config, plan, text)
                opening = SupervisedEngine.open(self._supervisor, address, text, info)
                self._engine = self._thread.run(opening)
            except BaseException:
                self._thread.close()
                raise
        except BaseException:
            self._supervisor.end()
            raise
        self.max_model_len = self._engine.client.max_model_len

    def run(self, requests: Sequence[OfflineRequest], progress: ProgressDisplay) -> list[RequestResult]:
        """Run the requests; see `EngineClient.run`.

        Requests continue after the loss of a core. If there is no core now, this first waits `AWAY_S` seconds
        at most for one.
        """
        return self._thread.run(self._run(requests, progress))

    def stats(self) -> CoreStats | None:
        """Return the core's numbers; None while there is no core."""
        return self._engine.client.stats

    def close(self) -> None:
        """End the engine. May be called twice."""
        self._thread.post(self._engine.leave)
        self._thread.close()
        self._supervisor.end()

    async def _run(
        self, requests: Sequence[OfflineRequest], progress: ProgressDisplay
    ) -> list[RequestResult]:
        self._engine.require_alive()
        client = self._engine.client
        await client.wait_for_core(AWAY_S)
        opened: list[list[RequestStream]] = []
        try:
            opened.extend(client.submit(request.request, request.make_assembler) for request in requests)
            return await asyncio.gather(*(_result(streams, progress) for streams in opened))
        finally:
            for stream in itertools.chain.from_iterable(opened):
                stream.cancel()  # after an error or an interrupt no request may run on


async def _result(streams: Sequence[RequestStream], progress: ProgressDisplay) -> RequestResult:
    result = RequestResult.of([await stream.whole() for stream in streams], streams)
    progress.advance()
    return result
