"""Runs one measuring process per rank, side by side, and gathers what they report.

Called by `engine.auto_partition`, in the thread that must outlive the processes. They load at their own pace;
timing begins when all are ready. All have ended when `measure` returns or raises.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

import msgspec

from penstock.config import MeasureConfig
from penstock.engine.children import Child, Family, spawn
from penstock.errors import StageLostError, WaitTimeoutError, error_from_info
from penstock.executor.child import Measured, Ready, encode_config
from penstock.planner.stage_costs import StageCosts

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
        children = [fleet.start(config, start_fd) for config in configs]
        while len(fleet.ready) < len(children):
            fleet.hear()
        held.close()  # the end of the pipe, which all are waiting for
        while len(fleet.costs) < len(children):
            fleet.hear()
        return [fleet.costs[child] for child in children]


class _Fleet:
    """The measuring processes.

    Attributes:
        ready: those that wait for the start.
        costs: of those that are done.
    """

    def __init__(self) -> None:
        self.ready: set[Child] = set()
        self.costs: dict[Child, StageCosts] = {}
        self._deadline = time.monotonic() + TIMEOUT_S
        self._family = Family()

    def start(self, config: MeasureConfig, start_fd: int) -> Child:
        config = msgspec.structs.replace(config, parent_pid=os.getpid(), start_fd=start_fd)
        stage = config.rank.stage
        return self._family.add(
            spawn(
                "penstock.planner.measure",
                encode_config(config),
                name=f"the measuring of stage {stage}",
                stage=stage,
                inherit=[start_fd],
            )
        )

    def hear(self) -> None:
        """Wait for news and take them."""
        remaining = self._deadline - time.monotonic()
        news, _ = self._family.wait(max(0.0, remaining))
        if not news and remaining <= 0:
            raise WaitTimeoutError(f"the stages could not be measured in {TIMEOUT_S:g} s.")
        for child in news:
            self._take(child)

    def _take(self, child: Child) -> None:
        has_ended = child.exit_code is not None  # first: then all that it said is in the pipe
        for event in child.read_status():
            if isinstance(event, Ready):
                self.ready.add(child)
            elif isinstance(event, Measured):
                self.costs[child] = msgspec.json.decode(event.costs, type=StageCosts)
        if child.status_ended:
            self._family.silence(child)
        if not has_ended:
            return
        if child.failure is not None:
            raise error_from_info(child.failure)
        if child not in self.costs:
            raise StageLostError(f"{child.name} (pid {child.pid}) {child.end()}.", stage=child.stage)
        self._family.reap(child)

    def close(self) -> None:
        """End those that are left."""
        self._family.close()
