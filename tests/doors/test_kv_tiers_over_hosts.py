"""KV tiers with a worker on a second host: warm at two hosts, hit at one, and the reverse (rows G1, d15)."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from checkpoints import make_checkpoint
from penstock import LLM
from penstock.errors import UsageError
from real_servers import RedisServer
from small_engines import BLOCK, findable, run, wait_until_stored
from worker_programs import WorkerProgram, WorkerPrograms

pytestmark = pytest.mark.doors  # as people start it: a worker is a program of its own
PROMPTS = [[(11 * index + number) % 90 for index in range(17 + 24 * number)] for number in range(3)]
NUM_FOUND = sum(map(findable, PROMPTS))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two copies of a model: of the head, and of the worker."""
    directory = tmp_path_factory.mktemp("models")
    head = make_checkpoint(directory / "head" / "model", layers=3, vocab_size=96)
    shutil.copytree(head, directory / "worker" / "model")
    return directory


@pytest.fixture(scope="module")
def cold(models: Path) -> list[list[int]]:
    with one_host(models, enable_prefix_caching=False) as llm:
        return [run(llm, [prompt])[0][0] for prompt in PROMPTS]


def one_host(models: Path, **settings: Any) -> LLM:
    common: dict[str, Any] = {
        "dtype": "float32",
        "threads_per_rank": 1,
        "block_size": BLOCK,
        "num_blocks": 200,
        "kv_store_patience_s": 60.0,
    }
    return LLM(str(models / "head" / "model"), **common | settings)


class Machines:
    """A head and a worker of this machine, each with a directory of its own."""

    def __init__(self, directory: Path, models: Path) -> None:
        self._models = models
        self._programs = WorkerPrograms(directory, models / "worker", 2)

    @property
    def worker(self) -> WorkerProgram:
        """The one that was started last."""
        return self._programs.running[-1]

    @contextmanager
    def engine(self, *worker_flags: str, **settings: Any) -> Iterator[LLM]:
        """An engine over both; raises what the head raises."""
        programs = self._programs
        given = {"pipeline_parallel_size": 2, "partition": "1,2", **settings, **programs.settings()}
        made: list[LLM | BaseException] = []
        head = threading.Thread(target=self._make, args=(made, given))
        head.start()
        try:
            programs.await_token()
            programs.start("desk", *worker_flags)
            head.join(120)
            (llm,) = made
            if isinstance(llm, BaseException):
                raise llm
            with llm:
                yield llm
        finally:
            head.join(120)
            programs.close()

    def _make(self, made: list[LLM | BaseException], settings: dict[str, Any]) -> None:
        try:
            made.append(one_host(self._models, **settings))
        except BaseException as error:
            made.append(error)


@pytest.fixture
def machines(tmp_path: Path, models: Path) -> Machines:
    (tmp_path / "state").mkdir()
    return Machines(tmp_path / "state", models)


def test_g1_d15_each_host_keeps_its_blocks_on_its_own_disk(
    machines: Machines, models: Path, tmp_path: Path, cold: list[list[int]]
) -> None:
    """Warm at two hosts: hit at two, and a miss at the head alone. Warm at one: hit at two, with a copy."""
    head, desk = tmp_path / "head", tmp_path / "state" / "desk" / "kv-store" / "desk"
    with machines.engine(kv_store=str(head)) as llm:
        tokens, num_found = run(llm, PROMPTS)
        assert (tokens, num_found) == (cold, 0)
        wait_until_stored(llm, PROMPTS, tokens)
    assert desk.is_dir()
    with machines.engine(kv_store=str(head)) as llm:
        assert run(llm, PROMPTS) == (cold, NUM_FOUND)
    with one_host(models, kv_store=str(head)) as llm:
        assert run(llm, PROMPTS) == (cold, 0)
        wait_until_stored(llm, PROMPTS, cold)
    with one_host(models, kv_store=str(head)) as llm:
        assert run(llm, PROMPTS) == (cold, NUM_FOUND)
    shutil.copytree(head, tmp_path / "copy")
    with machines.engine("--kv-store", str(tmp_path / "copy"), kv_store=str(head), partition="2,1") as llm:
        assert run(llm, PROMPTS) == (cold, NUM_FOUND)


