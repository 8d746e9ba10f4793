"""The names of executor backends: what starts the ranks of an engine (`--distributed-executor-backend`).

    mp            processes on this host, and on the hosts whose workers join
    ray           the same, where Ray starts the workers
    MODULE:CLASS  a class of the user's own, as docs/clusters.md describes
    inprocess     threads of the caller's process; only `LLM` has it

Which hosts each of them makes stands in `hosts.launchers.backends`.
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
        known: names of those that can be used here, beside classes of the user's own.

    Raises:
        UsageError: it is neither known nor the name of a class.
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
    """Return whether this names a class of the user's own, as MODULE:CLASS."""
    return _OWN_CLASS.fullmatch(name) is not None
