"""Reads a list of hosts as SLURM writes it, such as `node[01-03,07],gpu1`.

The format is that of `scontrol show hostnames` (SLURM, "hostlist expressions"): names with commas between
them. In a name, ranges of numbers may stand in brackets; leading zeros of a number are kept. Only the first
name of a list is needed, so nothing else is read.
"""

from __future__ import annotations

import re

from penstock.errors import UsageError

_FIRST = re.compile(r"(?:[^\[\],]+|\[[^\[\]]+\])+")
_RANGE = re.compile(r"\[([^\[\],-]+)[^\[\]]*\]")


def first_host(hosts: str) -> str:
    """Return the first name of the list; raises `UsageError` if there is none."""
    match = _FIRST.match(hosts.strip())
    if match is None:
        raise UsageError(f"SLURM names the hosts {hosts!r}, which is not a list of hosts.")
    return _RANGE.sub(r"\1", match[0])
