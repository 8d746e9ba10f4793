"""What is lost around a model that drafts costs no token: its process, the core, a stage (R1, R4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from depth import sampled
from disturbed import Server, Stream, named

DRAFTER = "penstock drafter"
NUM_TOKENS = 250
STREAMS: list[dict[str, Any]] = [
    {"prompt": "ROMEO:", "temperature": 0},
    {"prompt": "JULIET:", "temperature": 0.8, "seed": 12, "frequency_penalty": 0.3},
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(2, "--speculative-model", "demo", "--no-warm-spare")
    with server:
        yield server


def begun(server: Server) -> list[Iterator[int]]:
    return [iter(Stream(server, request | {"max_tokens": NUM_TOKENS})) for request in STREAMS]


def interrupted(server: Server, victim: str) -> list[list[int]]:
    """Tokens of all streams; the victim is killed when some have come."""
    streams = begun(server)
    found = [[next(streams[0]) for _ in range(40)], []]
    named(server, victim).kill()
    for tokens, stream in zip(found, streams, strict=True):
        tokens.extend(stream)
    return found


@pytest.mark.parametrize(
    "victim", sampled(["penstock core", "penstock stage 1 tp 0", "penstock stage 0 tp 0"], 1)
)
def test_r4_streams_go_on_and_the_core_brings_another_drafter(server: Server, victim: str) -> None:
    golden = [list(stream) for stream in begun(server)]
    before, drafter = server.num_recoveries, named(server, DRAFTER)
    assert interrupted(server, victim) == golden
    assert server.num_recoveries == before + 1
    if victim == "penstock core":
        drafter.wait(30)  # it dies with the core that has started it
    assert (named(server, DRAFTER).pid == drafter.pid) == (victim != "penstock core")
    assert [list(stream) for stream in begun(server)] == golden


def test_r1_streams_go_on_without_the_drafter(server: Server) -> None:
    golden = [list(stream) for stream in begun(server)]
    before = server.num_recoveries
    assert interrupted(server, DRAFTER) == golden
    assert server.num_recoveries == before, "nothing else is lost with it"
