"""The workers for text that may take long (JSON, templates, tokenizing, grammars), kept off the event loop.

Short text is handled in place, since a change of threads costs more than the work. Long text of new requests
goes to a small pool of threads, up to a bounded number of texts at once; a further one is answered 429. Long
answers are encoded by another thread, so that they neither wait for the text of new requests nor are refused.
Their number needs no bound, since each belongs to a running request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from penstock.errors import OverloadedError

P = ParamSpec("P")
T = TypeVar("T")


class TextWorkers:
    """The threads for long text.

    Args:
        threads: number of threads for the text of new requests.
        max_pending: long texts of new requests that are handled or wait at once.
        inline_bytes: text up to this size is handled in place.
    """

    def __init__(self, *, threads: int = 2, max_pending: int = 256, inline_bytes: int = 16 << 10) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._answers = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._max_pending = max_pending
        self._inline_bytes = inline_bytes
        self._pending = 0

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `work(*args)`, which handles about `size` bytes of a new request's text.

        Raises:
            OverloadedError: `max_pending` long texts are being handled or wait.
        """
        if size <= self._inline_bytes:
            return work(*args, **kwargs)
        if self._pending >= self._max_pending:
            raise OverloadedError(f"{self._pending} long prompts are waiting to be tokenised.")
        self._pending += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, lambda: work(*args, **kwargs))
        finally:
            self._pending -= 1

    async def answer(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `work(*args)`, which encodes an answer of about `size` bytes; never refuse."""
        if size <= self._inline_bytes:
            return work(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._answers, lambda: work(*args, **kwargs))

    def close(self) -> None:
        for pool in (self._pool, self._answers):
            pool.shutdown(wait=False, cancel_futures=True)
