"""The supervisor's own machine as a host: ranks are its child processes, and connections have no names.

An agent uses the same class for its own machine. Children die with the thread that has started them
(`process.child.die_with_parent`), and nothing that is made here has a name in the file system. A `kill -9` of
the supervisor therefore leaves nothing behind. A `kill -9` of a worker leaves its spare process for some
seconds, and the name of the socket where the spare waits (`process.successor`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from penstock.hosts.link_streams import LinkStreams, NoStreams
from penstock.hosts.local_connections import KINDS, JoinedEnd
from penstock.hosts.local_process import LocalMember, TakenProcess, pipe, spawn
from penstock.hosts.local_socket import LocalSocket
from penstock.hosts.local_spare import SpareProcess
from penstock.hosts.logs.child_outputs import InheritedOutputs, Outputs
from penstock.hosts.member import Member
from penstock.hosts.rank_host import HostEnd, Need, Parties
from penstock.hosts.resources import HostResources
from penstock.process import entry_points
from penstock.process.child import encode_config
from penstock.process.config import (
    THIS_HOST,
    CoreConfig,
    CoreProcessConfig,
    MeasureConfig,
    MeasureProcessConfig,
    RankConfig,
    RankProcessConfig,
    SpareProcessConfig,
)
from penstock.process.control import CONTROL_OPTION, ControlSocket
from penstock.process.pipe_hosts import HostClock
from penstock.process.successor import NewParent, SpareSelf, take_over


class LocalHost:
    """The machine on which the supervisor, or an agent, runs. Implements `HeadHost` and `WorkerHost`.

    Args:
        detect: returns what the machine can give now: cores, memory and GPUs.
        name: name of this host among several.
        streams: makes the ends of connections to other hosts; None: there are no other hosts.
        outputs: says where the processes that are started here print to; None: where this process prints.
        successor_path: path of a socket where a spare process waits for the next worker if this one is
            killed; empty: the spare process ends with this one.
    """

    def __init__(
        self,
        detect: Callable[[], HostResources] = HostResources.detect,
        *,
        name: str = THIS_HOST,
        streams: LinkStreams | None = None,
        outputs: Outputs | None = None,
        successor_path: str = "",
    ) -> None:
        self._detect = detect
        self._outputs = outputs or InheritedOutputs()
        self._successor_path = successor_path
        self._spare = SpareProcess(self._start_spare, lambda: detect().free_bytes)
        self._streams = streams or NoStreams()
        self.name = name
        self.is_there = True

    def tend(self, now: float) -> None:
        """Do nothing: the caller itself runs on this host, which therefore cannot be lost."""

    def resources(self) -> HostResources:
        return msgspec.structs.replace(self._detect(), name=self.name)

    def clocks(self) -> Sequence[HostClock]:
        """Return offset 0 for this host's clock: it is the head's own clock. Implements `RankHost.clocks`.

        On a worker nothing calls this; the head estimates that host's offset (`RemoteHost.clocks`).
        """
        return [HostClock(host=self.name, offset_ns=0, error_ns=0)]

    def start_rank(self, rank: RankConfig, name: str, member_index: int) -> Member:
        if (spare := self._spare.take(rank, name, member_index)) is not None:
            return spare
        config = RankProcessConfig(rank=rank, parent_pid=os.getpid())
        return self._start(entry_points.RANK, config, name=name, stage=rank.stage, member_index=member_index)

    def keep_spare(self, threads: int) -> int:
        return self._spare.keep(threads)

    def start_ahead(self, threads: int) -> None:
        """Start a spare process, so that the next rank can start in it; which rank that is comes later.

        If an earlier worker on this machine has left its spare process, that one is adopted instead. If
        memory is short, nothing is done.

        Args:
            threads: the most threads that the rank may have.

        Raises:
            OSError: the process cannot be started, perhaps only now.
        """
        try:
            self._spare.adopt(*self._take_over_spare())
        except OSError:  # there is none
            self._spare.start_ahead(threads)

    def start_measuring(self, config: MeasureConfig, name: str) -> LocalMember:
        process = MeasureProcessConfig(measure=config, parent_pid=os.getpid())
        return self._start(entry_points.MEASURE, process, name=name, stage=config.rank.stage)

    def start_core(self, core: CoreConfig, clients: LocalSocket, name: str, member_index: int) -> LocalMember:
        config = CoreProcessConfig(core=core, parent_pid=os.getpid(), client_address=clients.bind_address)
        inherit = [clients.listen_fd]
        return self._start(entry_points.CORE, config, inherit, name=name, member_index=member_index)

    def offers(self, need: Need, peer: str) -> Sequence[str]:
        return list(KINDS[type(need)]) if peer == self.name else self._streams.offers(need)

    def accept(self, kind: str, need: Need, parties: Parties) -> HostEnd:
        if parties.peer_host == self.name:
            return KINDS[type(need)][kind](need)
        return self._streams.accept(kind, need, parties)

    def join(self, kind: str, need: Need, parties: Parties, invitation: Any) -> HostEnd:
        if parties.peer_host == self.name:
            return JoinedEnd(invitation)
        return self._streams.join(kind, need, parties, invitation)

    def use_streams(self, streams: LinkStreams) -> None:
        """Make connections to other hosts by these streams from now on, and close the ones used before."""
        self._streams.close()
        self._streams = streams

    def forget_credentials(self) -> None:
        self._streams.close()

    def close(self) -> None:
        self._spare.close()
        self._streams.close()

    def _start_spare(self, config: SpareProcessConfig) -> LocalMember:
        config = msgspec.structs.replace(config, successor_path=self._successor_path)
        return self._start(entry_points.SPARE, config, name="spare")

    def _take_over_spare(self) -> tuple[LocalMember, SpareSelf]:
        """Become the parent of the spare process of a worker that is gone.

        Raises OSError if there is no such process.
        """
        with ExitStack() as theirs, ExitStack() as ours:
            control = ControlSocket()
            theirs.callback(control.close_child_end)
            ours.callback(control.close)
            status_fd, their_status_fd = pipe(ours, theirs)
            os.set_blocking(status_fd, False)
            with self._outputs.opened() as output:
                fds = NewParent(control.child_fd, their_status_fd, output.fd or sys.stderr.fileno())
                pid, own = take_over(Path(self._successor_path), fds)
                process = TakenProcess(pid)
                member = LocalMember(process, status_fd, control, name="spare", stage=None, member_index=0)
                output.member = member
            ours.pop_all()
        return member, own

    def _start(
        self,
        module: str,
        config: msgspec.Struct,
        inherit: Sequence[int] = (),
        *,
        name: str,
        stage: int | None = None,
        member_index: int = 0,
    ) -> LocalMember:
        """Start a child that gets orders over a control socket."""
        control = ControlSocket()
        try:
            with self._outputs.opened() as output:
                member = output.member = spawn(
                    module,
                    encode_config(config),
                    name=name,
                    stage=stage,
                    member_index=member_index,
                    inherit=[*inherit, control.child_fd],
                    arguments=[CONTROL_OPTION, str(control.child_fd)],
                    control=control,
                    output_fd=output.fd,
                )
        except BaseException:
            control.close()
            raise
        control.close_child_end()
        return member
