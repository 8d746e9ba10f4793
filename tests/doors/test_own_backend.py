"""The backend of the page on clusters that starts workers over ssh, and a head that is found (row I2)."""

from __future__ import annotations

import re
import shlex
import shutil
import stat
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from host_faults import processes
from linked_engines import greedy_ids, make_llm
from network import cable_network
from paths import REPOSITORY
from served import title_of, wait_until
from served_hosts import HostClient
from typed_hosts import Desk, commands_of

pytestmark = pytest.mark.doors

CLUSTERS = (REPOSITORY / "docs" / "clusters.md").read_text(encoding="utf-8")
MACHINES = (REPOSITORY / "docs" / "several-machines.md").read_text(encoding="utf-8")
MODEL = "Qwen2.5-0.5B"
PROMPTS, NUM_TOKENS = [[5, 6, 7], [11, 3]], 16

# Stands for ssh: it goes to the other host of the test, and has its shell run the line.
SSH = """#!/bin/sh
for line; do :; done
export HOME={home} XDG_STATE_HOME={home}
exec {enter} unshare --uts sh -c 'hostname desk && exec "$@"' sh sh -c "$line"
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / MODEL, layers=3, vocab_size=150, seed=3)


@pytest.fixture
def expected(checkpoint: Path) -> list[list[int]]:
    with make_llm(checkpoint, "inprocess") as llm:
        return greedy_ids(llm, PROMPTS, NUM_TOKENS)


def test_i2_a_backend_of_ones_own_starts_workers_over_ssh(
    tmp_path: Path, checkpoint: Path, expected: list[list[int]]
) -> None:
    (line,) = commands_of(CLUSTERS, "A backend of your own")
    *settings, typed = re.split(r"\s+(?=penstock )", line.strip())
    given = dict(word.split("=", 1) for word in " ".join(settings).split())
    with cable_network() as network, ExitStack() as ending:
        first, second = network.hosts
        (tmp_path / "shared" / "models").mkdir(parents=True)
        checkpoint.rename(tmp_path / "shared" / "models" / MODEL)
        programs = tmp_path / "programs"
        programs.mkdir()
        (tmp_path / "desk").mkdir()
        ssh = programs / "ssh"
        ssh.write_text(SSH.format(enter=shlex.join(second.command()), home=tmp_path / "desk"))
        ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
        tower = Desk(
            first, tmp_path / "tower", {"10.0.0.1": first.address, "/shared": str(tmp_path / "shared")}
        )
        path = f"{programs}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        given["PYTHONPATH"] = str(REPOSITORY / given["PYTHONPATH"])
        head = tower.typed(typed, given | {"PATH": path})
        ending.callback(head.stop)
        head.await_line("ssh starts a worker on 10.0.0.2")
        head.await_line("desk has joined")
        head.await_line(":8000")
        assert HostClient(first, 8000).complete(PROMPTS, NUM_TOKENS, model=MODEL) == expected
        assert not list((tmp_path / "desk").rglob("token*")), "the token is in no file there"
        assert head.stop() == 0
        wait_until(lambda: not any("penstock" in title_of(process) for process in processes(second)), 30.0)


def test_i2_a_worker_finds_the_head_of_its_token_in_the_local_network(
    tmp_path: Path, checkpoint: Path, expected: list[list[int]]
) -> None:
    serve, _, join = commands_of(MACHINES, "Two hosts in three commands")
    assert "`penstock worker --discover --join-token-file token`" in MACHINES
    with cable_network() as network, ExitStack() as ending:
        addresses = {"10.0.0.1": network.hosts[0].address}
        tower, desk = (
            Desk(host, tmp_path / name, addresses)
            for host, name in zip(network.hosts, ("tower", "desk"), strict=True)
        )
        (tower.directory / "models").mkdir()
        checkpoint.rename(tower.directory / "models" / MODEL)
        head = tower.typed(f"{serve} --discover")
        ending.callback(head.stop)
        head.await_line("penstock worker --discover --join-token-file token")
        shutil.copy(tower.directory / "token", desk.directory)
        worker = desk.typed(join.replace(f"--join {join.split()[3]}", "--discover"))
        ending.callback(worker.stop)
        worker.await_line(f"found a head at {network.hosts[0].address}:7700")
        head.await_line(":8000")
        assert HostClient(network.hosts[0], 8000).complete(PROMPTS, NUM_TOKENS, model=MODEL) == expected
