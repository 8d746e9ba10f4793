"""Starting children: nothing is left of one that could not be started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from penstock.hosts.local_process import spawn


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
