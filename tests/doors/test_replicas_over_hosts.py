"""Replicas on hosts of their own: whole pipelines side by side, each lost and back for itself (row I1)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from checkpoints import make_checkpoint
from linked_engines import greedy_ids, make_llm
from network import cable_network
from served import wait_until
from served_hosts import PairServer

pytestmark = pytest.mark.doors

PROMPTS = [[5 + number, 9, 2] for number in range(6)]
NUM_TOKENS = 200
WAIT_S = 60.0


def test_i1_each_replica_has_its_host_and_one_that_is_killed_costs_no_token(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", layers=3, vocab_size=150, seed=3)
    with make_llm(checkpoint, "inprocess") as llm:
        expected = greedy_ids(llm, PROMPTS, NUM_TOKENS)
    flags = ["--dp", "2", "--pp", "2", "--threads-per-rank", "1", "--kv-cache-bytes", "8000000"]
    with (
        cable_network() as network,
        PairServer(network.hosts, str(checkpoint), tmp_path, flags, models=str(tmp_path)) as server,
    ):
        came: dict[int, Any] = {}

        def ask(number: int) -> None:
            came[number] = server.client.complete([PROMPTS[number]], NUM_TOKENS)[0]

        def ask_all() -> list[threading.Thread]:
            threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
            for thread in threads:
                thread.start()
            return threads

        for thread in ask_all():
            thread.join(WAIT_S)
        assert [came[number] for number in range(len(PROMPTS))] == expected
        came.clear()
        threads = ask_all()
        wait_until(lambda: busy_replicas(server) == 2, WAIT_S)
        server.worker.kill()
        server.start_worker()
        for thread in threads:
            thread.join(WAIT_S)
        assert [came[number] for number in range(len(PROMPTS))] == expected
        assert server.recoveries() == 1, "the replica on the head has gone on"


def busy_replicas(server: PairServer) -> int:
    """Return how many replicas have requests that run."""
    cores = server.client.get("/debug/pipeline")["replicas"]
    return sum(bool(core["running"]) for core in cores)
