"""Every fault of a store that design rows R9 and L3 name, behind whole engines: nothing but speed changes.

A store that fails is asked no more after its fifth failure, by whoever met with them, until a minute has
gone by; what it keeps is found again then. What is damaged counts once, is computed and stored anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

import checkpoints
from depth import sampled
from faulty_store import Fails, FaultyStore, behind_engines, is_part, never
from penstock import LLM
from penstock.engine.stats import CoreStats
from penstock.errors import StoreError, describe
from penstock.kvcache.block_hash import block_hashes, root_hash, root_in_class
from penstock.kvstore.guard import MAX_FAILURES, PAUSE_SECONDS
from penstock.kvstore.names import NAMESPACE_BYTES, is_entry
from penstock.kvstore.record import overhead_bytes, seal
from penstock.runner import kv_transfer
from small_engines import BLOCK, findable, run, small_engine, wait_until_stored

NUM_ROUNDS = 14
ROUNDS = [
    [[(11 * index + 5 * turn + number) % 90 for index in range(17 + 24 * number)] for number in range(3)]
    for turn in range(NUM_ROUNDS)
]
NUM_FOUND = sum(map(findable, ROUNDS[0]))
NUM_BLOCKS = sum((len(prompt) + 5) // BLOCK for prompt in ROUNDS[0])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make_checkpoint(tmp_path_factory.mktemp("model"), layers=3, vocab_size=96)


@pytest.fixture(scope="module")
def cold(model: Path) -> list[list[list[int]]]:
    with small_engine(model, enable_prefix_caching=False) as llm:
        return [run(llm, prompts)[0] for prompts in ROUNDS]


def stats_of(llm: LLM) -> CoreStats:
    stats = llm.stats()
    assert stats is not None
    return stats


def until(llm: LLM, is_so: Callable[[CoreStats], bool]) -> CoreStats:
    """Short requests, which have no whole block, keep plans going until it is."""
    filler = [[5, number % 90] for number in range(400)]
    while not is_so(stats := stats_of(llm)):
        assert filler, f"not so after 400 requests: {stats}"
        run(llm, [filler.pop()])
    return stats


def check(llm: LLM, turn: int, cold: Sequence[Sequence[Sequence[int]]]) -> int:
    """One request after another has the tokens of a cold run; how many tokens of prompts were found."""
    found = [run(llm, [prompt]) for prompt in ROUNDS[turn]]
    assert [tokens for (tokens,), _ in found] == cold[turn]
    return sum(count for _, count in found)


def fill(model: Path, settings: dict[str, Any], cold: list[list[list[int]]], num_rounds: int = 1) -> bytes:
    """One stage stores what the first rounds have; returns the root of its blocks' names."""
    prompts = [prompt for prompts in ROUNDS[:num_rounds] for prompt in prompts]
    tokens = [answer for answers in cold[:num_rounds] for answer in answers]
    with small_engine(model, **settings) as llm:
        assert run(llm, prompts) == (tokens, 0)
        wait_until_stored(llm, prompts, tokens)
        (numeric_class,) = stats_of(llm).numeric_classes
        return root_in_class(root_hash(), numeric_class)


# --- calls that fail --------------------------------------------------------------------------------


def writing(method: str, keys: Sequence[bytes]) -> bool:
    return method == "put"


def changing(method: str, keys: Sequence[bytes]) -> bool:
    return method in ("put", "delete", "used")


def every(method: str, keys: Sequence[bytes]) -> bool:
    return True


def asking(method: str, keys: Sequence[bytes]) -> bool:
    return method == "get"


def asking_for_parts(method: str, keys: Sequence[bytes]) -> bool:
    return method == "get" and is_part(keys[0])


def writing_parts(method: str, keys: Sequence[bytes]) -> bool:
    return method == "put" and is_part(keys[0])


