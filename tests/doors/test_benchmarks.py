"""Every script under `benchmarks/` can be imported and knows its own arguments."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from paths import REPOSITORY

pytestmark = pytest.mark.doors

PROGRAM = REPOSITORY / "tests" / "support" / "benchmark_help.py"
PARTS = {  # of others, without a command line
    "cpu_time.py",
    "generated_vocabulary.py",
    "host_bed.py",
    "host_load.py",
    "host_pauses.py",
    "host_stages.py",
    "host_trace.py",
    "host_wire.py",
    "knowing_drafter.py",
    "learnt_layout.py",
    "measured_loads.py",
    "measured_rank.py",
    "observed.py",
    "prefix_trace.py",
    "ratios.py",
    "ruled_core.py",
    "ruled_supervisor.py",
    "sleeping_rank.py",
    "stand_in.py",
    "stub_rank.py",
    "trace_events.py",
    "whole_rank.py",
}


def test_every_benchmark_can_be_imported_and_tells_its_arguments() -> None:
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    assert len(found) > 50
    for script, outcome in found.items():
        if script in PARTS or script.startswith("peers/"):
            is_fine = outcome == "imported" or outcome.startswith("needs ")
        else:
            is_fine = outcome == "help"
        assert is_fine, f"{script}: {outcome}"
