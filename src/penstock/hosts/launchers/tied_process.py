"""Runs a module as `python -m` does, in a process that ends when its parent does:

    python -m penstock.hosts.launchers.tied_process PARENT_PID MODULE WORDS...

It is for children of processes that are not ours, such as an actor of Ray. It uses
`process.child.die_with_parent`.
"""

from __future__ import annotations

import os
import runpy
import sys

from penstock.process import entry_points
from penstock.process.child import die_with_parent


def tied_command(*words: str) -> list[str]:
    """Return the command line of a process that runs a module and ends when this process does.

    Args:
        words: the module, and the words of its own command line.
    """
    return [sys.executable, "-P", "-m", entry_points.TIED_PROCESS, str(os.getpid()), *words]


def environment_for_ranks() -> dict[str, str]:
    """Return this process's environment without OMP_NUM_THREADS, since ranks settle that number themselves.

    Ray sets it to the number of CPUs that it has reserved.
    """
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def main() -> None:
    """Run the module that the command line names, in this process; let it end with the named parent."""
    _, parent, module, *words = sys.argv
    die_with_parent(int(parent))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
