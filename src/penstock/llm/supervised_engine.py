"""A running engine as `LLM` and `AsyncLLM` use it: a client of the core, and the engine's supervisor."""

from __future__ import annotations

import asyncio

from penstock.config.engine import EngineConfig
from penstock.engine.client.async_engine import AsyncEngine
from penstock.engine.client.core_health import EngineInfo
from penstock.engine.ipc import silence_limit_s
from penstock.engine.supervisor.launch import LaunchPlan
from penstock.errors import PenstockError, StageLostError
from penstock.llm.prompt_preparer import PromptPreparer
from penstock.llm.supervisor_process import START_TIMEOUT_S, SupervisorProcess


def engine_info(config: EngineConfig, plan: LaunchPlan, text: PromptPreparer) -> EngineInfo:
    """Return the facts about an engine that its client must know before it connects."""
    return EngineInfo(
        max_model_len=plan.core.max_model_len,
        vocab_size=plan.core.vocab_size,
        vector=text.vector,
        pooling=text.pooling,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_waiting_requests=config.scheduler.max_waiting_requests,
        silence_limit_s=silence_limit_s(config.parallel.heartbeat_limit_s),
    )


class SupervisedEngine:
    """An engine that runs. It is used on the event loop on which it was opened.

    The supervisor belongs to the caller of `open`, which must end it.

    Attributes:
        client: the client of the core. When the supervisor has ended, the client's streams end with the first
            cause.
    """

    def __init__(self, supervisor: SupervisorProcess, client: AsyncEngine) -> None:
        self.client = client
        self._supervisor = supervisor
        self._failure: PenstockError | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(supervisor.fileno(), self._hear)

    @classmethod
    async def open(
        cls, supervisor: SupervisorProcess, address: str, text: PromptPreparer, info: EngineInfo
    ) -> SupervisedEngine:
        """Connect to the core at this address, and return when it is ready.

        Raises:
            PenstockError: the engine did not answer, or is lost.
        """
        engine = cls(supervisor, AsyncEngine(address, text.tokenizer, info))
        try:
            await engine.client.start(START_TIMEOUT_S)
        except BaseException:
            engine.leave()
            raise
        return engine

    def require_alive(self) -> None:
        """Raise the first cause if the engine is lost for good: its supervisor has ended."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def leave(self) -> None:
        """Close the client, and stop listening to the supervisor. Open streams end with an error."""
        if self._failure is None:
            self._loop.remove_reader(self._supervisor.fileno())
        self.client.close()

    def _hear(self) -> None:
        """Report what the supervisor says. If it has ended, end the streams: no other core will come."""
        self._supervisor.pass_on_news()
        if self._supervisor.has_ended:
            self._loop.remove_reader(self._supervisor.fileno())
            lost = StageLostError("the supervisor of the engine has ended.")
            self._failure = self._supervisor.first_cause(lost)
            self.client.lose(self._failure)
