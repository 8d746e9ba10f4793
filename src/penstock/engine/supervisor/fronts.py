"""The users of an engine: an API process, or the program that started the supervisor.

The supervisor is given one of them, its *front*, and treats both alike.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from typing import Protocol

from penstock.config.engine import EngineConfig
from penstock.config.server import ServerConfig
from penstock.engine.supervisor.launch import LaunchPlan
from penstock.engine.supervisor.told_hosts import token_bytes
from penstock.families.registry import served_names
from penstock.hosts.local_process import Descriptor, spawn
from penstock.hosts.local_socket import LocalSocket
from penstock.hosts.member_watch import MemberWatch
from penstock.process import entry_points, listening
from penstock.process.child import encode_config
from penstock.process.config import ApiProcessConfig
from penstock.process.readiness import Waitable

HOLD_S = 5.0  # an API process that replaces another waits so long for the engine before it answers anything


class EngineUser(Protocol):
    """The interface of an engine's user to the supervisor; the user is an API process or an `LLM` program."""

    def open(self) -> None:
        """Claim what the system may refuse, such as a port, before anything is loaded."""
        ...

    def start(self, watch: MemberWatch, plan: LaunchPlan, clients: Sequence[LocalSocket]) -> None:
        """Start the user's process, unless it runs already; called again when that process was lost.

        Args:
            watch: gets the process, to watch it.
            plan: launch plan of the first replica.
            clients: for each replica, the socket where the core meets its clients.
        """
        ...

    def address(self, client: LocalSocket) -> str:
        """Return the address at which users connect once all is ready: a URL, or the address of a socket.

        Args:
            client: the socket where the core of the first replica meets its clients.
        """
        ...

    @property
    def lifelines(self) -> Sequence[Waitable]:
        """The objects to poll (with a `fileno`) that become readable when the user's program has gone."""
        ...

    @property
    def drain_s(self) -> float:
        """The seconds for which running requests may go on after a signal to stop."""
        ...

    def close(self) -> None: ...


class ApiProcessFront:
    """The user of a server's engine: an API process, which speaks HTTP.

    The listening socket is bound here. The process inherits it, and so does a process that replaces it.
    """

    lifelines: Sequence[Waitable] = ()

    def __init__(self, engine: EngineConfig, server: ServerConfig) -> None:
        self._engine = engine
        self._server = server
        # The first API process answers at once that the engine loads. With `reuse_port` it answers nothing
        # before the engine does, since another server may still serve the port.
        self._hold_s = math.inf if server.reuse_port else 0.0
        self._listener: socket.socket | None = None

    @property
    def drain_s(self) -> float:
        return self._server.drain_s

    def open(self) -> None:
        self._listener = listening.listen(self._server)

    def start(self, watch: MemberWatch, plan: LaunchPlan, clients: Sequence[LocalSocket]) -> None:
        assert self._listener is not None
        config = ApiProcessConfig(
            server=self._server,
            parent_pid=os.getpid(),
            client_addresses=[client.connect_address for client in clients],
            listen_fd=self._listener.fileno(),
            model_path=plan.model_path,
            model_names=served_names(self._engine.model.model, self._server.served_model_names),
            max_model_len=plan.core.max_model_len,
            vocab_size=plan.core.vocab_size,
            eos_token_ids=plan.core.eos_token_ids,
            max_num_seqs=plan.core.scheduler.max_num_seqs,
            max_waiting_requests=plan.core.scheduler.max_waiting_requests,
            num_stages=plan.num_stages,
            stages=plan.stage_shapes,
            host_links=list(plan.host_links),
            has_prefix_cache=plan.core.cache.enable_prefix_caching,
            heartbeat_limit_s=plan.core.parallel.heartbeat_limit_s,
            hold_s=self._hold_s,
            hidden_size=plan.spec.hidden_size,
            token_bytes=token_bytes(plan),
            pooling=self._engine.model.pooling,
            chat_template=self._engine.model.chat_template,
        )
        self._hold_s = max(HOLD_S, self._hold_s)
        inherit = [config.listen_fd, *(client.handle_fd for client in clients)]
        encoded = encode_config(config)
        watch.add(spawn(entry_points.API_PROCESS, encoded, name="API process", inherit=inherit))

    def address(self, client: LocalSocket) -> str:
        assert self._listener is not None
        return listening.url(self._listener, self._server.scheme)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


class CallingProgram:
    """The program that started the supervisor, and that connects a client of its own to the core.

    Args:
        lifeline_fd: a pipe that the program holds open as long as it lives.
        caller_pid: process number of the program, which is watched as well: forked children of the program
            may hold the pipe open after its end.
    """

    drain_s = 0.0

    def __init__(self, lifeline_fd: int, caller_pid: int) -> None:
        self._lifeline_fd = lifeline_fd
        self._caller_pid = caller_pid
        self._caller_fd = -1

    @property
    def lifelines(self) -> Sequence[Waitable]:
        return [Descriptor(self._lifeline_fd), Descriptor(self._caller_fd)]

    def open(self) -> None:
        self._caller_fd = os.pidfd_open(self._caller_pid)

    def start(self, watch: MemberWatch, plan: LaunchPlan, clients: Sequence[LocalSocket]) -> None:
        """Do nothing, since the program runs already."""

    def address(self, client: LocalSocket) -> str:
        return client.connect_address_from_outside()

    def close(self) -> None:
        if self._caller_fd >= 0:
            os.close(self._caller_fd)
