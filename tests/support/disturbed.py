"""The demo model as a server that tests disturb, and streams of ids from it."""

from __future__ import annotations

import functools
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil

from served import Served, title_of

NUM_TOKENS = 600  # half a second
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "temperature": 0},
    {"prompt": "ROMEO:", "temperature": 0},
    {"prompt": [5, 6, 7], "temperature": 1.0, "seed": 11},
]


class Server(Served):
    """The demo model over some stages."""

    def __init__(self, num_stages: int, *more: str) -> None:
        self.num_stages = num_stages
        super().__init__(
            "demo", "--pp", str(num_stages), "--threads-per-rank", "1", "--dtype", "float32", *more
        )

    @property
    def golden(self) -> list[list[int]]:
        """The same for any number of stages."""
        return _golden()

    def stage(self, stage: int) -> psutil.Process:
        return named(self, f"penstock stage {stage} tp 0")


@functools.cache
def _golden() -> list[list[int]]:
    """What each request yields while nobody disturbs it."""
    with Server(1) as served:
        return [[*Stream(served, request)] for request in REQUESTS]


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


def health(served: Served) -> tuple[int, dict[str, Any]]:
    try:
        return 200, json.loads(served.get("/health"))
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
