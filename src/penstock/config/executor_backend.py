"""The names of executor backends: what starts the ranks of an engine (`--distributed-executor-backend`).

    mp            processes on this host, and on the hosts whose workers join
    ray           the same, where Ray starts the workers
    MODULE:CLASS  a class of the user's own, as docs/clusters.md describes
    inprocess     threads of the caller's process; only `LLM` has it

`hosts.launchers.backends` chooses the hosts for each backend.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.errors import UsageError

PROCESSES = ("mp", "ray")  # backends of the command line, `AsyncLLM` and `LLM`
_OWN_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_ELSEWHERE = {
    "external_launcher": "use `penstock worker --torchrun`, `--slurm` or `--mpi`",
    "uni": "the name for ranks in the caller's process is `inprocess`",
}


def require_backend(name: str, known: Sequence[str] = PROCESSES) -> str:
    """Return the name of a backend.

    Args:
        name: the backend that the user has given.
        known: names of the backends that the caller supports besides MODULE:CLASS.

    Raises:
        UsageError: the name is neither known nor of the form MODULE:CLASS.
    """
    if name in known or is_own_class(name):
        return name
    reason = _ELSEWHERE.get(name, "no executor has this name")
    raise UsageError(
        f"distributed_executor_backend is {name!r}, which is not supported: {reason}.",
        remedy=f"Use {', '.join(known)}, or MODULE:CLASS.",
        param="distributed_executor_backend",
        code="unsupported",
    )


def is_own_class(name: str) -> bool:
    """Return whether the name has the form MODULE:CLASS, and so means a class of the user's own."""
    return _OWN_CLASS.fullmatch(name) is not None
