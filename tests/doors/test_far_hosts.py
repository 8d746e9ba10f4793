"""Two hosts that are far apart: the wire is measured, more plans are in flight, and no token changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoints import make_checkpoint
from linked_engines import make_llm, tokens
from network import Host, ShapedLink, shaped_network
from paths import REPOSITORY
from served import wait_until

pytestmark = pytest.mark.doors
PORT = 7700
DELAY_S = 0.1  # each way; a stage takes far less
LIMIT_S = 240.0


def start_head(host: Host[ShapedLink], model: Path, directory: Path) -> subprocess.Popen[str]:
    settings = {
        "pipeline_parallel_size": 2,
        "hosts": 2,
        "listen_workers": f"{host.address}:{PORT}",
        "join_token_file": str(directory / "token"),
        "state_dir": str(directory / "tower"),
    }
    program = REPOSITORY / "tests" / "support" / "far_head.py"
    words = json.dumps({"model": str(model), "settings": settings})
    return host.popen([sys.executable, str(program), words], stdout=subprocess.PIPE, text=True)


def start_worker(host: Host[ShapedLink], head: str, model: Path, directory: Path) -> subprocess.Popen[str]:
    words = ["worker", "--join", f"{head}:{PORT}", "--join-token-file", str(directory / "token")]
    words += ["--name", "desk", "--models-dir", str(model.parent), "--state-dir", str(directory / "desk")]
    return host.popen([sys.executable, "-m", "penstock", *words], stdout=subprocess.PIPE, text=True)


def test_g1_r15_far_hosts_have_more_plans_in_flight_and_give_the_tokens_of_one(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", layers=3, vocab_size=150, seed=3)
    with make_llm(model, "inprocess") as llm:
        expected = tokens(llm)
        near = llm.stats()
    assert near is not None
    assert (near.scheduler.fill_plans, near.scheduler.wire_s) == (1, 0.0)
    with shaped_network() as network:
        one, other = network.hosts
        other.link.set_delay(DELAY_S)
        head = start_head(one, model, tmp_path)
        wait_until(lambda: (tmp_path / "token").exists() or head.poll() is not None, LIMIT_S)
        start_worker(other, one.address, model, tmp_path)
        printed, _ = head.communicate(timeout=LIMIT_S)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    assert found["tokens"] == expected
    assert found["scheduler"]["wire_s"] >= 2 * DELAY_S
    assert found["scheduler"]["fill_plans"] > 2
