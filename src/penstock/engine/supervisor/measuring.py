"""Runs one measuring process per rank, side by side, and gathers what they report.

Called by `engine.supervisor.auto_partition`, in the thread that must outlive the processes. They load at
their own pace; timing begins when all are ready. All have ended when `measure` returns or raises.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

import msgspec

from penstock.distributed.meeting import close_meeting, create_meeting
from penstock.errors import WaitTimeoutError, error_from_info
from penstock.hosts.children import Child, ChildProcesses, spawn
from penstock.planner.stage_costs import StageCosts
from penstock.process import entry_points
from penstock.process.child import Measured, StatusEvent, encode_config
from penstock.process.config import MeasureConfig
from penstock.process.endpoints import MeetingHandle

TIMEOUT_S = 900.0  # to load and to measure; a rank that dies is noticed at once


def measure(configs: Sequence[MeasureConfig]) -> list[StageCosts]:
    """The costs of each rank, in order.

    Raises:
        PenstockError: what a rank has reported; `StageLostError` if it died without a word,
            `WaitTimeoutError` if it is not done in time.
    """
    with contextlib.ExitStack() as stack:
        start_fd, held_fd = os.pipe()
        stack.callback(os.close, start_fd)
        held = stack.enter_context(os.fdopen(held_fd, "wb"))
        fleet = stack.enter_context(contextlib.closing(_Fleet()))
        meetings = _meetings(configs, stack)
        children = [fleet.start(config, start_fd, meetings.get(config.rank.stage)) for config in configs]
        while not all(child.is_ready for child in children):
            fleet.hear()
        held.close()  # the end of the pipe, which all are waiting for
        while len(fleet.costs) < len(children):
            fleet.hear()
        return [fleet.costs[child] for child in children]


def _meetings(configs: Sequence[MeasureConfig], closing: contextlib.ExitStack) -> dict[int, MeetingHandle]:
    """Where the ranks of each stage meet that several share."""
    sizes = {config.rank.stage: config.rank.tp_size for config in configs if config.rank.tp_size > 1}
    meetings = {}
    for stage, size in sizes.items():
        meetings[stage] = create_meeting(size)
        closing.callback(close_meeting, meetings[stage])
    return meetings


class _Fleet:
    """The measuring processes.

    Attributes:
        costs: of those that are done.
    """

    def __init__(self) -> None:
        self.costs: dict[Child, StageCosts] = {}
        self._deadline = time.monotonic() + TIMEOUT_S
        self._processes = ChildProcesses(self._take)

    def start(self, config: MeasureConfig, start_fd: int, meeting: MeetingHandle | None) -> Child:
        config = msgspec.structs.replace(config, parent_pid=os.getpid(), start_fd=start_fd, meeting=meeting)
        inherit = [start_fd] if meeting is None else [start_fd, meeting.memory_fd, meeting.store_fd]
        return self._processes.add(
            spawn(
                entry_points.MEASURE,
                encode_config(config),
                name=f"the measuring of {config.rank.name}",
                stage=config.rank.stage,
                inherit=inherit,
            )
        )

    def hear(self) -> None:
        """Wait for news and take them."""
        remaining = self._deadline - time.monotonic()
        news, _ = self._processes.wait(max(0.0, remaining))
        if not news and remaining <= 0:
            raise WaitTimeoutError(f"the stages could not be measured in {TIMEOUT_S:g} s.")
        for child in news:
            has_ended = child.exit_code is not None  # first: then all that it said is in the pipe
            self._processes.hear(child)
            if has_ended:
                self._bury(child)

    def _take(self, child: Child, event: StatusEvent) -> None:
        if isinstance(event, Measured):
            self.costs[child] = msgspec.json.decode(event.costs, type=StageCosts)

    def _bury(self, child: Child) -> None:
        if child.failure is not None or child not in self.costs:
            raise error_from_info(child.end())
        self._processes.reap(child)

    def close(self) -> None:
        """End those that are left."""
        self._processes.close()
