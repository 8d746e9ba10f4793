"""An engine whose ranks are threads of the test and meet as processes do: over rings, or over streams.

All but the processes is as in service: the supervisor's wiring, what opens the ends in a rank's process, and
the core's executor over them. So a whole engine over TCP or TLS takes no longer to start than one in memory.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock.batch import LinkOrder, ScheduledBatch, StepResult
from penstock.engine.supervisor.launch import LaunchPlan
from penstock.engine.supervisor.wiring import RankAddress, Wiring
from penstock.executor.base import KVPlan
from penstock.executor.inprocess import InprocessExecutor
from penstock.executor.mp import MpExecutor
from penstock.hosts.local import LocalHost
from penstock.hosts.local_connections import KINDS, JoinedEnd
from penstock.hosts.rank_host import HostEnd, Hosts, MeetingNeed, Need, Parties
from penstock.process.child import LinkExchanged, StatusEvent
from penstock.process.config import RankConfig
from penstock.process.control import ControlReader, ControlSocket
from penstock.process.endpoints import CoreEndpoints
from penstock.rank.process import live
from stream_supervisor import SECURITIES, BothEnds

LOAD_S = 120.0
LEAVE_S = 30.0


def over(carrier: str) -> Any:
    """What `LLM` takes as its backend: "memory", "tcp", "tls", or a kind of `KINDS` such as "ring"."""
    if carrier == "memory":
        return lambda plan: InprocessExecutor(plan.ranks)
    return lambda plan: LinkedExecutor(plan, carrier)


class CarrierHost(LocalHost):
    """This machine, which joins its processes by one carrier. Ranks of one stage meet in memory all the same.

    Args:
        carrier: "tcp", "tls", or a kind of `KINDS` such as "ring"; a need without that kind gets its best.
    """

    def __init__(self, carrier: str) -> None:
        super().__init__()
        self._carrier = carrier

    def offers(self, need: Need, peer: str) -> Sequence[str]:
        if not self._is_local(need):
            return [self._carrier]
        kinds = KINDS[type(need)]
        return [self._carrier] if self._carrier in kinds else list(kinds)

    def accept(self, kind: str, need: Need, parties: Parties) -> HostEnd:
        if self._is_local(need):
            return KINDS[type(need)][kind](need)
        assert not isinstance(need, MeetingNeed)
        return BothEnds(need, kind)

    def join(self, kind: str, need: Need, parties: Parties, invitation: Any) -> HostEnd:
        return JoinedEnd(invitation)

    def _is_local(self, need: Need) -> bool:
        return self._carrier not in SECURITIES or isinstance(need, MeetingNeed)


class RankThread:
    """A rank as a thread, which is handed its ends as a process is.

    Args:
        hear: is given each of its status events, in its thread.
    """

    def __init__(self, config: RankConfig, hear: Callable[[StatusEvent], None]) -> None:
        self.write = hear
        self._control = ControlSocket()
        self._reader = ControlReader(os.dup(self._control.child_fd))
        self._control.close_child_end()
        self.send = self._control.send
        config = msgspec.structs.replace(config, are_threads=True)
        self._thread = threading.Thread(target=live, args=(config, self, self._reader), name=config.name)
        self._thread.start()

    def close(self) -> None:
        self._control.close()
        self._thread.join(LEAVE_S)
        assert not self._thread.is_alive(), self._thread.name
        self._reader.close()


class LinkedExecutor:
    """Ranks as threads, joined by one carrier.

    Args:
        carrier: as for `CarrierHost`.

    Attributes:
        events: what the ranks have said of themselves. Nobody acts on it: the core hears of a failure.
    """

    def __init__(self, plan: LaunchPlan, carrier: str) -> None:
        self._hosts = Hosts(CarrierHost(carrier))
        self._wiring = Wiring(plan, self._hosts)
        self.events: queue.SimpleQueue[StatusEvent] = queue.SimpleQueue()
        self._threads = {(rank.stage, rank.tp_rank): RankThread(rank, self.events.put) for rank in plan.ranks}
        for address, thread in self._threads.items():
            thread.send(self._wiring.rank(*address))
        self._core = MpExecutor(_received(self._wiring.core()), load_timeout_s=LOAD_S)
        self._wiring.delivered()
        self._is_open = True

    @property
    def reports(self) -> Any:
        return self._core.reports

    def start(self) -> KVPlan:
        return self._core.start()

    def poll_start(self) -> KVPlan | None:
        return self._core.poll_start()

    def exchange(self, sender: RankAddress, receiver: RankAddress, first_step: int) -> int:
        """As `PipelineProcesses.exchange_link`, before any plan is submitted; the number of the new link."""
        exchange = self._wiring.exchange_link(sender, receiver, first_step)
        for address, end in exchange.ends.items():
            self._threads[address].send(end)
        exchange.connection.delivered()
        self.exchange_link(exchange.order)
        return exchange.order.number

    def release(self, exchanged: LinkExchanged) -> None:
        """As the supervisor does when it hears of it."""
        self._wiring.release_link(exchanged.epoch, exchanged.number)

    def exchange_link(self, order: LinkOrder) -> None:
        self._core.exchange_link(order)

    def submit_plan(self, plan: ScheduledBatch) -> int:
        return self._core.submit_plan(plan)

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        return self._core.poll_results(timeout_s)

    def wait_sources(self) -> list[int]:
        return self._core.wait_sources()

    def abandon(self) -> None:
        self._core.abandon()

    def shutdown(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._core.shutdown()
        for thread in self._threads.values():
            thread.close()
        self._wiring.end()
        self._hosts.close()


def _received(ends: CoreEndpoints) -> CoreEndpoints:
    """The same with descriptors of its own, as the process of the core gets them."""
    control = ControlSocket()
    reader = ControlReader(os.dup(control.child_fd))
    control.close_child_end()
    control.send(ends)
    received = reader.receive()
    reader.close()
    control.close()
    assert isinstance(received, CoreEndpoints)
    return received
