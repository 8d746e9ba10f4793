"""The commands of the page on clusters: one line on all hosts, and the first of them serves (row I2)."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from deployed import built, stated_commands
from linked_engines import greedy_ids, make_llm
from network import cable_network
from paths import REPOSITORY
from penstock.cli.program import run
from penstock.cli.terminal import Invocation
from served_hosts import HostClient
from typed_hosts import Desk, commands_of

pytestmark = pytest.mark.doors

BASE = REPOSITORY / "deploy" / "kubernetes" / "base"
PAGE = (REPOSITORY / "docs" / "clusters.md").read_text(encoding="utf-8")
MODEL = "Qwen2.5-0.5B"
NAMES = ("tower", "desk")
PROMPTS, NUM_TOKENS = [[5, 6, 7], [11, 3]], 16


def lines_of(launcher: str) -> Sequence[tuple[str, Mapping[str, str]]]:
    """Return what runs on each host: the line, and what the launcher puts into its environment."""
    if launcher == "torchrun":
        return [(line, {}) for line in commands_of(PAGE, "torchrun")]
    if launcher == "lws":
        return pods_of_the_base()
    (line,) = commands_of(PAGE, {"slurm": "SLURM", "mpi": "MPI"}[launcher])
    started = line[line.index("penstock ") :]  # as srun and mpirun start it; `test_slurm` has a real cluster
    environments = {
        "slurm": {"SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "10.0.0.[1-2]"},
        "mpi": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    }
    names = {"slurm": "SLURM_PROCID", "mpi": "OMPI_COMM_WORLD_RANK"}
    return [(started, environments[launcher] | {names[launcher]: str(number)}) for number in range(2)]


def pods_of_the_base() -> Sequence[tuple[str, Mapping[str, str]]]:
    """Return what runs in each pod, but for the API key, which no client here has."""
    (manifest,) = [each for each in built(BASE) if each["kind"] == "LeaderWorkerSet"]
    template = manifest["spec"]["leaderWorkerTemplate"]
    group = {"LWS_LEADER_ADDRESS": "10.0.0.1", "LWS_GROUP_SIZE": str(template["size"])}
    pods = []
    for number, kind in enumerate(("leaderTemplate", "workerTemplate")):
        (container,) = template[kind]["spec"]["containers"]
        line = shlex.join(["penstock", *container["args"]]).replace(
            "--api-key-file /run/api/api-key", "--insecure"
        )
        pods.append((line, group | {"LWS_WORKER_INDEX": str(number), "HOSTNAME": f"penstock-0-{number}"}))
    return pods


def lay_out_secret(head: Desk, worker: Desk) -> None:
    """Make what the page has typed before any pod runs, and put it where the init containers do."""
    new_token = stated_commands(PAGE, "Kubernetes")[0]
    made = head.directory.parent
    run(
        [word.replace("cluster", str(made / "cluster"), 1) for word in new_token[1:]], Invocation.of_process()
    )
    for desk in (head, worker):
        (desk.directory / "penstock" / "head").mkdir(parents=True, mode=0o700)
        shutil.copy(made / "cluster" / "token", desk.directory / "penstock" / "token")
    (worker.directory / "penstock" / "head").rmdir()
    shutil.copy(
        made / "cluster" / "head" / "cluster.pem", head.directory / "penstock" / "head" / "cluster.pem"
    )


@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "mpi", "lws"])
def test_i2_one_line_on_all_hosts_serves_one_model(tmp_path: Path, launcher: str) -> None:
    checkpoint = make_checkpoint(tmp_path / MODEL, layers=3, vocab_size=150, seed=3)
    with make_llm(checkpoint, "inprocess") as llm:
        expected = greedy_ids(llm, PROMPTS, NUM_TOKENS)
    with cable_network() as network, ExitStack() as ending:
        first, second = (host.address for host in network.hosts)
        shared = tmp_path / "shared"
        (shared / "models").mkdir(parents=True)
        checkpoint.rename(shared / "models" / MODEL)
        real = {"10.0.0.1": first, "10.0.0.2": second, "/shared": str(shared)}
        if launcher == "lws":  # what is mounted in pods
            real = {"10.0.0.1": first, "/models": f"{shared}/models"}
        mounts = [{"/var/lib": str(tmp_path / name), "/weights": str(tmp_path / name)} for name in NAMES]
        desks = [
            Desk(host, tmp_path / name, mounted | real)
            for host, name, mounted in zip(network.hosts, NAMES, mounts, strict=True)
        ]
        if launcher == "lws":
            lay_out_secret(*desks)
        programs = []
        for desk, (line, environment) in zip(desks, lines_of(launcher), strict=True):
            environment = {name: desk.as_typed(value) for name, value in environment.items()}
            if "SLURM_STEP_NODELIST" in environment:
                environment["SLURM_STEP_NODELIST"] = f"{first},{second}"
            programs.append(desk.typed(line, environment))
            ending.callback(programs[-1].stop)
        head, _ = programs
        head.await_line("has joined")
        head.await_line(":8000")
        assert HostClient(network.hosts[0], 8000).complete(PROMPTS, NUM_TOKENS, model=MODEL) == expected
