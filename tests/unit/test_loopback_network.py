"""Hosts that are loopback addresses: programs run there, and none is left, whatever happens."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from network import loopback_network

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_hosts_have_addresses_of_their_own_and_reach_each_other() -> None:
    with loopback_network(3) as network:
        assert [host.address for host in network.hosts] == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
        one, other, _ = network.hosts
        with other.socket() as listener, one.socket() as client:
            listener.bind((other.address, 0))
            listener.listen()
            client.bind((one.address, 0))
            client.connect(listener.getsockname())
            accepted, peer = listener.accept()
            accepted.close()
            assert peer[0] == one.address


def test_no_process_is_left_after_a_failure() -> None:
    pids: list[int] = []
    with pytest.raises(KeyError):
        fail_with_processes(pids)
    assert len(pids) == 2
    assert not any(map(is_running, pids))


def fail_with_processes(pids: list[int]) -> None:
    with loopback_network() as network:
        child = network.hosts[0].popen(
            [sys.executable, "-S", "-c", PARENT], stdout=subprocess.PIPE, text=True
        )
        pids += [child.pid, int(child.stdout.readline())]
        assert all(map(is_running, pids))
        raise KeyError
