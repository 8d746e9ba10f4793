"""A store of KV blocks behind whole engines: what one layout writes serves every other (rows H1, d15)."""

from __future__ import annotations

import json
import shutil
import signal
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

import checkpoints
import small_engines
from depth import sampled
from disturbed import Server, Stream
from penstock import LLM
from penstock.errors import StoreError, UsageError
from penstock.kvstore.inspection import Namespace, open_to_read, survey
from served import wait_until
from small_engines import BLOCK, findable, small_engine, wait_until_stored

ADMIN_KEY = "key-of-an-administrator"
PROMPTS = [[(11 * index + number) % 90 for index in range(17 + 24 * number)] for number in range(3)]
NUM_FOUND = sum(map(findable, PROMPTS))
NUM_RECORDS = NUM_FOUND // BLOCK * 3 * 2  # of three layers and two heads


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make_checkpoint(tmp_path_factory.mktemp("model"), layers=3, vocab_size=96)


def run(llm: LLM, prompts: Sequence[Sequence[int]] = PROMPTS) -> tuple[list[list[int]], int]:
    return small_engines.run(llm, prompts)


def fill(llm: LLM) -> list[list[int]]:
    """Run all, and wait until what can be stored is."""
    tokens, _ = run(llm)
    wait_until_stored(llm, PROMPTS, tokens)
    return tokens


