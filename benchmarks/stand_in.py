"""Lets the supervisor start another module of this directory where it would start a rank.

Benchmarks that run a supervisor call `use_rank`. As a program it is `penstock` with such ranks:

    python benchmarks/stand_in.py sleeping_rank serve MODEL --pp 4
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from penstock.hosts import local, local_process

WORKER = "penstock.rank.process"


def use_rank(stand_in: str) -> None:
    """From now on supervisors of this process start the module `stand_in` in place of a rank."""
    directory = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([directory, *filter(None, [os.environ.get("PYTHONPATH")])])
    spawn = local_process.spawn
    assert local.spawn is spawn  # type: ignore[attr-defined]  # what is replaced is what it calls

    def spawn_stand_in(module: str, *arguments: Any, **named: Any) -> local_process.LocalMember:
        return spawn(stand_in if module == WORKER else module, *arguments, **named)

    local.spawn = spawn_stand_in  # type: ignore[attr-defined]


if __name__ == "__main__":
    from penstock.cli.program import main

    use_rank(sys.argv.pop(1))
    sys.exit(main())