def test_g1_d15_a_store_that_both_hosts_reach_serves_one_host_and_two(
    machines: Machines, models: Path, tmp_path: Path, cold: list[list[int]]
) -> None:
    pytest.importorskip("obstore", reason="needs obstore: pip install 'penstock[stores]'")
    warm_at_two, warm_at_one = ((tmp_path / name).as_uri() for name in ("two", "one"))
    with machines.engine("--kv-store", warm_at_two, kv_store=warm_at_two) as llm:
        tokens, _ = run(llm, PROMPTS)
        wait_until_stored(llm, PROMPTS, tokens)
    with one_host(models, kv_store=warm_at_two) as llm:
        assert run(llm, PROMPTS) == (cold, NUM_FOUND)
    with one_host(models, kv_store=warm_at_one) as llm:
        run(llm, PROMPTS)
        wait_until_stored(llm, PROMPTS, cold)
    with machines.engine("--kv-store", warm_at_one, kv_store=warm_at_one) as llm:
        assert run(llm, PROMPTS) == (cold, NUM_FOUND)


def test_g1_each_host_opens_a_redis_with_credentials_of_its_own(
    machines: Machines, models: Path, tmp_path: Path, cold: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("redis", reason="needs redis: pip install 'penstock[stores]'")
    with RedisServer(tmp_path) as server:
        server.ask("ACL", "SETUSER", "desk", "on", ">own", "~*", "&*", "+@all")
        url = server.url(1)
        monkeypatch.setenv("PENSTOCK_KV_STORE", f"redis://desk:own@127.0.0.1:{server.port}/1")
        with machines.engine(kv_store=url) as llm:
            tokens, num_found = run(llm, PROMPTS)
            assert (tokens, num_found) == (cold, 0)
            wait_until_stored(llm, PROMPTS, tokens)
            users = re.findall(r" user=(\w+) ", server.ask("CLIENT", "LIST").decode())
        assert set(users) == {"default", "desk"}
        monkeypatch.delenv("PENSTOCK_KV_STORE")
        with one_host(models, kv_store=url) as llm:
            assert run(llm, PROMPTS) == (cold, NUM_FOUND)


def test_g1_r4_after_the_loss_of_a_stage_requests_begin_with_what_both_hosts_have(
    machines: Machines, tmp_path: Path, cold: list[list[int]]
) -> None:
    """An engine that ended before has stored all: a killed stage may have some entries still to write."""
    with machines.engine(kv_store=str(tmp_path / "head")) as llm:
        tokens, _ = run(llm, PROMPTS)
        wait_until_stored(llm, PROMPTS, tokens)
    with machines.engine(kv_store=str(tmp_path / "head")) as llm:
        assert run(llm, PROMPTS) == (cold, NUM_FOUND)
        (victim,) = machines.worker.stages
        victim.kill()
        assert run(llm, PROMPTS)[0] == cold
        stats = llm.stats()
    assert stats is not None
    assert stats.store.loaded_blocks >= 2 * NUM_FOUND // BLOCK


def test_g1_a_worker_without_the_store_of_the_head_ends_the_start_with_its_flag(
    machines: Machines, tmp_path: Path
) -> None:
    pytest.importorskip("obstore", reason="needs obstore: pip install 'penstock[stores]'")
    with (
        pytest.raises(UsageError, match="the worker desk has no --kv-store") as raised,
        machines.engine(kv_store=(tmp_path / "store").as_uri()),
    ):
        raise AssertionError("it has started")
    assert "--kv-store file://" in raised.value.remedy
    assert "the worker desk has no --kv-store" in machines.worker.output


def test_g1_host_memory_over_two_hosts_gives_back_what_the_pool_gave_up(
    machines: Machines, cold: list[list[int]]
) -> None:
    """One prompt at a time fits the pool, so that each comes back from host memory."""
    small = {"num_blocks": (len(PROMPTS[-1]) + 6) // BLOCK + 3, "kv_host_bytes": 64 << 20}
    with machines.engine(**small) as llm:
        for turn in range(3):
            for prompt, wanted in zip(PROMPTS, cold, strict=True):
                (tokens,), num_found = run(llm, [prompt])
                assert tokens == wanted
                assert num_found == (findable(prompt) if turn else 0)
        stats = llm.stats()
        assert stats is not None
        assert stats.store.use.host_records_read
