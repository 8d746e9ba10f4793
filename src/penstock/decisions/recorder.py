"""The recorder of a core's decisions, which notes what the core reads; by default a recorder notes nothing.

    clock, memory, executor, drafter, guides ──▶ recorder ──▶ the core's own scheduler
                                            └──calls──▶ `decisions.log_writer`

`engine.core.core_assembly` gives the recorder the clock, the executor, the drafter and the guides, and the
core gets what the recorder returns. `engine.core.recorded_core` says when a call of the core begins and ends.
If nothing is recorded, the recorder returns what it was given, so that calls cost nothing more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.decisions.core_call import Asked, Assembly, CoreCall
from penstock.decisions.log_file import create_log
from penstock.decisions.log_writer import LogWriter
from penstock.decisions.recorded_executor import RecordedExecutor
from penstock.decisions.recorded_guesses import RecordedDrafter, RecordedGuides
from penstock.errors import UsageError
from penstock.executor.base import Executor, KVPlan
from penstock.process.config import CoreConfig
from penstock.request import RequestUpdate
from penstock.speculation.drafter import Drafter
from penstock.speculation.grammar_guides import NoGuides

_logger = logging.getLogger(__name__)


class NoRecorder:
    """Records nothing; other recorders, and `replay.playback`, override its methods."""

    def begin_assembly(self, config: CoreConfig, kv_plan: KVPlan, *, recovers: bool, epoch: int) -> None:
        """Begin the call in which scheduler and core are made."""

    def clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        """Return the clock that the core reads."""
        return clock

    def free_memory(self, available: Callable[[], int]) -> Callable[[], int]:
        """Return the function that tells the core how many bytes of its host's memory are free."""
        return available

    def executor(self, executor: Executor) -> Executor:
        """Return the executor that the core talks to."""
        return executor

    def drafter(self, drafter: Drafter) -> Drafter:
        """Return the drafter that the scheduler asks."""
        return drafter

    def guides(self, guides: NoGuides) -> NoGuides:
        """Return the guides that the scheduler asks."""
        return guides

    def close(self) -> None:
        """Close the recorder, since the core has ended."""


NO_RECORDER = NoRecorder()


class DecisionRecorder(NoRecorder):
    """A recorder that notes the calls of one core.

    Args:
        writer: writes the calls; closed with the recorder.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self._call: CoreCall | None = None

    def begin_assembly(self, config: CoreConfig, kv_plan: KVPlan, *, recovers: bool, epoch: int) -> None:
        self._call = CoreCall(Assembly(config, kv_plan, recovers, epoch))

    def clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        def read() -> float:
            now = clock()
            if self._call is not None:
                self._call.times.append(now)
            return now

        return read

    def free_memory(self, available: Callable[[], int]) -> Callable[[], int]:
        def read() -> int:
            free: int | None = None
            try:
                free = available()
                return free
            finally:
                if self._call is not None:
                    self._call.free_bytes.append(free)

        return read

    def executor(self, executor: Executor) -> Executor:
        return RecordedExecutor(executor, self.current)

    def drafter(self, drafter: Drafter) -> Drafter:
        if self._call is not None:
            self._call.drafter = drafter.name, drafter.is_at_tail
        return RecordedDrafter(drafter, self.current)

    def guides(self, guides: NoGuides) -> NoGuides:
        return RecordedGuides(guides, self.current)

    def close(self) -> None:
        self._writer.close()

    def current(self) -> CoreCall | None:
        """Return the call that the core is in; None: it is in none, or nothing is written any more."""
        return self._call

    def begin(self, asked: Asked) -> bool:
        """Begin a call, unless the core is in a call already, or nothing is written any more.

        Returns:
            Whether the call began; if so, the caller must end it.
        """
        if self._call is not None or self._writer.is_over:
            return False
        self._call = CoreCall(asked)
        return True

    def end(self, updates: Sequence[RequestUpdate] = (), *, is_refused: bool = False) -> None:
        """End the call.

        Args:
            updates: the updates that the call returns.
            is_refused: the call raised an error.
        """
        call, self._call = self._call, None
        assert call is not None, "no call is being recorded"
        call.ended = [update.request_id for update in updates if update.finish_reason is not None]
        call.is_refused = is_refused
        self._writer.put(call)


def open_recorder(config: CoreConfig) -> NoRecorder:
    """Return the recorder that a core's settings ask for.

    Raises:
        UsageError: the file cannot be written, or the engine has a KV store or host tier. Decisions depend on
            the blocks that are found there, which are not recorded.
    """
    if not config.record_decisions:
        return NO_RECORDER
    if config.store is not None:
        raise UsageError(
            "decisions cannot be recorded with a KV store or host tier: the blocks that it finds are not "
            "recorded.",
            remedy="Leave out --record-decisions, or --kv-store and --kv-host-bytes.",
            param="record_decisions",
        )
    path = Path(config.record_decisions)
    if config.replica is not None:
        path = path.with_name(f"{path.name}.replica{config.replica}")
    file, name = create_log(path)
    if name != path:
        _logger.warning("%s exists: decisions are recorded in %s.", path, name)
    return DecisionRecorder(LogWriter(file, name))
