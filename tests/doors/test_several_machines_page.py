"""The commands of the page on several machines, typed on two hosts as they stand there."""

from __future__ import annotations

import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from linked_engines import greedy_ids, make_llm
from network import cable_network
from paths import REPOSITORY
from served_hosts import HostClient
from typed_hosts import Desk, commands_of

pytestmark = pytest.mark.doors

PAGE = (REPOSITORY / "docs" / "several-machines.md").read_text(encoding="utf-8")
MODEL = "Qwen2.5-0.5B"  # as the page calls it
PROMPTS, NUM_TOKENS = [[5, 6, 7], [11, 3]], 16


def test_g1_the_commands_of_the_page_serve_one_model_over_two_hosts(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / MODEL, layers=3, vocab_size=150, seed=3)
    with make_llm(checkpoint, "inprocess") as llm:
        expected = greedy_ids(llm, PROMPTS, NUM_TOKENS)
    serve, copy, join = commands_of(PAGE, "Two hosts in three commands")
    with cable_network() as network, ExitStack() as ending:
        addresses = {"10.0.0.1": network.hosts[0].address, "10.0.0.2": network.hosts[1].address}
        tower, desk = (
            Desk(host, tmp_path / name, addresses)
            for host, name in zip(network.hosts, ("tower", "desk"), strict=True)
        )
        (tower.directory / "models").mkdir()
        checkpoint.rename(tower.directory / "models" / MODEL)

        head = tower.typed(serve)
        ending.callback(head.stop)
        head.await_line(tower.as_typed(join))
        assert re.fullmatch(r"scp token 10\.0\.0\.2:", copy)
        shutil.copy(tower.directory / "token", desk.directory)
        doctor = desk.typed(join.replace("penstock worker", "penstock doctor"))
        assert doctor.process.wait(120) == 0, doctor.output
        worker = desk.typed(join)
        ending.callback(worker.stop)
        head.await_line("has joined")
        head.await_line("http://127.0.0.1:8000")

        client = HostClient(network.hosts[0], 8000)
        assert client.complete(PROMPTS, NUM_TOKENS, model=MODEL) == expected
        head.stop()
        worker.await_line("the head is lost")
