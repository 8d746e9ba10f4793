"""Two hosts whose network delays, jitters and stalls, or loses a process: always the tokens of one host.

The runs are functions of their seeds: a hundred with a bad network, and one with each loss in it besides.
Stalls and losses come when so many ids have come, and not at a time; but for one run in which a host is lost
every few seconds, and requests come as they like.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bad_weather import weather
from checkpoints import make_checkpoint
from host_faults import FAULTS, Fault
from host_losses import HOST_FAULTS, HostLosses, Timed, compared, play
from linked_engines import PROMPTS, make_llm
from namespaces import NetworkUnavailableError
from network import Host, ShapedLink, shaped_network
from penstock import SamplingParams
from served_hosts import PairServer

ENGINES, RUNS = 5, 20  # a hundred seeds
NUM_IDS, NUM_DRAWN_IDS = 12, 8
HANG_S = 60.0
NUM_TIMED, EVERY_S, LOSE_EVERY_S = 40, 1.0, 8.0
DRAWN = {"temperature": 0.9, "seed": 7}
IDS = [prompt["prompt_token_ids"] for prompt in PROMPTS]

Hosts = list[Host[ShapedLink]]
Ids = list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), layers=3, vocab_size=150, seed=3)


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[Ids, Ids]:
    """What one host answers: to all prompts at once, and to each by itself, drawn."""
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_IDS, ignore_eos=True)
    drawn = SamplingParams(**DRAWN, max_tokens=NUM_DRAWN_IDS, ignore_eos=True)  # type: ignore[arg-type]
    with make_llm(model, "inprocess") as llm:
        of_all, of_each = (
            [output.outputs[0].token_ids for output in llm.generate(PROMPTS, sampling)]
            for sampling in (greedy, drawn)
        )
    return of_all, of_each


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with ExitStack() as stack:
        try:
            network = stack.enter_context(shaped_network(seed=26))
        except NetworkUnavailableError as error:
            pytest.skip(str(error))
        yield list(network.hosts)


@pytest.fixture
def server(hosts: Hosts, model: Path, tmp_path: Path) -> Iterator[PairServer]:
    flags = [
        "--pp",
        "2",
        "--dtype",
        "float32",
        "--threads-per-rank",
        "1",
        "--heartbeat-limit",
        "3",
        "--no-warm-spare",
    ]
    with PairServer(hosts, str(model), tmp_path, flags, models=str(model)) as made:
        yield made


def answers(
    server: PairServer, prompts: Ids, num_ids: int, happen: Callable[[int, int], None], **fields: Any
) -> Ids:
    """Stream the answers of prompts; `happen` hears how many ids had come before, and have come now."""
    ids: Ids = [[] for _ in prompts]
    for arrival in server.client.stream(prompts, num_ids, **fields):
        before = sum(map(len, ids))
        ids[arrival.prompt] += arrival.ids
        happen(before, before + len(arrival.ids))
    return ids


@pytest.mark.soak
@pytest.mark.parametrize("engine", range(ENGINES))
def test_g1_r15_seeded_bad_networks_change_no_token_and_lose_nobody(
    server: PairServer, hosts: Hosts, expected: tuple[Ids, Ids], engine: int
) -> None:
    of_all, of_each = expected
    link = hosts[1].link
    for seed in range(engine * RUNS, (engine + 1) * RUNS):
        own = weather(seed)
        own.set_in(link)
        found = answers(server, IDS, NUM_IDS, partial(own.stall, link))
        assert found == of_all, seed
        which = seed % len(IDS)
        drawn = answers(server, [IDS[which]], NUM_DRAWN_IDS, lambda before, now: None, **DRAWN)
        assert drawn == [of_each[which]], seed
    assert server.events("stage_lost") == []
    assert "lost: the host" not in server.head.output


@pytest.mark.soak
def test_g1_r4_seeded_losses_in_a_bad_network_change_no_token(
    server: PairServer, hosts: Hosts, expected: tuple[Ids, Ids]
) -> None:
    chosen = random.Random("losses")
    for fault in chosen.sample(FAULTS, k=len(FAULTS)):
        hosts[1].link.set_delay(chosen.uniform(0.0, 0.01), chosen.uniform(0.0, 0.01))
        first = len(server.head.lines)
        strike = striking_once(fault, server, hosts, after=chosen.randrange(1, NUM_IDS))
        assert answers(server, IDS, NUM_IDS, strike) == expected[0], fault.name
        server.await_event("recovered", HANG_S, first)


@pytest.mark.soak
def test_g1_r15_a_host_that_is_lost_every_few_seconds_loses_no_request_and_changes_no_token(
    server: PairServer, hosts: Hosts
) -> None:
    """Requests come at times of their own, and tokens slowly, so that losses meet many of them in between."""
    hosts[1].link.set_delay(0.02)
    chosen = random.Random("a host lost every few seconds")
    requests = [
        Timed(
            arrival_s=number * EVERY_S + chosen.uniform(0.0, EVERY_S),
            prompt=chosen.choices(range(10, 140), k=chosen.randrange(4, 40)),
            num_output=chosen.randrange(16, 64),
        )
        for number in range(NUM_TIMED)
    ]
    expected = play(server.client, [request._replace(arrival_s=0.0) for request in requests])
    with HostLosses(server, hosts, LOSE_EVERY_S) as losses:
        answers = play(server.client, requests)
    found = compared(requests, answers, expected)
    assert not any(answer.error for answer in expected)
    assert losses.troubles == []
    assert set(losses.struck) == {fault.name for fault in HOST_FAULTS}
    assert found.is_good, (found, [answer.error for answer in answers if answer.error])


def striking_once(fault: Fault, server: PairServer, hosts: Hosts, after: int) -> Callable[[int, int], None]:
    def happen(before: int, now: int) -> None:
        if before < after <= now:
            fault.strike(server, hosts)

    return happen


def test_a_seed_says_what_the_network_does() -> None:
    first = [weather(seed) for seed in range(ENGINES * RUNS)]
    assert first == [weather(seed) for seed in range(ENGINES * RUNS)]
    assert len(set(first)) == len(first)
    assert all(own.stalls for own in first)
    assert max(own.jitter_s for own in first) > 0.1
    assert max(stall.seconds for own in first for stall in own.stalls) > 0.5
