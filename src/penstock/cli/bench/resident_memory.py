"""The memory of the ranks that a benchmark has started, as Linux counts it, by stage.

A page that several processes share counts for each in part, so that the sum over all stages is the memory
that they use together. Ranks whose memory Linux does not show are left out.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path

from penstock.reports.stage_use import StageKey

_RANK_TITLE = re.compile(r"penstock (?:replica ([0-9]+) )?stage ([0-9]+) tp [0-9]+")


def resident_bytes_below(parent: int | None = None, proc: Path = Path("/proc")) -> dict[StageKey, int]:
    """Return the bytes of all ranks among the descendants of a process, by replica and stage.

    Args:
        parent: number of the process; None: this process.
        proc: the folder in which Linux shows processes; tests give their own.
    """
    found: dict[StageKey, int] = defaultdict(int)
    for pid in _descendants(os.getpid() if parent is None else parent, proc):
        try:
            title = (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            match = _RANK_TITLE.match(title)
            if match is not None:
                found[int(match[1] or 0), int(match[2])] += _resident_bytes(proc / str(pid))
        except OSError:
            continue  # the process has ended, or belongs to another user
    return dict(found)


def _descendants(parent: int, proc: Path) -> list[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for folder in proc.glob("[0-9]*"):
        try:
            behind_name = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        children[int(behind_name[1])].append(int(folder.name))
    found, open_pids = [], [parent]
    while open_pids:
        own = children[open_pids.pop()]
        found += own
        open_pids += own
    return found


def _resident_bytes(folder: Path) -> int:
    for line in (folder / "smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
