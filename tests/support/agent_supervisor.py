"""A supervisor whose later stages run on a second host: an agent of this machine, over loopback.

Run as `python -m agent_supervisor` in place of the supervisor that an `LLM` starts. The agent is a process of
its own (`python -m agent_supervisor --agent`), joined by a socket pair, as if it had been let in.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import setproctitle

from penstock.engine.supervisor import supervisor
from penstock.hosts.agent import Agent, AllowedNames
from penstock.hosts.agent_messages import Resources, ToAgent, ToHead
from penstock.hosts.agent_wire import AgentWire
from penstock.hosts.link_streams import ProvedStreams
from penstock.hosts.local import LocalHost
from penstock.hosts.rank_host import Hosts
from penstock.hosts.remote_host import RemoteHost
from penstock.process.child import die_with_parent
from penstock.process.link_ports import PortRange
from penstock.trust.identity import ClusterIdentity

MODULE = "agent_supervisor"
MODEL = "PENSTOCK_TEST_AGENT_MODEL"  # where the agent has the model
HEAD, WORKER = "tower", "desk"
HEAD_ADDRESS, WORKER_ADDRESS = "127.0.0.2", "127.0.0.3"
ANY_PORT = PortRange(0, 0)


def hosts_over_loopback() -> Hosts:
    """The head, and a host with an agent."""
    identity = ClusterIdentity.open(Path(tempfile.mkdtemp(prefix="cluster-")), time.time)
    here, there = socket.socketpair()
    subprocess.Popen(
        [sys.executable, "-m", MODULE, "--agent", str(there.fileno()), identity.name, str(os.getpid())],
        pass_fds=[there.fileno()],
    )
    there.close()
    wire: AgentWire[ToHead] = AgentWire(here, ToHead)
    while not (told := wire.receive()):
        assert wire.failure is None, wire.failure
        time.sleep(0.01)
    assert isinstance(told[0], Resources)
    streams = ProvedStreams(HEAD, identity.name, HEAD_ADDRESS, ANY_PORT, identity.link_credentials)
    worker = RemoteHost(
        wire, WORKER, told[0].resources, ["tls"], issue=identity.link_credentials, cluster=identity.name
    )
    return Hosts(LocalHost(name=HEAD, streams=streams), worker)


def serve_as_agent(connection: socket.socket, cluster: str) -> None:
    setproctitle.setproctitle("penstock agent")
    allowed = AllowedNames()
    streams = ProvedStreams(WORKER, cluster, WORKER_ADDRESS, ANY_PORT, allowed.issue)
    wire: AgentWire[ToAgent] = AgentWire(connection, ToAgent)
    agent = Agent(
        LocalHost(name=WORKER, streams=streams), wire, lambda rank: Path(os.environ[MODEL]), allowed
    )
    while agent.failure is None:
        agent.serve()
    agent.close()


if __name__ == "__main__":
    if sys.argv[1] == "--agent":
        die_with_parent(int(sys.argv[4]))
        serve_as_agent(socket.socket(fileno=int(sys.argv[2])), sys.argv[3])
    else:
        vars(supervisor)["make_hosts"] = hosts_over_loopback
        sys.exit(supervisor.main())
