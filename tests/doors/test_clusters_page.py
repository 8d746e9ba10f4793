"""The commands of the page on clusters: one line on all hosts, and the first of them serves (row I2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from linked_engines import make_llm
from network import cable_network
from paths import REPOSITORY
from penstock import SamplingParams
from served_hosts import HostClient
from typed_hosts import Desk, commands_of

pytestmark = pytest.mark.doors

PAGE = (REPOSITORY / "docs" / "clusters.md").read_text(encoding="utf-8")
MODEL = "Qwen2.5-0.5B"
PROMPTS, NUM_TOKENS = [[5, 6, 7], [11, 3]], 16


def lines_of(launcher: str) -> Sequence[tuple[str, Mapping[str, str]]]:
    """Return what runs on each host: the line, and what the launcher puts into its environment."""
    if launcher == "torchrun":
        return [(line, {}) for line in commands_of(PAGE, "torchrun")]
    (line,) = commands_of(PAGE, {"slurm": "SLURM", "mpi": "MPI"}[launcher])
    started = line[
        line.index("penstock ") :
    ]  # as srun and mpirun start it, which need a cluster of their own
    environments = {
        "slurm": {"SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "10.0.0.[1-2]"},
        "mpi": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    }
    names = {"slurm": "SLURM_PROCID", "mpi": "OMPI_COMM_WORLD_RANK"}
    return [(started, environments[launcher] | {names[launcher]: str(number)}) for number in range(2)]


@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "mpi"])
def test_i2_one_line_on_all_hosts_serves_one_model(tmp_path: Path, launcher: str) -> None:
    checkpoint = make_checkpoint(tmp_path / MODEL, layers=3, vocab_size=150, seed=3)
    with make_llm(checkpoint, "inprocess") as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        expected = [answer.outputs[0].token_ids for answer in llm.generate(prompts, sampling)]
    with cable_network() as network, ExitStack() as ending:
        first, second = (host.address for host in network.hosts)
        shared = tmp_path / "shared"
        (shared / "models").mkdir(parents=True)
        checkpoint.rename(shared / "models" / MODEL)
        real = {"10.0.0.1": first, "10.0.0.2": second, "/shared": str(shared)}
        desks = [
            Desk(host, tmp_path / name, real)
            for host, name in zip(network.hosts, ("tower", "desk"), strict=True)
        ]
        programs = []
        for desk, (line, environment) in zip(desks, lines_of(launcher), strict=True):
            environment = {name: desk.as_typed(value) for name, value in environment.items()}
            if "SLURM_STEP_NODELIST" in environment:
                environment["SLURM_STEP_NODELIST"] = f"{first},{second}"
            programs.append(desk.typed(line, environment))
            ending.callback(programs[-1].stop)
        head, _ = programs
        head.await_line("has joined")
        head.await_line("http://127.0.0.1:8000")
        assert HostClient(network.hosts[0], 8000).complete(PROMPTS, NUM_TOKENS, model=MODEL) == expected
