"""What penalties have counted survives the loss of the last stage, and of the core (rows D6, R4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from disturbed import NUM_TOKENS, Server, Stream, named

PENALTIES: list[dict[str, Any]] = [
    {"prompt": "ROMEO:", "temperature": 0, "repetition_penalty": 1.2},
    {
        "prompt": "Once upon a time",
        "temperature": 1.0,
        "seed": 11,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.5,
        "logit_bias": {"20": 2.0},
    },
]


def ids(server: Server) -> list[Stream]:
    return [Stream(server, request) for request in PENALTIES]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(2) as served:
        yield served


@pytest.mark.parametrize("victim", ["penstock stage 1 tp 0", "penstock stage 0 tp 0", "penstock core"])
def test_d6_r4_penalised_streams_go_on_with_the_same_tokens(server: Server, victim: str) -> None:
    golden = [[*stream] for stream in ids(server)]
    assert [len(tokens) for tokens in golden] == [NUM_TOKENS] * 2
    streams = [iter(stream) for stream in ids(server)]
    found = [[next(streams[0]) for _ in range(40)], []]
    named(server, victim).kill()
    for tokens, stream in zip(found, streams, strict=True):
        tokens.extend(stream)
    assert found == golden
