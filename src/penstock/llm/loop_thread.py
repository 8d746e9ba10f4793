"""An event loop for a program that has none."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from penstock.errors import UnavailableError, UsageError

Result = TypeVar("Result")


class _Call(Generic[Result]):
    """One coroutine that is to run on the loop. Any thread may wait for its result.

    The loop's thread calls the methods. Only `give_up` may also be called once that thread has ended.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Result]) -> None:
        self.result: Future[Result] = Future()
        self._coroutine = coroutine
        self._task: asyncio.Task[Result] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._coroutine)
        self._task.add_done_callback(self._note_end)

    def cancel(self) -> None:
        if self._task is None:
            self._coroutine.close()
        else:
            self._task.cancel()

    def give_up(self) -> None:
        """End the caller's wait with `UnavailableError`, unless there is a result already."""
        if not self.result.done():
            self._coroutine.close()  # does nothing if the coroutine has ended
            self.result.set_exception(UnavailableError("the engine was shut down while it was in use."))

    def _note_end(self, task: asyncio.Task[Result]) -> None:
        if task.cancelled():
            self.give_up()
        elif (error := task.exception()) is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(task.result())


class LoopThread:
    """An event loop on a thread of its own, which runs until `close`.

    The thread is a daemon, so that a program may end without `close`. A process that was forked from this one
    has no such thread: there `run` raises, and `close` does not touch the loop, since both processes share
    the loop's descriptors.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._calls: set[_Call[Any]] = set()  # the calls for which some thread waits
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._loop.close()
            raise

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run the coroutine on the loop, and return its result. An interrupt of the caller cancels it.

        Raises:
            UnavailableError: the loop has been closed, before the call or during it.
            UsageError: the thread belongs to another process.
        """
        if os.getpid() != self._process:
            coroutine.close()
            raise UsageError(
                "this process was forked from the one that started the engine.",
                remedy="Use the engine there, or start another one here.",
            )
        call = _Call(coroutine)
        self._calls.add(call)  # before the loop gets it: when the loop has ended, all calls are given up
        try:
            if not self._take(lambda: self._start(call)):
                self._thread.join()  # the thread may be giving up this call just now
                call.give_up()
            return call.result.result()
        except BaseException:
            self._take(call.cancel)  # the interrupt may have come before there was a task
            raise
        finally:
            self._calls.discard(call)

    def post(self, function: Callable[[], object]) -> None:
        """Call the function on the loop's thread, after those posted before, without waiting for that.

        On that thread itself it is called at once. If the loop has ended, it is not called.
        """
        if threading.current_thread() is self._thread:
            function()
        else:
            self._take(function)

    def close(self) -> None:
        """Stop the loop, which cancels what it runs, and wait for the end of the thread.

        The garbage collector may finalise the owner on the loop's own thread. There the call does not wait,
        since a thread cannot wait for its own end.
        """
        self.post(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_stopped())
        for call in tuple(self._calls):
            call.give_up()  # the loop took it, and ended before it could start

    def _start(self, call: _Call[Any]) -> None:
        if self._stop.is_set():
            call.give_up()  # a task that starts now would not be cancelled
        else:
            call.start()

    def _take(self, function: Callable[[], object]) -> bool:
        """Give the function to the loop; return whether the loop still takes functions."""
        if not self._thread.is_alive():
            return False
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            return False  # the thread closes the loop a moment before it ends
        return True

    async def _until_stopped(self) -> None:
        await self._stop.wait()
