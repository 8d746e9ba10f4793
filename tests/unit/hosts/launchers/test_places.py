"""Which process a launcher has made of this one: what torchrun, SLURM, MPI and Kubernetes say (row I2)."""

from __future__ import annotations

import pytest

from penstock.errors import UsageError
from penstock.hosts.launchers.host_list import first_host
from penstock.hosts.launchers.places import LAUNCHERS, Launcher, Place, place_of

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "tower", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_NODELIST": "node[01-08]",
    "SLURMD_NODENAME": "node08",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}
LWS = {"LWS_LEADER_ADDRESS": "llm-0.llm.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}


@pytest.mark.parametrize(
    ("launcher", "environment", "place"),
    [
        ("torchrun", TORCHRUN, Place(1, 3, "tower")),
        ("slurm", SLURM, Place(1, 2, "node07", "node08")),
        ("mpi", OPEN_MPI, Place(0, 2)),
        ("mpi", MPICH, Place(1, 2)),
        ("lws", LWS | {"HOSTNAME": "llm-0-1"}, Place(1, 2, "llm-0.llm.default", "llm-0-1")),
        ("lws", LWS, Place(1, 2, "llm-0.llm.default")),
    ],
)
def test_i2_the_place_is_what_the_launcher_says(
    launcher: Launcher, environment: dict[str, str], place: Place
) -> None:
    assert place_of(launcher, environment | {"HOME": "/root"}) == place


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_i2_a_process_that_nobody_has_started_is_told_so(launcher: Launcher) -> None:
    with pytest.raises(UsageError, match=f"was not started by {launcher}") as caught:
        place_of(launcher, {})
    assert f"penstock worker --{launcher}" in caught.value.remedy


@pytest.mark.parametrize(
    ("launcher", "environment", "remedy"),
    [
        ("torchrun", TORCHRUN | {"LOCAL_RANK": "1"}, "--nproc-per-node 1"),
        ("slurm", SLURM | {"SLURM_LOCALID": "3"}, "--ntasks-per-node 1"),
        ("mpi", OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "ppr:1:node"),
    ],
)
def test_i2_two_processes_on_one_host_are_refused(
    launcher: Launcher, environment: dict[str, str], remedy: str
) -> None:
    with pytest.raises(UsageError, match="more than one process on this host") as caught:
        place_of(launcher, environment)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("value", ["-1", "one", "٣", "3"])
def test_i2_what_is_no_place_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match=r"not a number|number 3 of 3"):
        place_of("torchrun", TORCHRUN | {"RANK": value})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu1", "gpu1"),
        ("node[01-03,07],gpu1", "node01"),
        ("node[7]", "node7"),
        ("gpu1,node[01-03]", "gpu1"),
        ("rack[2-3]-node[05,07]", "rack2-node05"),
        ("a.cluster.example,b.cluster.example", "a.cluster.example"),
    ],
)
def test_i2_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize("hosts", ["", ",", "[", "]x"])
def test_i2_what_is_no_list_of_hosts_is_refused(hosts: str) -> None:
    with pytest.raises(UsageError, match="not a list of hosts"):
        first_host(hosts)
