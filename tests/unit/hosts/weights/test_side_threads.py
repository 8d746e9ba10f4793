"""Threads for slow disks: what they raise is raised, and the end of the program does not wait for them."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from penstock.hosts.weights.side_threads import SideThreads

MOST_S = 60.0
ENDLESS = """
import threading
from penstock.hosts.weights.side_threads import begin_aside
began = threading.Event()
begin_aside(lambda: began.set() or threading.Event().wait(), "endless")
began.wait()
"""


def test_a_result_and_an_error_are_those_of_the_thread() -> None:
    def fail() -> None:
        raise OSError("odd")

    with SideThreads("some") as threads:
        name = threads.begin(lambda: threading.current_thread().name)
        failed = threads.begin(fail)
    assert name.result() == "some"
    with pytest.raises(OSError, match="odd"):
        failed.result()


def test_all_threads_have_ended_behind_the_block_also_where_it_is_left_by_an_error() -> None:
    leaves, ended = threading.Event(), []

    def work() -> None:
        ended.append(leaves.wait(MOST_S))

    def leave() -> None:
        with SideThreads("some") as threads:
            threads.begin(work)
            leaves.set()
            raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"):
        leave()
    assert ended == [True]


def test_the_end_of_the_program_waits_for_no_thread() -> None:
    assert subprocess.run([sys.executable, "-c", ENDLESS], timeout=MOST_S, check=False).returncode == 0