@dataclasses.dataclass(frozen=True)
class Fault:
    """Attributes:
    failure: as in `FaultyStore`.
    num_off: of core and two ranks, who meet with failures and leave the store alone in the end.
    """

    fails: Fails
    failure: Exception | None
    num_off: int


FAULTS = {
    "disk full": Fault(writing, OSError(28, "No space left on device"), 2),
    "read-only": Fault(
        changing, StoreError("the directory is read-only."), 3
    ),  # the core has to strike names
    "vanished": Fault(every, FileNotFoundError(2, "No such file or directory"), 3),
    "network down": Fault(every, ConnectionRefusedError(111, "Connection refused"), 3),
    "no right to ask": Fault(every, StoreError("NOAUTH: a password is wanted."), 3),
    "half an answer to the core": Fault(asking, None, 1),
    "half an answer to ranks": Fault(asking_for_parts, None, 2),
    "half of what is put": Fault(writing_parts, None, 2),
}


def told(failure: Exception | None) -> Any:
    """What the log says of it."""
    return ANY if failure is None else describe(failure).message


@pytest.mark.parametrize("name", sampled(FAULTS, 4))
def test_r9_a_store_that_fails_is_left_alone_after_five_failures_and_tried_again(
    model: Path, cold: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fault = FAULTS[name]
    store, settings = behind_engines(monkeypatch)
    fill(model, settings, cold, num_rounds=3)
    store.fails, store.failure = fault.fails, fault.failure
    turns = iter(range(1, NUM_ROUNDS))
    with small_engine(model, pipeline_parallel_size=2, **settings) as llm:
        while stats_of(llm).store.use.switched_off < fault.num_off:
            check(llm, next(turns), cold)
        expected = MAX_FAILURES * fault.num_off
        check(llm, next(turns), cold)
        assert store.num_failed == expected, "nobody asks a store that is switched off"
        assert stats_of(llm).store.use.call_failures == expected
        assert stats_of(llm).store.use.switched_off == fault.num_off
        assert stats_of(llm).store.use.failure == told(fault.failure)

        store.fails, store.now = never, store.now + PAUSE_SECONDS
        while stats_of(llm).store.use.switched_off:
            check(llm, next(turns), cold)
        assert stats_of(llm).store.use.call_failures == expected
    with small_engine(model, tensor_parallel_size=2, **settings) as llm:
        assert check(llm, 0, cold) == NUM_FOUND
        assert not stats_of(llm).store.use.call_failures


# --- a store that stands still ----------------------------------------------------------------------


def asking_for_entries(method: str, keys: Sequence[bytes]) -> bool:
    return method == "get" and is_entry(keys[0])


@pytest.mark.parametrize(
    ("is_slow", "patience_s", "num_found"), [(asking_for_entries, 0.0, 0), (writing, 60.0, NUM_FOUND)]
)
def test_r9_nobody_waits_for_a_store_that_stands_still_while_it_is_asked_or_written_to(
    model: Path,
    cold: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    is_slow: Fails,
    patience_s: float,
    num_found: int,
) -> None:
    """It answers when all requests are over: no latency is longer."""
    monkeypatch.setattr(kv_transfer, "DEADLINE_S", 600.0)
    store, settings = behind_engines(monkeypatch)
    fill(model, settings, cold)
    store.stands_still = is_slow
    try:
        with small_engine(
            model, pipeline_parallel_size=2, **settings | {"kv_store_patience_s": patience_s}
        ) as llm:
            assert (check(llm, 0, cold), check(llm, 1, cold)) == (num_found, 0)
            assert store.is_asked.wait(60)
            store.may_go_on.set()
            until(llm, lambda stats: stats.store.stored_blocks >= NUM_BLOCKS)
            assert check(llm, 0, cold) == NUM_FOUND
    finally:
        store.may_go_on.set()


def test_r9_orders_end_at_their_deadline_where_a_store_stands_still_while_it_is_read(
    model: Path, cold: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it answers in the end goes nowhere, though the places were given to others meanwhile."""
    monkeypatch.setattr(kv_transfer, "DEADLINE_S", 600.0)
    store, settings = behind_engines(monkeypatch)
    fill(model, settings, cold)
    store.stands_still = asking_for_parts
    try:
        with small_engine(model, pipeline_parallel_size=2, **settings) as llm:
            monkeypatch.setattr(kv_transfer, "DEADLINE_S", 0.1)
            assert (check(llm, 0, cold), check(llm, 1, cold)) == (0, 0)
            assert store.is_asked.is_set()
            assert stats_of(llm).store.failed_blocks >= NUM_FOUND // BLOCK
            monkeypatch.setattr(kv_transfer, "DEADLINE_S", 600.0)
            store.may_go_on.set()
            for turn in (0, 1):
                assert check(llm, turn, cold) == NUM_FOUND, "in the pool, where they were computed"
            assert check(llm, 2, cold) == 0
            until(llm, lambda stats: stats.store.stored_blocks >= NUM_BLOCKS)
    finally:
        store.may_go_on.set()


# --- records that are not what they should be -------------------------------------------------------


def flip(store: FaultyStore, key: bytes, other: bytes) -> None:
    record = store.records[key]
    store.records[key] = record[:-9] + bytes([record[-9] ^ 1]) + record[-8:]


def cut(store: FaultyStore, key: bytes, other: bytes) -> None:
    store.records[key] = store.records[key][: len(store.records[key]) // 2]


def swap(store: FaultyStore, key: bytes, other: bytes) -> None:
    store.records[key], store.records[other] = store.records[other], store.records[key]


def of_another_model(store: FaultyStore, key: bytes, other: bytes) -> None:
    """Whole, and the record of the same place in another model's namespace."""
    foreign = bytes(NAMESPACE_BYTES) + key[NAMESPACE_BYTES:]
    store.records[key] = seal(foreign, store.records[key][overhead_bytes(key) :])


def of_another_shape(store: FaultyStore, key: bytes, other: bytes) -> None:
    """Whole, under its own key, and with more in it than this model's records have."""
    payload = store.records[key][overhead_bytes(key) :]
    store.records[key] = seal(key, payload + payload)


def vanish(store: FaultyStore, key: bytes, other: bytes) -> None:
    del store.records[key]


# How, and how many records are found to be bad: what is missing, or whole but of no use, only fails the load.
HARM = {flip: 1, cut: 1, swap: 2, of_another_model: 1, of_another_shape: 0, vanish: 0}


@pytest.mark.parametrize("harm", sampled(HARM, 3))
def test_r9_a_bad_record_is_counted_once_computed_and_stored_anew(
    model: Path,
    cold: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[FaultyStore, bytes, bytes], None],
) -> None:
    """Of the first blocks of the two longer prompts, each in another layer, and so on another stage."""
    store, settings = behind_engines(monkeypatch)
    root = fill(model, settings, cold)
    firsts = [block_hashes(root, prompt, BLOCK)[0] for prompt in ROUNDS[0]]
    harm(store, store.parts(firsts[2:])[0], store.parts(firsts[1:2])[-1])
    num_bad = 2 if harm is swap else 1
    left = sum(map(findable, ROUNDS[0][: len(ROUNDS[0]) - num_bad]))
    with small_engine(model, pipeline_parallel_size=3, **settings) as llm:
        assert check(llm, 0, cold) == left
        stats = until(llm, lambda stats: stats.store.stored_blocks >= num_bad)
        assert stats.store.use.verify_failures == HARM[harm]
        assert (stats.store.failed_blocks, stats.store.use.call_failures) == (num_bad, 0)
    with small_engine(model, tensor_parallel_size=2, **settings) as llm:
        assert check(llm, 0, cold) == NUM_FOUND
        assert not stats_of(llm).store.use.verify_failures
