"""Hosts that are killed, stopped or come back: same tokens over the hosts that are left, or a typed error."""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from checkpoints import make_checkpoint
from linked_engines import make_llm, tokens
from penstock import LLM, SamplingParams
from penstock.errors import HostMissingError, PenstockError, UnavailableError
from served import is_alive, title_of, wait_until
from tcp_way import Way
from worker_programs import WorkerProgram, WorkerPrograms, stages_below

pytestmark = pytest.mark.doors  # as people start it: a worker is a program of its own
WAIT_S = 60.0
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5 + number, 9, 2]} for number in range(3)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two copies of a model: of the head, and of the workers."""
    directory = tmp_path_factory.mktemp("models")
    head = make_checkpoint(directory / "head" / "model", layers=3, vocab_size=150, seed=3)
    shutil.copytree(head, directory / "workers" / "model")
    return directory


class Engine:
    """An `LLM` over hosts of this machine.

    Attributes:
        llm: once `start` has returned.
    """

    def __init__(self, directory: Path, models: Path) -> None:
        self._directory, self._models = directory, models
        self.model = models / "head" / "model"
        self._made: list[LLM | BaseException] = []

    def start(self, *names: str, **settings: Any) -> dict[str, WorkerProgram]:
        """Start the head and workers of these names."""
        self._programs = WorkerPrograms(self._directory, self._models / "workers", len(names) + 1)
        settings = {"pipeline_parallel_size": len(names) + 1, "rejoin_timeout_s": 1.0, **settings}
        head = threading.Thread(target=self._make, kwargs=settings | self._programs.settings())
        head.start()
        self._programs.await_token()
        workers = {name: self._programs.start(name) for name in names}
        head.join(120)
        (self.llm,) = self._made  # type: ignore[assignment]
        assert isinstance(self.llm, LLM), self.llm
        return workers

    def start_worker(self, name: str) -> WorkerProgram:
        return self._programs.start(name)

    def start_over_way(self, name: str) -> tuple[WorkerProgram, Way]:
        """Start the head and one worker, which joins it over a way that can be broken."""
        self._programs = WorkerPrograms(self._directory, self._models / "workers", 2)
        settings = self._programs.settings() | {"pipeline_parallel_size": 2}
        head = threading.Thread(target=self._make, kwargs=settings)
        head.start()
        self._programs.await_token()
        way = self._programs.way()
        worker = self._programs.start(name, port=way.port)
        head.join(120)
        (self.llm,) = self._made  # type: ignore[assignment]
        assert isinstance(self.llm, LLM), self.llm
        return worker, way

    @property
    def own_stages(self) -> list[psutil.Process]:
        """The stages of the head."""
        return [stage for child in psutil.Process().children() for stage in self._stages_of(child)]

    def _stages_of(self, child: psutil.Process) -> list[psutil.Process]:
        is_worker = child.pid in {worker.process.pid for worker in self._programs.running}
        return [] if is_worker else stages_below(child)

    def close(self) -> None:
        for llm in self._made:
            if isinstance(llm, LLM):
                llm.shutdown()
        self._programs.close()

    def _make(self, **settings: Any) -> None:
        try:
            self._made.append(make_llm(self.model, **settings))
        except BaseException as error:
            self._made.append(error)
            raise


@pytest.fixture
def engine(tmp_path: Path, models: Path) -> Iterator[Engine]:
    made = Engine(tmp_path, models)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def expected(models: Path) -> tuple[list[list[int]], list[list[int]]]:
    """What is asked of all engines, and what is answered at length."""
    with make_llm(models / "head" / "model", "inprocess") as llm:
        return tokens(llm), at_length(llm)


def at_length(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, LONG)]


def test_r15_of_three_hosts_one_is_killed_and_running_requests_go_on_over_the_others(
    engine: Engine, expected: tuple[list[list[int]], list[list[int]]]
) -> None:
    workers = engine.start("desk", "shelf")
    assert tokens(engine.llm) == expected[0]
    with running(engine.llm) as answers:
        workers["desk"].kill()
    assert answers == [expected[1]]
    assert len(engine.own_stages) + len(workers["shelf"].stages) == 3
    assert tokens(engine.llm) == expected[0]


@contextlib.contextmanager
def running(llm: LLM) -> Iterator[list[list[list[int]] | PenstockError]]:
    """Enter the block when requests are running; leave it when they have ended. Yields what came of them."""
    came: list[list[list[int]] | PenstockError] = []

    def run() -> None:
        try:
            came.append(at_length(llm))
        except PenstockError as error:
            came.append(error)

    thread, num_before = threading.Thread(target=run), num_generated(llm)
    thread.start()
    wait_until(lambda: num_generated(llm) > num_before + 5, WAIT_S)
    yield came
    thread.join(WAIT_S)


def num_generated(llm: LLM) -> int:
    stats = llm.stats()
    return 0 if stats is None else stats.scheduler.generated_tokens


def test_r15_a_stopped_worker_is_done_without_and_disturbs_nothing_when_it_goes_on(
    engine: Engine, expected: tuple[list[list[int]], list[list[int]]]
) -> None:
    """Its stages live on meanwhile: what they have to say belongs to an epoch that is over."""
    desk = engine.start("desk")["desk"]
    assert tokens(engine.llm) == expected[0]
    stale = desk.stages
    assert len(stale) == 1
    desk.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: len(engine.own_stages) == 2, WAIT_S)
    assert tokens(engine.llm) == expected[0]
    assert all(is_alive(stage) for stage in stale)
    epoch = epoch_of(engine.llm)
    desk.process.send_signal(signal.SIGCONT)
    wait_until(lambda: desk.output.count("has joined") == 2, WAIT_S)
    wait_until(lambda: not any(is_alive(stage) for stage in stale), WAIT_S)
    assert tokens(engine.llm) == expected[0]
    assert (epoch_of(engine.llm), len(engine.own_stages), desk.stages) == (epoch, 2, [])


def is_whole(llm: LLM) -> bool:
    stats = llm.stats()
    return stats is not None and stats.loss is None


def epoch_of(llm: LLM) -> int:
    stats = llm.stats()
    return -1 if stats is None else stats.epoch


def test_r15_a_host_that_came_back_serves_again_from_the_next_epoch_on(
    engine: Engine, expected: tuple[list[list[int]], list[list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    engine.start("desk")["desk"].kill()
    wait_until(lambda: len(engine.own_stages) == 2, WAIT_S)
    assert tokens(engine.llm) == expected[0]
    desk = engine.start_worker("desk")
    wait_until(lambda: "desk can take stages from the next epoch on" in caplog.text, WAIT_S)
    engine.own_stages[0].kill()
    wait_until(lambda: len(desk.stages) == 1, WAIT_S)
    assert tokens(engine.llm) == expected[0]
    assert len(engine.own_stages) == 1


def test_r15_where_the_others_cannot_take_over_the_error_names_the_host_and_the_engine_lives(
    engine: Engine, expected: tuple[list[list[int]], list[list[int]]]
) -> None:
    """The head cannot read the model any more. Too little memory is met in the same way (unit tests)."""
    desk = engine.start("desk")["desk"]
    assert tokens(engine.llm) == expected[0]
    hidden = engine.model.with_name("hidden")
    with running(engine.llm) as came:
        engine.model.rename(hidden)
        desk.kill()
    (error,) = came
    assert isinstance(error, HostMissingError)
    assert error.message.startswith("the pipeline waits for the host desk (stage 1); ")
    assert "on desk again" in error.remedy
    with pytest.raises(UnavailableError, match=r"the pipeline waits for the host desk .* on desk again"):
        tokens(engine.llm)
    hidden.rename(engine.model)
    wait_until(lambda: is_whole(engine.llm), WAIT_S)
    assert len(engine.own_stages) == 2
    assert tokens(engine.llm) == expected[0]


def test_r15_a_reset_of_the_connection_to_a_worker_is_not_felt(
    engine: Engine, expected: tuple[list[list[int]], list[list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    """Its stage goes on, in the same epoch: no link of its own has broken."""
    caplog.set_level(logging.INFO, "penstock")
    desk, way = engine.start_over_way("desk")
    with way:
        assert tokens(engine.llm) == expected[0]
        epoch, stages = epoch_of(engine.llm), desk.stages
        for num_joined in (2, 3):
            with running(engine.llm) as answers:
                way.reset()
                wait_until(lambda: desk.output.count("has joined") == num_joined, WAIT_S)  # noqa: B023
            assert answers == [expected[1]]
        assert (epoch_of(engine.llm), desk.stages) == (epoch, stages)
        assert "its ranks kept running" in caplog.text
        assert "lost: the host" not in caplog.text
        stages[0].kill()  # it can still be asked for another one
        assert tokens(engine.llm) == expected[0]
        assert desk.stages != stages


def test_r15_the_spare_of_a_worker_that_is_killed_becomes_the_stage_of_the_next(
    engine: Engine, expected: tuple[list[list[int]], list[list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    """So that nothing is imported while requests wait."""
    caplog.set_level(logging.INFO, "penstock")
    desk = engine.start("desk", rejoin_timeout_s=WAIT_S)["desk"]
    assert tokens(engine.llm) == expected[0]
    wait_until(lambda: "a spare process is ready on desk" in caplog.text, WAIT_S)
    (spare,) = desk.spares
    with running(engine.llm) as answers:
        desk.kill()
        engine.start_worker("desk")
    assert answers == [expected[1]]
    assert title_of(spare).startswith("penstock stage 1")
    assert tokens(engine.llm) == expected[0]
    spare.kill()
    assert tokens(engine.llm) == expected[0]


def test_r15_a_head_that_is_killed_and_started_again_is_joined_by_its_workers(
    tmp_path: Path, models: Path
) -> None:
    """Same answer; and what is printed on a worker's host is to be read at the head."""
    programs = WorkerPrograms(tmp_path, models, 2)

    def answer() -> str:
        given = head.post(
            "/v1/completions", prompt="once upon", max_tokens=12, temperature=0, ignore_eos=True
        )
        return str(given["choices"][0]["text"])

    arguments = ("demo", "--pp", "2", "--dtype", "float32", "--threads-per-rank", "1")
    try:
        head = programs.start_head(*arguments)
        desk = programs.start("desk")
        with head:
            first = answer()
            (stage,) = desk.stages
            stage.send_signal(signal.SIGUSR1)  # has it print where its threads are
            wait_until(lambda: "desk stage 1: " in head.output, WAIT_S)
            head.process.kill()
            wait_until(lambda: "the head has ended or refuses" in desk.output, WAIT_S)
            wait_until(lambda: not is_alive(stage), WAIT_S)
        head = programs.start_head(*arguments)
        with head:
            assert answer() == first
            (stage,) = desk.stages
        assert is_alive(desk.process)
    finally:
        programs.close()
