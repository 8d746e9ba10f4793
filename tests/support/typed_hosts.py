"""Hosts of a test network at which somebody types what stands on a page of the documentation."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from network import Host
from served_hosts import Program

PROGRAMS = Path(sys.executable).parent


class Desk:
    """A host with a name, a home and a working directory of its own, where somebody types.

    Args:
        directory: its last part is the name.
        real: what stands on the page -> what it is here, such as addresses.
    """

    def __init__(self, host: Host[Any], directory: Path, real: Mapping[str, str]) -> None:
        self.directory = directory
        directory.mkdir()
        self._host, self._real = host, real

    def typed(self, line: str, environment: Mapping[str, str] | None = None) -> Program:
        """Start what stands on a line of the page, in an environment with more variables."""
        program, *words = shlex.split(self.as_typed(line))
        home = {"HOME": self.directory, "XDG_STATE_HOME": self.directory, "XDG_CACHE_HOME": _cache()}
        path = {"PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
        variables = [f"{name}={value}" for name, value in (home | path | dict(environment or {})).items()]
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.directory.name} && exec "$@"', "sh"]
        typed = ["env", "-C", str(self.directory), *variables, str(PROGRAMS / program), *words]
        return Program(self._host, [*named, *typed])

    def as_typed(self, line: str) -> str:
        for written, real in self._real.items():
            line = line.replace(written, real)
        return line


def commands_of(page: str, heading: str) -> list[str]:
    """Return the lines of a section that are typed, each whole though a backslash breaks it."""
    _, _, rest = page.partition(f"\n## {heading}\n")
    section, _, _ = rest.partition("\n## ")
    blocks = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    return [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]


def _cache() -> str:
    """Where compiled kernels are."""
    return os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
