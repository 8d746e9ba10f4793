"""A loop on a thread: results, errors and interrupts reach the caller, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.errors import UnavailableError, UsageError
from penstock.llm.loop_thread import LoopThread

WAIT_S = 10.0  # a bound for hangs, never waited for
NAME = "loop under test"


async def _answer() -> int:
    return 7


def resources() -> set[object]:
    """Descriptors and threads of this process. What other tests have left may end at any time."""
    return {*os.listdir("/proc/self/fd"), *(one for one in threading.enumerate() if one.name == NAME)}


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    before = resources()
    thread = LoopThread(NAME)
    yield thread
    thread.close()
    assert resources() <= before


def test_results_and_errors_are_the_callers(loop: LoopThread) -> None:
    async def name() -> str:
        return threading.current_thread().name

    async def fail() -> None:
        raise KeyError("mine")

    assert loop.run(name()) == NAME
    with pytest.raises(KeyError, match="mine"):
        loop.run(fail())
    assert loop.run(name()) == NAME


def test_a_program_with_a_running_loop_may_use_it(loop: LoopThread) -> None:
    async def inner() -> int:
        return 1

    async def outer() -> int:
        return loop.run(inner())

    assert asyncio.run(outer()) == 1


def test_an_interrupt_cancels_what_runs(loop: LoopThread) -> None:
    """The signal comes to the thread that waits, as from a terminal."""
    caller, cancelled = threading.get_ident(), threading.Event()

    async def interrupted() -> None:
        signal.pthread_kill(caller, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(KeyboardInterrupt):
        loop.run(interrupted())
    assert cancelled.wait(WAIT_S)


def test_what_is_posted_is_called_there_before_the_end() -> None:
    thread = LoopThread(NAME)
    seen: list[str] = []

    async def from_inside() -> None:
        thread.post(lambda: seen.append("at once"))
        seen.append("after")

    thread.run(from_inside())
    thread.post(lambda: seen.append(threading.current_thread().name))
    thread.close()
    assert seen == ["at once", "after", NAME]
    thread.close()
    thread.post(lambda: seen.append("too late"))
    assert len(seen) == 3


def test_what_runs_at_the_end_is_cancelled() -> None:
    before = resources()
    thread = LoopThread(NAME)
    running, ended = threading.Event(), threading.Event()

    async def endless() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def start() -> asyncio.Task[None]:
        return asyncio.ensure_future(endless())

    task = thread.run(start())
    assert running.wait(WAIT_S)
    thread.close()
    assert ended.is_set()
    assert task.cancelled()
    assert resources() <= before


def test_the_thread_itself_may_close_it() -> None:
    """As when the garbage collector finalises its owner there."""
    before = resources()
    thread = LoopThread(NAME)

    async def close() -> None:
        thread.close()

    thread.run(close())
    thread.close()
    assert resources() <= before


def test_nothing_is_lost_while_the_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread closes the loop a moment before it ends: whoever comes between them is told."""
    before = resources()
    thread = LoopThread(NAME)
    loop, closed, may_end, seen = thread._loop, threading.Event(), threading.Event(), []
    close_loop = loop.close

    def close_slowly() -> None:
        close_loop()
        closed.set()
        assert may_end.wait(WAIT_S)

    monkeypatch.setattr(loop, "close", close_slowly)
    thread.post(thread._stop.set)
    assert closed.wait(WAIT_S)
    thread.post(lambda: seen.append("too late"))
    with ThreadPoolExecutor(1) as callers:
        caught = callers.submit(thread.run, _answer())
        may_end.set()
        with pytest.raises(UnavailableError, match="shut down"):
            caught.result(WAIT_S)
    thread.close()
    assert seen == []
    assert resources() <= before


def test_a_call_that_comes_with_the_end_is_told() -> None:
    """Its start waits behind the order to stop, or behind the loop's last turn."""
    thread = LoopThread(NAME)
    held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert may_go.wait(WAIT_S)

    thread.post(hold)
    assert held.wait(WAIT_S)
    thread.post(thread._stop.set)
    with ThreadPoolExecutor(1) as callers:
        caught = callers.submit(thread.run, _answer())
        while not thread._calls:
            pass
        may_go.set()
        with pytest.raises(UnavailableError, match="shut down"):
            caught.result(WAIT_S)
    thread.close()
    with pytest.raises(UnavailableError, match="shut down"):
        thread.run(_answer())


def test_a_caller_whose_call_is_cancelled_by_the_end_is_told() -> None:
    thread = LoopThread(NAME)
    running = threading.Event()

    async def endless() -> None:
        running.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as callers:
        caught = callers.submit(thread.run, endless())
        assert running.wait(WAIT_S)
        thread.close()
        with pytest.raises(UnavailableError, match="shut down"):
            caught.result(WAIT_S)


def test_a_forked_process_is_told_and_leaves_the_loop_alone(loop: LoopThread) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            loop.run(_answer())
        except UsageError:
            loop.post(lambda: os._exit(2))
            loop.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert loop.run(_answer()) == 7
