"""The example of Ray Serve: pipelines come and go with the requests of a real trace (rows I1, I2)."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from checkpoints import make_checkpoint
from host_losses import Answer, Timed, play, shaped
from linked_engines import greedy_ids, make_llm
from paths import REPOSITORY, shared_data
from penstock.workloads.traces import read_trace
from ray_nodes import RayNodes, ray_nodes
from served import wait_until
from served_hosts import HostClient
from typed_hosts import Desk, commands_of

pytestmark = pytest.mark.doors

PAGE = (REPOSITORY / "docs" / "clusters.md").read_text(encoding="utf-8")
MODEL = "Qwen2.5-0.5B"
FLAGS = (
    "--served-model-name model --max-num-seqs 4 --threads-per-rank 1 --kv-cache-bytes 8000000 "
    "--queue-timeout 240"  # a busy machine starts the second pipeline late
)
SCALING = "most=3 wanted_queue=4 upscale_s=1 downscale_s=10"
IDS = range(3, 150)
MANY, FEW = 120, 12  # requests of the trace, in which there are too many for one pipeline, or few for three
SAME, LEFT = 100, 101  # tokens of prompts that only these checks have
MAX_OUTPUT = 140
MOST = 96, MAX_OUTPUT
LIMIT_S = 240.0


def request_logs(nodes: RayNodes) -> list[list[dict[str, Any]]]:
    """Return what each pipeline that has answered requests has logged of them."""
    logs = [list(_requests(text)) for text in nodes.printed().values()]
    return [log for log in logs if log]


def _requests(printed: str) -> Iterator[dict[str, Any]]:
    for line in printed.splitlines():
        if '"text":"request"' in line and '"path":"/v1/completions"' in line:
            yield json.loads(line)


def pipelines(nodes: RayNodes) -> int:
    """Return how many there are."""
    return sum(len(nodes.processes("ServeReplica:default:Pipeline", host)) for host in range(2))


def test_i2_pipelines_come_and_go_under_a_trace_and_no_request_is_lost_or_doubled(tmp_path: Path) -> None:
    rows = read_trace(shared_data("traces", "azure_llm_2023_conv.csv"), MANY + FEW, kind="azure")
    many = shaped(rows[:MANY], 0.02, ids=IDS, seed=27, output_scale=4, most=MOST)
    few = shaped(rows[MANY:], 0.0, ids=IDS, seed=27, output_scale=1, most=MOST)
    shared = tmp_path / "shared"
    checkpoint = make_checkpoint(shared / "models" / MODEL, layers=3, vocab_size=150, seed=3)
    (shared / "tokens").mkdir(mode=0o700)
    with make_llm(checkpoint, "inprocess") as llm:
        longest = greedy_ids(llm, [request.prompt for request in [*many, *few]], MAX_OUTPUT)
    expected = {tuple(request.prompt): ids for request, ids in zip([*many, *few], longest, strict=True)}
    answers: list[tuple[Timed, Answer]] = []

    with ray_nodes(num_cpus=3) as nodes:
        desk = Desk(
            nodes.hosts[0],
            tmp_path / "tower",
            {"/shared": str(shared), " examples": f" {REPOSITORY / 'examples'}"},
        )
        (line,) = (line for line in commands_of(PAGE, "Ray Serve") if line.startswith("serve run"))
        run = desk.typed(f"{line} {SCALING} 'flags={FLAGS}'", {"RAY_ADDRESS": nodes.address})
        run.await_line("is ready at", LIMIT_S)
        client = HostClient(nodes.hosts[0], 8000)

        for _ in range(30):
            answers += zip(many, play(client, many), strict=True)
            if len(request_logs(nodes)) == 3:
                break
        assert len(request_logs(nodes)) == 3, run.output[-4000:]

        same = Random(1).choices(IDS, k=SAME)
        assert len({tuple(client.complete([same], 2)[0]) for _ in range(6)}) == 1
        leaving = client.stream([Random(2).choices(IDS, k=LEFT)], MAX_OUTPUT)
        next(leaving)
        leaving.close()

        for _ in range(30):
            answers += zip(few, play(client, few, 3), strict=True)
            if pipelines(nodes) == 1:
                break
        assert pipelines(nodes) == 1, run.output[-4000:]
        assert client.complete([same], 2)

        run.process.send_signal(signal.SIGINT)
        run.process.wait(LIMIT_S)
        wait_until(lambda: not any(nodes.processes("penstock", host) for host in range(2)), LIMIT_S)
        logged = [record for log in request_logs(nodes) for record in log]
    run.stop()

    for request, answer in answers:
        assert not answer.error
        assert answer.ids == expected[tuple(request.prompt)][: request.num_output]
    identities = [record["id"] for record in logged]
    assert len(set(identities)) == len(identities) == len(answers) + 8, "each request once"
    cached = [record["cached"] for record in logged if record["prompt"] == SAME]
    assert sum(tokens > 0 for tokens in cached) >= 5, "a prompt goes where its beginning is cached"
    (left,) = (record for record in logged if record["prompt"] == LEFT)
    assert left["output"] < MAX_OUTPUT, "the engine does not go on for a client that has left"
    assert not list((shared / "tokens").iterdir())
