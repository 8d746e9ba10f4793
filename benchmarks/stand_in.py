"""Lets the supervisor start another module of this directory where it would start a rank, or the core.

Benchmarks that run a supervisor call `use_rank` or `use_stand_in`. As a program it is `penstock` with such
ranks:

    python benchmarks/stand_in.py sleeping_rank serve MODEL --pp 4
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from penstock.hosts import local, local_process
from penstock.process import entry_points

BENCHMARKS = str(Path(__file__).resolve().parent)


def use_rank(stand_in: str) -> None:
    """From now on supervisors of this process start the module `stand_in` in place of a rank."""
    use_stand_in(entry_points.RANK, stand_in)


def use_stand_in(replaced: str, stand_in: str) -> None:
    """From now on supervisors of this process start `stand_in` in place of one of our modules."""
    add_to_path()
    spawn = local_process.spawn
    assert local.spawn is spawn  # type: ignore[attr-defined]  # what is replaced is what it calls

    def spawn_stand_in(module: str, *arguments: Any, **named: Any) -> local_process.LocalMember:
        return spawn(stand_in if module == replaced else module, *arguments, **named)

    local.spawn = spawn_stand_in  # type: ignore[attr-defined]


def add_to_path() -> None:
    """Let processes that are started from here find the modules of this directory."""
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([BENCHMARKS, *paths]))


if __name__ == "__main__":
    from penstock.cli.program import main

    use_rank(sys.argv.pop(1))
    sys.exit(main())
