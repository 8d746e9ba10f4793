"""Starting processes of this machine: nothing is left of one that could not be started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.config.engine import EngineConfig, ModelConfig
from penstock.engine.supervisor.launch import resolve
from penstock.hosts.local import LocalHost
from penstock.hosts.local_process import LocalMember, spawn
from penstock.hosts.local_socket import LocalSocket
from penstock.hosts.logs.child_outputs import PipedOutputs
from penstock.process.child import Alive


def _descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_child_that_cannot_be_started_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    before = _descriptors()
    with pytest.raises(FileNotFoundError):
        spawn("penstock.absent", b"{}", name="nobody")
    assert _descriptors() == before


def test_r6_nor_does_a_rank_or_a_core_that_its_host_cannot_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = LocalHost()
    plan = resolve(EngineConfig(model=ModelConfig(model="demo")), [host.resources()])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    clients = LocalSocket()
    before = _descriptors()
    with pytest.raises(FileNotFoundError):
        host.start_rank(plan.ranks[0], "stage 0", 0)
    with pytest.raises(FileNotFoundError):
        host.start_core(plan.core, clients, "core", -1)
    assert _descriptors() == before
    clients.close()


LEFT_SPARE = """
import os, sys
from pathlib import Path
from penstock.process.child import Alive, StatusWriter
from penstock.process.control import ControlReader
from penstock.process.successor import SpareSelf, SuccessorDoor

door = SuccessorDoor(Path(sys.argv[1]))
print("up", flush=True)
parent = door.await_parent(SpareSelf(threads=4, own_bytes=70))
os.write(parent.output_fd, b"a line\\n")
rank = ControlReader(parent.control_fd).receive().read()
StatusWriter(parent.status_fd).write(Alive())
os.write(parent.output_fd, f"becomes {rank.name}\\n".encode())
"""


def test_r15_the_spare_of_a_worker_that_is_gone_becomes_the_first_rank_of_the_next(tmp_path: Path) -> None:
    before = _descriptors()
    left = subprocess.Popen(
        [sys.executable, "-c", LEFT_SPARE, str(tmp_path / "spare")], stdout=subprocess.PIPE
    )
    assert left.stdout is not None
    assert left.stdout.readline() == b"up\n"
    outputs = PipedOutputs()
    host = LocalHost(outputs=outputs, successor_path=str(tmp_path / "spare"))
    host.start_ahead(2)
    rank = resolve(EngineConfig(model=ModelConfig(model="demo")), [host.resources()]).ranks[0]
    member = host.start_rank(rank, "stage 0", 0)
    assert isinstance(member, LocalMember)
    assert member.pid == left.pid
    assert member.await_end() == -9, "how it has ended only its first parent knows"
    assert left.wait() == 0
    assert [type(event) for event in member.read_status()] == [Alive]
    assert outputs.take() == [("stage 0", "a line"), ("stage 0", "becomes stage 0")]
    member.close()
    host.close()
    outputs.close()
    left.stdout.close()
    assert _descriptors() == before


def test_r15_where_no_worker_has_left_a_spare_one_is_started_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    before = _descriptors()
    host = LocalHost(successor_path=str(tmp_path / "spare"))
    with pytest.raises(FileNotFoundError, match="absent"):
        host.start_ahead(2)
    assert _descriptors() == before
