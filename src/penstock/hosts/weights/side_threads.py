"""The threads for disk and network access that may never return: the program's end does not wait for them.

Used by `hosts.weights.model_finder` and `hosts.weights.weight_cache`. A `ThreadPoolExecutor` would not do: at
its end, Python waits for such threads, even for one that writes to the disk of a file server that is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from types import TracebackType
from typing import TypeVar

Result = TypeVar("Result")


def begin_aside(work: Callable[[], Result], name: str) -> Future[Result]:
    """Start a thread that calls `work`; return a future, which will have its result or its error."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # `Future.result` raises it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class SideThreads:
    """The threads of a `with` block, at whose end they are waited for.

    Args:
        name: name of each thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._futures: list[Future[object]] = []

    def __enter__(self) -> SideThreads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wait(self._futures)

    def begin(self, work: Callable[[], Result]) -> Future[Result]:
        """Start a thread that calls `work`, and return a future of its result, as `begin_aside` does."""
        future = begin_aside(work, self._name)
        self._futures.append(future)  # type: ignore[arg-type]  # it is waited for alone
        return future
