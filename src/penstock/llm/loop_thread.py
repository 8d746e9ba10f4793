"""An event loop for a program that has none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from penstock.errors import UsageError

Result = TypeVar("Result")


class _Call(Generic[Result]):
    """One coroutine on its way through the loop, which calls its methods; any thread may wait for it."""

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

    def _note_end(self, task: asyncio.Task[Result]) -> None:
        if task.cancelled():
            self.result.cancel()
        elif (error := task.exception()) is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(task.result())


class LoopThread:
    """An event loop on a thread of its own, which runs until `close`.

    The thread is a daemon, so that a program may end without `close`. A process that was forked from the one
    that made it has no such thread: there nothing can be run, and `close` leaves the loop, whose descriptors
    both processes share, alone.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._loop.close()
            raise

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run the coroutine on the loop, and return its result. It is cancelled at an interrupt.

        Raises:
            UsageError: the thread belongs to another process.
        """
        if not self._thread.is_alive():
            coroutine.close()
            raise UsageError(
                "this process was forked from the one that started the engine.",
                remedy="Use the engine there, or start another one here.",
            )
        call = _Call(coroutine)
        try:
            self.post(call.start)
            return call.result.result()
        except BaseException:
            self.post(call.cancel)  # also when the interrupt came before there was a task
            raise

    def post(self, function: Callable[[], object]) -> None:
        """Call the function on the loop, after those given before; at once if this is its thread."""
        if threading.current_thread() is self._thread:
            function()
        elif self._thread.is_alive():
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Stop the loop, which cancels what it runs, and wait for the end of the thread.

        The thread itself calls this when the garbage collector finalises its owner there: it does not wait.
        """
        self.post(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        await self._stop.wait()
