"""The benchmark of two hosts works: with the embedded model, and so little that its figures mean nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from network import cable_network
from paths import REPOSITORY

pytestmark = pytest.mark.doors

BARS = ("throughput", "stream", "tls", "chunk", "idle", "start")


def test_g1_the_bars_of_two_hosts_are_measured() -> None:
    with cable_network():  # skips where there can be none
        program = str(REPOSITORY / "benchmarks" / "two_hosts.py")
    command = [sys.executable, program, "--model", "demo", "--quick", "--bars", ",".join(BARS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in (0, 1), done.stderr  # a bar may be missed
    assert "Traceback" not in done.stderr, done.stderr
    for bar in BARS:
        assert f"\n{bar}: m" in done.stdout, done.stdout  # met or missed
    assert "| 2 |" in done.stdout
