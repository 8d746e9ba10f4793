"""Ray starts the workers: two real nodes, and what follows when parts of Ray are killed (row I2)."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from linked_engines import greedy_ids, make_llm
from paths import REPOSITORY
from penstock.hosts.launchers.ray_starter import RAY_IS_GONE
from ray_nodes import RayNodes, ray_nodes
from served import wait_until
from served_hosts import HostClient
from typed_hosts import Desk, commands_of

pytestmark = pytest.mark.doors

PAGE = (REPOSITORY / "docs" / "clusters.md").read_text(encoding="utf-8")
MODEL = "Qwen2.5-0.5B"
PROMPTS, NUM_TOKENS = [[5, 6, 7], [11, 3]], 16
LONG, NUM_LONG = [[9, 4]], 240
LIMIT_S = 120.0


class Served:
    """The page's engine on Ray: a head on the first host, its worker on the second one."""

    def __init__(self, nodes: RayNodes, directory: Path, checkpoint: Path, *flags: str) -> None:
        self.nodes = nodes
        shared = directory / "shared"
        (shared / "models").mkdir(parents=True)
        checkpoint.rename(shared / "models" / MODEL)
        desk = Desk(nodes.hosts[0], directory / "tower", {"/shared": str(shared)})
        line, *_ = commands_of(PAGE, "Ray")  # then a picture
        self.head = desk.typed(" ".join([line, *flags]), {"RAY_ADDRESS": nodes.address})
        self.head.await_line("ready in")
        self.client = HostClient(nodes.hosts[0], 8000)

    def complete(self) -> list[list[int]]:
        return self.client.complete(PROMPTS, NUM_TOKENS, model=MODEL)

    def long_answer(self, meanwhile: Callable[[], None]) -> list[list[int]]:
        """Return the answer to a long request, during which something happens."""
        answers: list[list[list[int]]] = []
        request = threading.Thread(
            target=lambda: answers.append(self.client.complete(LONG, NUM_LONG, model=MODEL))
        )
        request.start()
        meanwhile()
        request.join(LIMIT_S)
        assert answers, self.head.output[-4000:]
        return answers[0]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / MODEL, layers=3, vocab_size=150, seed=3)


@pytest.fixture
def expected(checkpoint: Path) -> dict[str, list[list[int]]]:
    """What one process answers."""
    with make_llm(checkpoint, "inprocess") as llm:
        return {"short": greedy_ids(llm, PROMPTS, NUM_TOKENS), "long": greedy_ids(llm, LONG, NUM_LONG)}


def test_i2_ray_starts_the_pages_pipeline_and_a_killed_actor_costs_no_token(
    tmp_path: Path, checkpoint: Path, expected: dict[str, list[list[int]]]
) -> None:
    with ray_nodes() as nodes:
        served = Served(nodes, tmp_path, checkpoint)
        assert served.complete() == expected["short"]
        assert served.long_answer(lambda: nodes.kill("ray::RayWorker", 1)) == expected["long"]
        served.head.await_line("recovered in")
        assert served.complete() == expected["short"]
        served.head.stop()
        wait_until(
            lambda: not nodes.processes("penstock", 1) and not nodes.processes("RayWorker", 1), LIMIT_S
        )
        assert not nodes.processes("ray_driver", 0)


def test_i2_the_engine_takes_over_from_a_dead_node_and_says_when_ray_itself_is_gone(
    tmp_path: Path, checkpoint: Path, expected: dict[str, list[list[int]]]
) -> None:
    with ray_nodes() as nodes:
        served = Served(nodes, tmp_path, checkpoint, "--rejoin-timeout", "2", "--kv-cache-bytes", "8000000")
        nodes.kill("gcs_server", 0)
        served.head.await_line("control service (GCS) is lost; the engine keeps running", limit_s=5.0)
        assert served.complete() == expected["short"]

        assert served.long_answer(lambda: nodes.kill("raylet/raylet", 1)) == expected["long"]
        served.head.await_line("recovered in")
        assert served.complete() == expected["short"], "all stages are on the head"

        nodes.kill("raylet/raylet", 0)
        served.head.await_line(re.sub(r":.*", "", RAY_IS_GONE), limit_s=5.0)
        assert served.complete() == expected["short"]
        served.head.stop()
