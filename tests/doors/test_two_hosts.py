"""The engine over two hosts, with a worker on the second: same tokens, also after a loss."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from checkpoints import make_checkpoint
from hf_reference import MIN_MARGIN
from linked_engines import PROMPTS, make_llm, tokens
from margins import smallest_margin
from penstock import LLM
from penstock.kernels.cpu.compiler import Machine
from penstock.kernels.cpu.targets import targets_of
from real_servers import free_ports
from served import title_of, wait_until

pytestmark = pytest.mark.doors  # as people start it: a worker is a program of its own
HEAD = "127.0.0.2"
LINK_PORTS = "27701-27999"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), layers=3, vocab_size=150, seed=3)


class TwoHosts:
    """An engine whose last stages run at a worker of this machine.

    Attributes:
        llm: the engine, once `start` has returned.
        worker: the process of the worker.
        models_dir: of the worker.
        worker_environment: what the worker's is to have beside this process'.
    """

    def __init__(self, directory: Path, model: Path) -> None:
        self._directory, self._model = directory, model
        self.models_dir = model.parent
        (self._port,) = free_ports(1)
        self._token = directory / "token"
        self._made: list[LLM | BaseException] = []
        self.worker_environment: dict[str, str] = {}

    def start(self, **settings: Any) -> None:
        head = threading.Thread(target=self._make, kwargs=settings)
        head.start()
        wait_until(lambda: self._token.exists() or self._made, 60)
        self.start_worker()
        head.join(120)
        (self.llm,) = self._made  # type: ignore[assignment]
        assert isinstance(self.llm, LLM), self.llm

    def start_worker(self) -> None:
        words = ["worker", "--join", f"{HEAD}:{self._port}", "--join-token-file", str(self._token)]
        words += ["--name", "desk", "--models-dir", str(self.models_dir), "--link-ports", LINK_PORTS]
        words += ["--state-dir", str(self._directory / "desk")]
        self.worker = psutil.Popen(
            [sys.executable, "-m", "penstock", *words],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.worker_environment},
        )

    def stages(self, *, remote: bool) -> list[psutil.Process]:
        """The processes of stages at the worker, or at the head."""
        parents = [self.worker] if remote else psutil.Process().children()
        children = [
            child for parent in parents if remote or parent != self.worker for child in parent.children()
        ]
        return [child for child in children if "penstock stage" in title_of(child)]

    def stop(self) -> str:
        """End both sides; what the worker has said."""
        for llm in self._made:
            if isinstance(llm, LLM):
                llm.shutdown()
        self._made.clear()
        self.worker.terminate()
        said, _ = self.worker.communicate(timeout=30)
        return str(said)

    def close(self) -> None:
        if self._made or self.worker.poll() is None:
            self.stop()

    def _make(self, **settings: Any) -> None:
        try:
            self._made.append(
                make_llm(
                    self._model,
                    hosts=2,
                    listen_workers=f"{HEAD}:{self._port}",
                    join_token_file=str(self._token),
                    link_ports=LINK_PORTS,
                    state_dir=str(self._directory / "tower"),
                    **settings,
                )
            )
        except BaseException as error:
            self._made.append(error)
            raise


@pytest.fixture
def two_hosts(tmp_path: Path, model: Path) -> Iterator[TwoHosts]:
    hosts = TwoHosts(tmp_path, model)
    try:
        yield hosts
    finally:
        hosts.close()


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with make_llm(model, "inprocess") as llm:
        return tokens(llm)


@pytest.mark.parametrize("settings", [{"pipeline_parallel_size": 3, "async_depth": 1}], ids=str)
def test_g1_two_hosts_give_the_tokens_of_one(
    two_hosts: TwoHosts, expected: list[list[int]], settings: dict[str, Any]
) -> None:
    two_hosts.start(**settings)
    assert tokens(two_hosts.llm) == expected
    assert [title_of(stage) for stage in two_hosts.stages(remote=True)] == ["penstock stage 2 tp 0"]
    assert len(two_hosts.stages(remote=False)) == 2


def test_g1_r4_a_stage_of_another_host_that_is_killed_comes_back(
    two_hosts: TwoHosts, expected: list[list[int]]
) -> None:
    two_hosts.start(pipeline_parallel_size=2)
    assert tokens(two_hosts.llm) == expected
    (victim,) = two_hosts.stages(remote=True)
    victim.kill()
    assert tokens(two_hosts.llm) == expected
    assert victim.pid not in {stage.pid for stage in two_hosts.stages(remote=True)}


def test_g1_r4_a_worker_that_is_killed_and_started_again_is_taken_back(
    two_hosts: TwoHosts, expected: list[list[int]]
) -> None:
    two_hosts.start(pipeline_parallel_size=2)
    assert tokens(two_hosts.llm) == expected
    two_hosts.worker.kill()
    two_hosts.worker.communicate()
    two_hosts.start_worker()
    assert tokens(two_hosts.llm) == expected


def test_g1_a_worker_without_the_models_files_fetches_its_tensors_once(
    two_hosts: TwoHosts, tmp_path: Path, expected: list[list[int]]
) -> None:
    two_hosts.models_dir = tmp_path / "models"
    two_hosts.models_dir.mkdir()
    two_hosts.start(pipeline_parallel_size=3)
    assert tokens(two_hosts.llm) == expected
    (victim,) = two_hosts.stages(remote=True)
    victim.kill()
    assert tokens(two_hosts.llm) == expected
    said = two_hosts.stop()
    assert said.count("fetched") == 1
    two_hosts.start(pipeline_parallel_size=3)
    assert tokens(two_hosts.llm) == expected
    assert "fetch" not in two_hosts.stop()


# --- unlike hosts -----------------------------------------------------------------------------------

HERE = Machine.detect()
has_avx2 = pytest.mark.skipif("avx2" not in targets_of(HERE.architecture, HERE.cpu_flags), reason="no AVX2")


def classes_of(llm: LLM) -> list[str]:
    stats = llm.stats()
    assert stats is not None
    return stats.numeric_classes


@pytest.fixture
def clear_model(tmp_path: Path) -> Path:
    """A model whose two likeliest tokens are never close after these prompts."""
    return make_checkpoint(tmp_path / "clear", layers=3, vocab_size=96, seed=3)


@has_avx2
def test_g1_d15_hosts_of_unlike_classes_say_so_and_give_the_same_greedy_tokens(
    tmp_path: Path, clear_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernels of the worker are built for an older CPU."""
    prompts = [list(prompt["prompt_token_ids"]) for prompt in PROMPTS]
    with make_llm(clear_model, "inprocess") as llm:
        greedy = tokens(llm)[: len(prompts)]
    assert smallest_margin(clear_model, prompts, greedy) > MIN_MARGIN
    hosts = TwoHosts(tmp_path, clear_model)
    hosts.worker_environment = {"PENSTOCK_CXXFLAGS": "-march=x86-64-v3"}
    try:
        with caplog.at_level("INFO", "penstock"):
            hosts.start(pipeline_parallel_size=2)
        assert tokens(hosts.llm)[: len(prompts)] == greedy
        own, other = classes_of(hosts.llm)
    finally:
        hosts.close()
    assert own != other
    assert other.startswith("avx2 ")
    (said,) = [text for text in caplog.messages if "numeric classes are mixed" in text]
    assert f"stage 1 on desk: {other}" in said


@has_avx2
def test_g1_d15_hosts_that_are_held_to_one_class_give_the_bits_of_one_host(
    two_hosts: TwoHosts, model: Path
) -> None:
    two_hosts.start(pipeline_parallel_size=2, numeric_class="avx2")
    with make_llm(model, "inprocess", numeric_class="avx2") as llm:
        assert tokens(two_hosts.llm) == tokens(llm), "drawn ones too"
        assert classes_of(two_hosts.llm) == classes_of(llm) * 2
