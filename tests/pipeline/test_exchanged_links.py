"""Links exchanged at named steps of a running pipe: no token changes, and the epoch goes on.

All but the processes is as in service: the supervisor's wiring makes the new link, both ranks are handed
their ends, a plan names the step, and the receiver reports that the link of before is empty.
"""

from __future__ import annotations

import functools
import queue
from collections import Counter
from pathlib import Path

import pytest

from linked_engines import make_llm, tokens
from linked_ranks import LinkedExecutor, over
from paths import shared_data
from penstock import LLM
from penstock.batch import ScheduledBatch
from penstock.engine.supervisor.launch import LaunchPlan
from penstock.process.child import Abandoned, ChildFailed, LinkExchanged, StatusEvent


class SwitchedExecutor(LinkedExecutor):
    """Ranks whose links a test exchanges while they run.

    Attributes:
        plan: of the launch.
        next_step: that has not been submitted.
        epochs: of all plans so far.
    """

    def __init__(self, plan: LaunchPlan, carrier: str) -> None:
        self.plan, self.next_step, self.epochs = plan, 0, set[int]()
        self.exchanged: list[int] = []
        self.other_events: list[StatusEvent] = []
        super().__init__(plan, carrier)

    def submit_plan(self, plan: ScheduledBatch) -> int:
        self.hear()
        self.next_step = plan.step_id + 1
        self.epochs.add(plan.epoch)
        return super().submit_plan(plan)

    def hear(self) -> None:
        """Do what the supervisor does with what the ranks have said."""
        while True:
            try:
                event = self.events.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, LinkExchanged):
                self.exchanged.append(event.number)
                self.release(event)
            else:
                self.other_events.append(event)

    def exchange_all(self, *steps: int) -> int:
        """Exchange each link before each of these steps, counted from now; how many that are."""
        links = [
            ((rank.stage, rank.tp_rank), (rank.stage + 1, receiver))
            for rank in self.plan.ranks
            for receiver in rank.receivers
        ]
        for ahead in steps:
            for sender, receiver in links:
                self.exchange(sender, receiver, self.next_step + ahead)
        return len(steps) * len(links)


@functools.cache
def expected(**layout: int) -> list[list[int]]:
    with make_llm(model(), over("memory"), **layout) as llm:
        return tokens(llm)


def model() -> Path:
    return shared_data("models", "stories260K")


@pytest.mark.parametrize("carrier", ["ring", "tcp", "tls"])
@pytest.mark.parametrize(("stages", "tp"), [(3, 1), (2, 2)])
def test_g1_a_running_pipe_exchanges_its_links_and_loses_nothing(carrier: str, stages: int, tp: int) -> None:
    layout = {"pipeline_parallel_size": stages, "tensor_parallel_size": tp}
    made: list[SwitchedExecutor] = []

    def make(plan: LaunchPlan) -> SwitchedExecutor:
        made.append(SwitchedExecutor(plan, carrier))
        return made[-1]

    with make_llm(model(), make, **layout) as llm:  # type: ignore[arg-type]
        (executor,) = made
        num_links = executor.exchange_all(5, 6, 12)
        assert tokens(llm) == expected(**layout)
        assert Counter(executor.exchanged) == Counter(range(1, num_links + 1)), "each once"
        num_links += exchange_while_idle(llm, executor)
        assert tokens(llm) == expected(**layout)
        assert Counter(executor.exchanged) == Counter(range(1, num_links + 1))
    executor.hear()
    assert executor.epochs == {0}
    assert not [event for event in executor.other_events if isinstance(event, Abandoned | ChildFailed)]


def exchange_while_idle(llm: LLM, executor: SwitchedExecutor) -> int:
    """As soon as it can be, with the next plan, however long that takes to come."""
    before = executor.next_step
    num_links = executor.exchange_all(0)
    assert executor.next_step == before
    return num_links
