"""The line of the page on clusters for SLURM, typed where daemons of SLURM run (row I2)."""

from __future__ import annotations

import os
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from checkpoints import make_checkpoint
from host_faults import processes
from linked_engines import greedy_ids, make_llm
from network import Host, cable_network
from paths import REPOSITORY
from served import title_of, wait_until
from served_hosts import HostClient
from slurm_cluster import slurm_cluster, why_no_slurm
from typed_hosts import PROGRAMS, commands_of

pytestmark = pytest.mark.doors

PAGE = (REPOSITORY / "docs" / "clusters.md").read_text(encoding="utf-8")
MODEL = "Qwen2.5-0.5B"
NODES = ("node1", "node2")
PROMPTS, NUM_TOKENS = [[5, 6, 7], [11, 3]], 16
LIMIT_S = 60.0


@pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm())
def test_i2_a_job_of_slurm_serves_one_model_over_its_nodes_and_ends_with_it(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "models" / MODEL, layers=3, vocab_size=150, seed=3)
    with make_llm(checkpoint, "inprocess") as llm:
        expected = greedy_ids(llm, PROMPTS, NUM_TOKENS)
    (line,) = commands_of(PAGE, "SLURM")
    _, *words = shlex.split(line.replace("/shared", str(tmp_path)))
    home = {
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }  # of both nodes, as on a cluster
    with cable_network() as network, ExitStack() as ending:
        cluster = ending.enter_context(slurm_cluster(network.hosts, NODES))
        job = cluster.srun(words, home | {"PATH": f"{PROGRAMS}:{os.environ['PATH']}"})
        ending.callback(job.stop)
        assert "node2 has joined" in job.await_line("has joined").text
        job.await_line(":8000")
        assert HostClient(network.hosts[0], 8000).complete(PROMPTS, NUM_TOKENS, model=MODEL) == expected
        cluster.run("scancel", "--name=penstock")
        job.process.wait(LIMIT_S)
        wait_until(lambda: not any(ours(host) for host in network.hosts), LIMIT_S)


def ours(host: Host[Any]) -> list[psutil.Process]:
    return [process for process in processes(host) if "penstock" in title_of(process)]
