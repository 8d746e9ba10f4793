"""How long running requests of a server over two hosts wait when something happens to it.

A part of `two_hosts.py`; `tests/support/host_faults.py` has what can happen.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from host_load import Paused, decode_disturbed, prompts
from peers.report import format_samples, markdown

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from host_faults import NOTICED_LIMIT_S, Fault, Hosts
from namespaces import CommandFailedError
from served_hosts import PairServer

HEARTBEAT_LIMIT_S = 3.0
PAUSE_BAR_S = 2.0  # above reading the lost weights; after silence above the limit of heartbeats as well


class Outcome(NamedTuple):
    """What a fault did.

    Attributes:
        pause_s: the longest wait of a request for its next token; infinite if a request has failed.
        is_same: all tokens are those of an undisturbed run.
    """

    fault: str
    pause_s: float
    is_same: bool


class FaultRuns:
    """Requests that decode on a server while faults happen to it.

    Args:
        num_requests, num_input, num_output: of each run; the fault comes when a sixth of the output is there.
        settle_s: before each run, for what takes the place of what was lost.

    Attributes:
        reading_s: in which the slowest stage has read its weights at the start.
    """

    def __init__(
        self,
        server: PairServer,
        hosts: Hosts,
        *,
        num_requests: int,
        num_input: int,
        num_output: int,
        settle_s: float,
    ) -> None:
        self._server, self._hosts = server, hosts
        self._asked = prompts(num_requests, num_input, seed=17)
        self._num_output = num_output
        self._settle_s = settle_s
        self.reading_s = max(float(event["seconds"]) for event in server.events("stage_loaded"))
        self._expected = self._decode(lambda: None).ids

    def run(self, fault: Fault) -> Outcome:
        """Let a fault happen once."""
        time.sleep(self._settle_s)
        first = len(self._server.head.lines)
        try:
            found = self._decode(lambda: fault.strike(self._server, self._hosts))
            self._server.await_event("recovered", NOTICED_LIMIT_S, first)
        except (AssertionError, CommandFailedError, IndexError, OSError) as error:
            print(f"{fault.name}: {error}", file=sys.stderr)
            return Outcome(fault.name, math.inf, is_same=False)
        return Outcome(fault.name, found.pause_s, is_same=found.ids == self._expected)

    def _decode(self, disturb: Callable[[], None]) -> Paused:
        return decode_disturbed(
            self._server.client, self._asked, self._num_output, disturb, after=self._num_output // 6
        )


def bar_s(fault: Fault, reading_s: float) -> float:
    """Return how long requests may wait after a fault."""
    return PAUSE_BAR_S + reading_s + HEARTBEAT_LIMIT_S * fault.is_silent


def fault_table(faults: Sequence[Fault], outcomes: Sequence[Outcome], reading_s: float) -> tuple[str, bool]:
    """Return a line for each fault, and whether no pause is too long and no token another."""
    rows, all_met = [], True
    for fault in faults:
        own = [outcome for outcome in outcomes if outcome.fault == fault.name]
        limit_s = bar_s(fault, reading_s)
        num_other = sum(not outcome.is_same for outcome in own)
        is_met = not num_other and max(outcome.pause_s for outcome in own) <= limit_s
        all_met &= is_met
        pauses = format_samples([outcome.pause_s for outcome in own])
        rows.append([fault.name, pauses, str(num_other), f"{limit_s:.1f}", "met" if is_met else "missed"])
    return markdown(["what happened", "longest pause, s", "runs with other tokens", "bar", ""], rows), all_met
