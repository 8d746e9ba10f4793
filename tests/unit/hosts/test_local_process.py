"""Starting processes of this machine: nothing is left of one that could not be started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from penstock.config.engine import EngineConfig, ModelConfig
from penstock.engine.supervisor.launch import resolve
from penstock.hosts.local import LocalHost
from penstock.hosts.local_process import spawn
from penstock.hosts.local_socket import LocalSocket


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
