"""Runs a module as `python -m` does, in a process that ends when its parent does:

    python -m penstock.hosts.launchers.tied_process PARENT_PID MODULE WORDS...

For parents that are not ours to change, such as an actor of Ray. Uses `process.child.die_with_parent`.
"""

from __future__ import annotations

import runpy
import sys

from penstock.process.child import die_with_parent


def main() -> None:
    """Run the module that the command line names."""
    _, parent, module, *words = sys.argv
    die_with_parent(int(parent))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
