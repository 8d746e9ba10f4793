"""Finds out which copy of a launcher's command this process is, and on which host the first copy runs.

`torchrun`, `srun`, `mpirun` and Kubernetes' LeaderWorkerSet start the same command on each host. Environment
variables say which copy a process is. Penstock takes no more from these launchers than that: the first copy
serves, the others are its workers, and the join token alone decides about trust. Nothing of the launchers is
imported.

    launcher    which copy                        where the first one runs
    torchrun    RANK, WORLD_SIZE                  MASTER_ADDR
    slurm       SLURM_PROCID, SLURM_STEP_NUM_TASKS  first name of SLURM_STEP_NODELIST
    mpi         OMPI_COMM_WORLD_RANK, PMI_RANK …  is not said: `--join` names it
    lws         LWS_WORKER_INDEX, LWS_GROUP_SIZE  LWS_LEADER_ADDRESS

Used by `penstock worker`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

from penstock.errors import UsageError
from penstock.hosts.launchers.host_list import first_host

Launcher = Literal["torchrun", "slurm", "mpi", "lws"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)

_MPI = (  # names of rank, number of processes, and place on the host: Open MPI, then what MPICH and Intel say
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
)


class Place(NamedTuple):
    """The place of one process among those that a launcher has started together.

    Attributes:
        number: number of the process; process 0 serves.
        num_hosts: how many processes were started, one on each host.
        first_host: name or address of the host of process 0; "": the launcher does not name it.
        host: the launcher's name for this host; "": the launcher does not name it.
    """

    number: int
    num_hosts: int
    first_host: str = ""
    host: str = ""


def place_of(launcher: Launcher, environment: Mapping[str, str]) -> Place:
    """Return the place of this process among the copies that the launcher has started.

    Args:
        environment: variables of this process.

    Raises:
        UsageError: the process was not started by this launcher, or is not the first one on its host.
    """
    place = _READERS[launcher](_Variables(launcher, environment))
    if not 0 <= place.number < place.num_hosts:
        raise UsageError(f"{launcher} gives this process the number {place.number} of {place.num_hosts}.")
    return place


class _Variables:
    """The environment variables that a launcher has set."""

    def __init__(self, launcher: str, environment: Mapping[str, str]) -> None:
        self._launcher = launcher
        self._environment = environment

    def text(self, *names: str) -> str:
        """Return the value of the first of these variables that is set; raise `UsageError` if none is."""
        for name in names:
            if value := self._environment.get(name):
                return value
        raise UsageError(
            f"this process was not started by {self._launcher}: {names[0]} is not set.",
            remedy=f"Start `penstock worker --{self._launcher}` with it, on all hosts at once.",
            param=self._launcher,
        )

    def number(self, *names: str) -> int:
        """Return the value of the first of these variables that is set, as a number."""
        text = self.text(*names)
        if not text.isascii() or not text.isdigit():
            raise UsageError(f"{self._launcher} has set {names[0]} to {text!r}, which is not a number.")
        return int(text)

    def has(self, name: str) -> bool:
        return bool(self._environment.get(name))

    def require_one_a_host(self, local: str, how: str) -> None:
        """Raise `UsageError` for a second process on a host, where one agent starts all ranks.

        Args:
            local: the variable with the number of the process among those of its host.
            how: the remedy for the user.
        """
        if self.has(local) and self.number(local) > 0:
            raise UsageError(
                f"{self._launcher} has started more than one process on this host: one is enough.",
                remedy=how,
                param=self._launcher,
            )


def _of_torchrun(variables: _Variables) -> Place:
    variables.require_one_a_host("LOCAL_RANK", "Use `torchrun --nproc-per-node 1`.")
    return Place(
        number=variables.number("RANK"),
        num_hosts=variables.number("WORLD_SIZE"),
        first_host=variables.text("MASTER_ADDR"),
    )


def _of_slurm(variables: _Variables) -> Place:
    variables.require_one_a_host("SLURM_LOCALID", "Use `srun --ntasks-per-node 1`.")
    return Place(
        number=variables.number("SLURM_PROCID"),
        num_hosts=variables.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        first_host=first_host(variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")),
        host=variables.text("SLURMD_NODENAME") if variables.has("SLURMD_NODENAME") else "",
    )


def _of_mpi(variables: _Variables) -> Place:
    rank, size, local = next((names for names in _MPI if variables.has(names[0])), _MPI[0])
    variables.require_one_a_host(local, "Use `mpirun --map-by ppr:1:node`, or `-ppn 1`.")
    return Place(number=variables.number(rank), num_hosts=variables.number(size))


def _of_lws(variables: _Variables) -> Place:
    return Place(
        number=variables.number("LWS_WORKER_INDEX"),
        num_hosts=variables.number("LWS_GROUP_SIZE"),
        first_host=variables.text("LWS_LEADER_ADDRESS"),
        host=variables.text("HOSTNAME") if variables.has("HOSTNAME") else "",  # of the pod
    )


_READERS: dict[Launcher, Callable[[_Variables], Place]] = {
    "torchrun": _of_torchrun,
    "slurm": _of_slurm,
    "mpi": _of_mpi,
    "lws": _of_lws,
}