def alone(model: Path, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
    """Each by itself in an engine that keeps nothing."""
    with small_engine(model, enable_prefix_caching=False, kernels="off") as llm:
        return [run(llm, [prompt])[0][0] for prompt in prompts]


@pytest.fixture(scope="module")
def cold(model: Path) -> list[list[int]]:
    return alone(model)


LAYOUTS = small_engines.LAYOUTS


@pytest.mark.parametrize("writer", sampled(LAYOUTS, 3))
def test_h1_d15_what_one_layout_stores_every_other_finds(
    model: Path, cold: list[list[int]], tmp_path: Path, writer: str
) -> None:
    with small_engine(model, tmp_path, **LAYOUTS[writer]) as llm:
        assert fill(llm) == cold
    for reader, layout in LAYOUTS.items():
        with small_engine(model, tmp_path, **layout) as llm:
            assert run(llm) == (cold, NUM_FOUND), reader
            stats = llm.stats()
            assert stats is not None
            assert stats.store.use.records_read == NUM_RECORDS, "no rank's part is read twice, or by nobody"


def test_h17_another_model_finds_nothing(model: Path, cold: list[list[int]], tmp_path: Path) -> None:
    with small_engine(model, tmp_path / "store") as llm:
        fill(llm)
    other = checkpoints.make_checkpoint(tmp_path / "other", layers=3, vocab_size=96, seed=1)
    with small_engine(other, tmp_path / "store") as llm:
        assert run(llm) == (alone(other), 0)
    with small_engine(model, tmp_path / "store", block_size=BLOCK // 2) as llm:
        assert run(llm) == (cold, 0)


def test_h17_d15_another_numeric_class_finds_nothing(
    model: Path, cold: list[list[int]], tmp_path: Path
) -> None:
    """What our kernels and torch compute differs in the last bits."""
    with small_engine(model, tmp_path) as llm:
        fill(llm)
        of_writer = class_of(llm)
    with small_engine(model, tmp_path, kernels="off") as llm:
        num_found = NUM_FOUND if class_of(llm) == of_writer else 0  # without a compiler they are one
        assert run(llm) == (cold, num_found)


def class_of(llm: LLM) -> list[str]:
    stats = llm.stats()
    assert stats is not None
    return stats.numeric_classes


@contextmanager
def records_of(directory: Path) -> Iterator[tuple[Any, list[tuple[bytes, bytes]]]]:
    """A transaction over the records of a store, and those of blocks."""
    with lmdb.open(str(directory), max_dbs=3) as environment:
        records = environment.open_db(b"records")
        with environment.begin(db=records, write=True) as transaction:
            yield transaction, [(key, value) for key, value in transaction.cursor() if len(value) > 200]


@pytest.mark.parametrize("harm", ["flip", "cut", "swap", "delete"])
def test_r9_bad_records_cost_time_and_no_token(
    model: Path, cold: list[list[int]], tmp_path: Path, harm: str
) -> None:
    with small_engine(model, tmp_path) as llm:
        fill(llm)
    with records_of(tmp_path) as (transaction, stored):
        for number, (key, value) in enumerate(stored[::7]):
            if harm == "flip":
                transaction.put(key, value[:-9] + bytes([value[-9] ^ 1]) + value[-8:])
            elif harm == "cut":
                transaction.put(key, value[: len(value) // 2])
            elif harm == "swap":
                transaction.put(key, stored[number * 7 - 1][1])
            else:
                transaction.delete(key)
    with small_engine(model, tmp_path, pipeline_parallel_size=2) as llm:
        tokens, num_found = run(llm)
        assert tokens == cold
        assert num_found < NUM_FOUND
        stats = llm.stats()
        assert stats is not None
        assert stats.store.failed_blocks


def test_h18_a_rank_without_its_part_runs_what_the_others_run(
    model: Path, cold: list[list[int]], tmp_path: Path
) -> None:
    """Both ranks of a stage take part in every sum, though one of them alone has to compute nothing anew."""
    with small_engine(model, tmp_path) as llm:
        fill(llm)
    with records_of(tmp_path) as (transaction, stored):
        heads = {key[-2:] for key, _ in stored}
        assert heads == {b"\0\0", b"\0\1"}, "two heads, of which each rank has one"
        for key, _ in stored:
            if key[-2:] == b"\0\1":
                transaction.delete(key)
    with small_engine(model, tmp_path, tensor_parallel_size=2) as llm:
        tokens, num_found = run(llm)
        assert tokens == cold
        assert num_found == 0


def test_r9_a_store_that_vanishes_is_no_store(model: Path, cold: list[list[int]], tmp_path: Path) -> None:
    store = tmp_path / "store"
    with small_engine(model, store, pipeline_parallel_size=2) as llm:
        fill(llm)
        shutil.rmtree(store)
        store.write_text("in its place")
        others = [[90 - token for token in prompt] for prompt in PROMPTS]
        assert run(llm, others)[0] == alone(model, others), "these ask the store"
        assert run(llm)[0] == cold
    store.unlink()
    with small_engine(model, store, pipeline_parallel_size=2) as llm:
        assert run(llm) == (cold, 0)


def test_a_store_that_can_never_work_is_refused_at_the_start(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StoreError, match="file"):
        small_engine(model, tmp_path / "file" / "store")
    with pytest.raises(UsageError, match="prefix cache is off"):
        small_engine(model, tmp_path, enable_prefix_caching=False)


# --- as processes -----------------------------------------------------------------------------------

# Blocks of 32 tokens: prompts of one block and more, whose streams go on long enough to be disturbed.
LONG = [{"prompt": [(7 * index + number) % 90 for index in range(80)], "temperature": 0} for number in (0, 1)]


def ask(server: Server, request: dict[str, Any]) -> list[int]:
    return [*Stream(server, request)]


def stored(server: Server) -> float:
    return server.metric("penstock_kv_store_stored_blocks_total")


@pytest.mark.soak
def test_h1_a_server_that_starts_again_finds_what_the_one_before_has_stored(tmp_path: Path) -> None:
    store = ["--kv-store", str(tmp_path / "store"), "--kv-store-patience", "60"]
    with Server(2, *store) as first:
        expected = [ask(first, request) for request in LONG]
        wait_until(lambda: stored(first) >= 2 * (80 + 600) // 32 - 2, 60)
    with Server(3, *store) as second:
        assert [ask(second, request) for request in LONG] == expected
        assert second.metric("penstock_kv_store_loaded_blocks_total") >= 4
        assert second.metric("penstock_prefix_cache_hits_total") >= 2 * 64


@pytest.mark.soak
def test_d2_r4_after_the_loss_of_a_stage_streams_go_on_from_the_store(tmp_path: Path) -> None:
    with Server(2, "--kv-store", str(tmp_path / "store"), "--kv-store-patience", "60") as server:
        expected = ask(server, LONG[0])
        wait_until(lambda: stored(server) >= (80 + 600) // 32 - 1, 60)
        stream = iter(Stream(server, LONG[1]))
        found = [next(stream) for _ in range(40)]
        server.stage(1).send_signal(signal.SIGKILL)
        found.extend(stream)
        assert server.num_recoveries == 1
        assert ask(server, LONG[0]) == expected
        assert server.metric("penstock_kv_store_loaded_blocks_total") >= 2
    with Server(1) as alone:
        assert found == ask(alone, LONG[1])


@pytest.mark.soak
def test_h16_a_flush_takes_the_store_with_it_while_streams_go_on(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    words = ("--kv-store", str(directory), "--kv-store-patience", "60", "--admin-key", ADMIN_KEY)
    with Server(2, *words) as server:
        expected = ask(server, LONG[0])
        wait_until(lambda: stored(server) >= (80 + 600) // 32 - 1, 60)
        assert server.metric('penstock_kv_store_bytes_total{direction="written"') > 0
        (before,) = in_store(directory)
        assert before.num_blocks >= (80 + 600) // 32 - 1
        assert before.description is not None
        stream = iter(Stream(server, LONG[1]))
        found = [next(stream) for _ in range(40)]
        (done,) = administer(server, "/flush_cache?store=true")["replicas"]
        assert done["error"] is None
        assert done["completed_step"] >= done["accepted_step"]
        assert in_store(directory) == []
        hits = server.metric("penstock_prefix_cache_hits_total")
        assert ask(server, LONG[0]) == expected
        assert server.metric("penstock_prefix_cache_hits_total") == hits
        found.extend(stream)
    with Server(1) as alone:
        assert found == ask(alone, LONG[1])


def in_store(directory: Path) -> list[Namespace]:
    with closing(open_to_read(str(directory))) as store:
        return survey(store)


def administer(server: Server, path: str) -> dict[str, Any]:
    asked = urllib.request.Request(
        server.url + path, headers={"authorization": f"Bearer {ADMIN_KEY}"}, method="POST"
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)
