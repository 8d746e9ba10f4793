"""The demo model as a server that tests disturb, and streams of ids from it."""

from __future__ import annotations

import contextlib
import functools
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil

from penstock import LLM, SamplingParams
from served import Served, title_of, wait_until

ADMIN_KEY = "key-of-an-administrator"
NUM_TOKENS = 600  # half a second
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "temperature": 0},
    {"prompt": "ROMEO:", "temperature": 0},
    {"prompt": [5, 6, 7], "temperature": 1.0, "seed": 11},
]


SPARE = "penstock spare"


class Server(Served):
    """The demo model over some stages."""

    def __init__(self, num_stages: int, *more: str) -> None:
        self.num_stages = num_stages
        self._has_spare = "--no-warm-spare" not in more
        super().__init__(
            "demo", "--pp", str(num_stages), "--threads-per-rank", "1", "--dtype", "float32", *more
        )

    @property
    def golden(self) -> list[list[int]]:
        """The same for any number of stages."""
        return undisturbed()

    def stage(self, stage: int) -> psutil.Process:
        return named(self, f"penstock stage {stage} tp 0")

    def await_spare(self) -> psutil.Process:
        """Its spare process, which comes when nothing was lost for a while."""
        wait_until(lambda: SPARE in map(title_of, self.family()), 60)
        return named(self, SPARE)

    def resources(self, *but: str) -> dict[str, tuple[int, int]]:
        """Descriptors and threads of each of its processes, by title; once it has a spare, if it ever has.

        Args:
            but: titles of those that are left out, as the spare is.
        """
        if self._has_spare:
            self.await_spare()
        found = {title_of(process): (process.num_fds(), process.num_threads()) for process in self.family()}
        return {title: counts for title, counts in found.items() if title not in (SPARE, *but)}


_shared: set[int] = set()  # process ids of servers that tests share


class DemoServers:
    """The server over two stages that tests share; if one of them has ended it, the next gets another.

    It has no spare process: that one would start at any time, beside any test.
    """

    def __init__(self) -> None:
        self._servers = contextlib.ExitStack()
        self._newest: Server | None = None

    def running(self) -> Server:
        if self._newest is None or self._newest.process.poll() is not None:
            words = ("--tool-parser", "json", "--admin-key", ADMIN_KEY, "--no-warm-spare")
            self._newest = self._servers.enter_context(Server(2, *words))
            _shared.add(self._newest.process.pid)
        return self._newest

    def close(self) -> None:
        self._servers.close()


def started_processes() -> list[psutil.Process]:
    """What this process has started, with descendants; servers that tests share are left out."""
    found = [process for process in psutil.Process().children() if process.pid not in _shared]
    for process in [*found]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.children(recursive=True)
    return found


@functools.cache
def undisturbed() -> list[list[int]]:
    """What each request yields while nobody disturbs it, from one stage without HTTP."""
    with LLM("demo", dtype="float32", threads_per_rank=1, distributed_executor_backend="inprocess") as llm:
        sampling = [
            SamplingParams(
                temperature=request["temperature"],
                top_p=0.95,  # the checkpoint's
                seed=request.get("seed"),
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
            )
            for request in REQUESTS
        ]
        outputs = llm.generate([_prompt(request["prompt"]) for request in REQUESTS], sampling)
        return [output.outputs[0].token_ids for output in outputs]


def _prompt(said: str | list[int]) -> str | dict[str, list[int]]:
    return said if isinstance(said, str) else {"prompt_token_ids": said}


def named(served: Served, title: str) -> psutil.Process:
    return next(process for process in served.family() if title_of(process) == title)


class StreamFailedError(Exception):
    """The stream has ended with an error event."""


class Stream:
    """Ids of a completion, as they come; raises `StreamFailedError` at an error event.

    Args:
        name: its `x-request-id`, if it is to have one of ours.
    """

    def __init__(self, served: Served, request: dict[str, Any], name: str = "") -> None:
        body = {"model": "demo", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        encoded = json.dumps(body | {"return_token_ids": True} | request).encode()
        headers = {"content-type": "application/json"} | ({"x-request-id": name} if name else {})
        asked = urllib.request.Request(served.url + "/v1/completions", encoded, headers)
        self._answer = urllib.request.urlopen(asked, timeout=60)

    def close(self) -> None:
        """Hang up."""
        self._answer.close()

    def __iter__(self) -> Iterator[int]:
        with self._answer as lines:
            for line in lines:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise StreamFailedError(chunk["error"]["message"])
                yield from chunk["choices"][0].get("token_ids") or []


def administer(served: Served, path: str) -> Any:
    """Ask for an operation of administrators, and return its answer."""
    asked = urllib.request.Request(
        served.url + path, headers={"authorization": f"Bearer {ADMIN_KEY}"}, method="POST"
    )
    with urllib.request.urlopen(asked, timeout=90) as answer:
        return json.load(answer)


def health(served: Served) -> tuple[int, dict[str, Any]]:
    try:
        return 200, json.loads(served.get("/health"))
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
