"""What a rank needs comes from the head once, whole and checked, or from what this host has already."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import Family, change_one_element, make_checkpoint, make_quantized_checkpoint
from hand_core import Crew
from penstock.errors import LinkClosedError, ModelError, PeerError
from penstock.hosts.weights import tensor_digests, weight_cache, weight_client
from penstock.hosts.weights.needed_tensors import TensorGroup
from penstock.hosts.weights.tensor_digests import TensorDigests
from penstock.hosts.weights.weight_cache import SPARE_BYTES, WeightCache
from penstock.hosts.weights.weight_wire import TensorShape
from penstock.process.config import RankConfig
from penstock.trust.cancellation import Cancellation, CancelledError
from rank_configs import make_rank_configs
from weight_heads import HeardNotes, WeightHead, WeightWorker, assert_loads_alike, at, what_was_read

Setting = tuple[WeightHead, Callable[..., WeightWorker], Path]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", layers=4, seed=1, num_shards=3)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_client, "FIRST_PAUSE_S", 0.0)


def last_stage(model: Path, **changed: Any) -> RankConfig:
    return make_rank_configs(model, 2, **changed)[1]


FAMILIES: list[Any] = [
    ("llama", {}, {}),
    ("llama", {"tied": True}, {}),
    ("llama", {"tied": True}, {"tied_head": "transfer"}),
    ("qwen2", {"dtype": torch.bfloat16}, {"tp": (1, 2)}),
    ("mixtral", {}, {"tp": (2, 2), "expert_parallel": True}),
    ("qwen2_moe", {}, {}),
    ("qwen3_moe", {}, {"quantization": "int8"}),
    pytest.param("llama", {"tied": True}, {"model_impl": "transformers"}, marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("family", "config", "layout"), FAMILIES, ids=str)
def test_g1_ranks_read_the_same_bytes_from_what_was_fetched(
    tmp_path: Path, family: Family, config: dict[str, Any], layout: dict[str, Any]
) -> None:
    model = make_checkpoint(tmp_path / "m", family=family, layers=3, kv_heads=2, num_shards=2, **config)
    assert_loads_alike(tmp_path, model, layout)


@pytest.mark.parametrize("layout", ["gptq", "awq", "packed", "int8"])
def test_g1_ranks_read_the_same_bytes_of_a_quantised_checkpoint(tmp_path: Path, layout: Any) -> None:
    bits = 8 if layout == "int8" else 4
    sizes = {"hidden_size": 64, "intermediate_size": 64, "layers": 3}
    make_quantized_checkpoint(tmp_path / "m", layout, bits=bits, num_shards=2, **sizes)
    assert_loads_alike(tmp_path, tmp_path / "m", {})


def test_g1_a_rank_fetches_its_own_tensors_alone(
    head: WeightHead, new_worker: Callable[..., WeightWorker], model: Path
) -> None:
    worker = new_worker()
    path = worker.find(last_stage(model))
    whole = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert worker.notes.done == worker.notes.total < 0.7 * whole
    assert len(worker.tensor_files) == 4  # two layers, norm and head
    assert (path / "config.json").read_bytes() == (model / "config.json").read_bytes()
    assert worker.leftovers == []
    assert worker.directory.stat().st_mode & 0o777 == 0o700


def test_g1_a_second_start_fetches_nothing(
    head: WeightHead, new_worker: Callable[..., WeightWorker], model: Path
) -> None:
    first = new_worker()
    path = first.find(last_stage(model))
    fetched = head.num_bytes
    first.close()
    head.num_bytes = 0
    again = new_worker()
    assert again.find(last_stage(model)) == path
    assert again.notes.total == 0
    assert head.num_bytes < 8000 < fetched / 5  # names, shapes and digests


def test_g1_another_stage_fetches_what_is_new(
    head: WeightHead, new_worker: Callable[..., WeightWorker], model: Path
) -> None:
    worker = new_worker()
    worker.find(last_stage(model))
    worker.find(make_rank_configs(model, 4)[3])  # its layer is here
    assert worker.notes.total == 0
    worker.find(make_rank_configs(model, 4)[1])
    assert worker.notes.total > 0
    assert len(worker.tensor_files) == 5


def test_g1_a_local_copy_is_used_where_its_digests_are_the_heads(
    tmp_path: Path, head: WeightHead, new_worker: Callable[..., WeightWorker], model: Path
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "models" / "copy"))
    worker = new_worker(tmp_path / "models")
    rank = last_stage(model)
    found = worker.find(rank)
    assert (worker.notes.total, worker.tensor_files) == (0, [])
    assert {link.resolve().parent for link in found.glob("*.safetensors")} == {copy}
    assert what_was_read(at(found, rank, head.identity)) == what_was_read(rank)


def test_g1_where_a_directory_has_no_copy_the_user_is_told_once_what_would_be_one(
    tmp_path: Path, new_worker: Callable[..., WeightWorker], model: Path
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "models" / "copy"))
    first, *_ = sorted(copy.glob("*.safetensors"))
    first.rename(copy / "another.safetensors")
    worker, rank = new_worker(tmp_path / "models"), last_stage(model)
    worker.find(rank)
    assert worker.notes.lines == [
        f"there is no copy of the head's model below {tmp_path / 'models'}: its config.json and "
        "*.safetensors files, or its GGUF files, must equal the head's in name and content"
    ]
    worker.find(rank)
    assert worker.notes.lines == []
    other = new_worker(name="other")
    other.find(rank)
    assert other.notes.lines == [], "no directory was named"


def test_r15_of_a_copy_with_another_tensor_the_group_is_fetched_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples of the files do not see the change, as they are small here."""
    monkeypatch.setattr("penstock.kvstore.names.SAMPLE_BYTES", 16)
    model = make_checkpoint(tmp_path / "m", layers=4, seed=1)
    copy = Path(shutil.copytree(model, tmp_path / "models" / "copy"))
    change_one_element(copy, "model.layers.3.mlp.up_proj.weight")
    head = WeightHead(tmp_path / "head", model)
    worker = WeightWorker(tmp_path / "cache", head, tmp_path / "models")
    rank = last_stage(model)
    try:
        found = at(worker.find(rank), rank, head.identity)
        assert len(worker.tensor_files) == 1
        assert 0 < worker.notes.total < 100_000
        assert what_was_read(found) == what_was_read(rank)
    finally:
        worker.close()
        head.close()


@pytest.mark.parametrize("damage", ["a bit", "its end", "its header", "all"])
def test_g1_a_damaged_file_of_the_cache_is_fetched_again(
    head: WeightHead, new_worker: Callable[..., WeightWorker], model: Path, damage: str
) -> None:
    first = new_worker()
    rank = last_stage(model)
    first.find(rank)
    first.close()
    victim = max(first.tensor_files, key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    if damage == "a bit":
        content[-5] ^= 1
    elif damage == "its header":
        content[12] ^= 1
    victim.write_bytes(content[: {"its end": -1, "all": 0}.get(damage, len(content))])
    again = new_worker()
    found = again.find(rank)
    assert 0 < again.notes.total < first.notes.total
    assert what_was_read(at(found, rank, head.identity)) == what_was_read(rank)


def test_g1_a_changed_model_is_not_taken_from_the_cache(
    tmp_path: Path, head: WeightHead, new_worker: Callable[..., WeightWorker], model: Path
) -> None:
    rank = last_stage(model)
    worker = new_worker()
    first = worker.find(rank)
    make_checkpoint(model, layers=4, seed=2, num_shards=3)
    head.identity = head.served.identify(str(model))
    second = worker.find(rank)
    assert first != second
    assert len(worker.tensor_files) == 8
    assert what_was_read(at(second, rank, head.identity)) == what_was_read(rank)


@pytest.mark.parametrize("seed", range(4))
def test_r15_a_torn_connection_goes_on_where_it_was(
    head: WeightHead, new_worker: Callable[..., WeightWorker], model: Path, seed: int
) -> None:
    chance = random.Random(seed)
    rank = last_stage(model)
    head.tears = [chance.randrange(4000, 30_000) for _ in range(3)]
    worker = new_worker()
    found = worker.find(rank)
    assert worker.notes.done == worker.notes.total
    assert what_was_read(at(found, rank, head.identity)) == what_was_read(rank)
    assert worker.leftovers == []


def test_r15_a_connection_that_tears_again_and_again_is_one_typed_error(
    head: WeightHead, new_worker: Callable[..., WeightWorker], model: Path
) -> None:
    worker = new_worker()
    head.tears = [3000, *([0] * 40)]
    with pytest.raises(LinkClosedError, match="in 4 attempts") as caught:
        worker.find(last_stage(model))
    assert "Check the network" in caught.value.remedy
    assert worker.leftovers == []


def test_r15_a_model_that_the_head_does_not_serve_is_refused_in_words(
    head: WeightHead, new_worker: Callable[..., WeightWorker], model: Path
) -> None:
    head.identity = b"another"
    with pytest.raises(ModelError, match="does not serve this model"):
        new_worker().find(last_stage(model))
    assert head.num_connections == 1, "a refusal is not tried again"


def test_r15_weights_that_are_gone_at_the_head_are_an_error_without_its_paths(
    head: WeightHead, new_worker: Callable[..., WeightWorker], model: Path
) -> None:
    for path in model.glob("model*"):
        path.unlink()
    with pytest.raises(ModelError) as caught:
        new_worker().find(last_stage(model))
    assert str(model.parent) not in str(caught.value)


def fail_with(code: int) -> Callable[..., None]:
    def fail(*given: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_g1_a_disk_that_becomes_full_is_one_typed_error_and_leaves_nothing(
    head: WeightHead,
    new_worker: Callable[..., WeightWorker],
    model: Path,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = new_worker()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail_with(code))
        with pytest.raises(PeerError, match="is full") as caught:
            worker.find(last_stage(model))
    assert caught.value.code == "disk_full"
    assert "--weights-cache" in caught.value.remedy
    assert worker.leftovers == worker.tensor_files == []
    worker.find(last_stage(model))  # there is room again


def test_g1_a_disk_without_room_is_refused_before_a_tensor_is_fetched(
    head: WeightHead, new_worker: Callable[..., WeightWorker], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, real = new_worker(), os.statvfs

    def statvfs(path: object) -> Any:
        fields = list(real(path))  # type: ignore[call-overload]
        fields[4] = 100  # f_bavail
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", statvfs)
    with pytest.raises(PeerError, match=r"is full: .* MB of weights") as caught:
        worker.find(last_stage(model))
    assert caught.value.code == "disk_full"
    assert head.num_bytes < 20_000


def test_g1_a_disk_with_too_little_room_beside_the_weights_says_how_much_stays_free(
    new_worker: Callable[..., WeightWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = new_worker()
    monkeypatch.setattr(WeightCache, "_free_bytes", lambda cache: 520_000_000)
    worker.cache.require_room(520_000_000 - SPARE_BYTES)
    said = "494.0 MB of weights need space there, 67.1 MB must stay free besides, and 520.0 MB are"
    with pytest.raises(PeerError, match=said):
        worker.cache.require_room(494_000_000)


def test_g1_two_workers_with_one_cache_do_not_harm_each_other(
    head: WeightHead, new_worker: Callable[..., WeightWorker], model: Path
) -> None:
    rank, crew, found = last_stage(model), Crew(), list[Path]()
    workers = [new_worker() for _ in range(2)]
    for worker in workers:
        crew.start(lambda worker=worker: found.append(worker.find(rank)))
    crew.join()
    assert len(set(found)) == 1
    assert len(workers[0].tensor_files) == 4
    assert what_was_read(at(found[0], rank, head.identity)) == what_was_read(rank)


def test_g1_what_a_killed_worker_has_begun_is_deleted_by_the_next_one(
    tmp_path: Path, new_worker: Callable[..., WeightWorker]
) -> None:
    first = new_worker()
    killed = tmp_path / "cache" / "partial" / "killed"
    killed.mkdir()
    (killed / "half").write_bytes(b"half")
    (tmp_path / "cache" / "partial" / "killed2").mkdir()
    new_worker()
    assert not killed.exists()
    assert sum(1 for _ in (tmp_path / "cache" / "partial").iterdir()) == 2, "those of the two that live"
    first.close()
    assert sum(1 for _ in (tmp_path / "cache" / "partial").iterdir()) == 1


def test_a_search_that_nobody_wants_any_more_ends_at_once(
    head: WeightHead, new_worker: Callable[..., WeightWorker], model: Path
) -> None:
    cancellation, worker = Cancellation(), new_worker()
    original = worker.notes.add

    class Cancelling:
        def say(self, line: str) -> None:
            raise AssertionError(line)

        def begin(self, num_bytes: int) -> None:
            cancellation.cancel()

        def add(self, num_bytes: int) -> None:
            original(num_bytes)

    with pytest.raises(CancelledError):
        worker._finder.find(head.identity, last_stage(model), Cancelling(), cancellation)
    assert worker.leftovers == []


class CancellingNotes(HeardNotes):
    """Cancels the search when it says that something is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.cancellation = Cancellation()

    def say(self, line: str) -> None:
        super().say(line)
        self.cancellation.cancel()


@pytest.mark.parametrize("where", ["a copy on this host", "the cache"])
def test_a_comparison_is_said_and_ends_when_nobody_wants_it_any_more(
    tmp_path: Path, head: WeightHead, new_worker: Callable[..., WeightWorker], model: Path, where: str
) -> None:
    rank, models = last_stage(model), [tmp_path / "models"]
    new_worker().find(rank)
    if where == "the cache":
        models.clear()
    else:
        shutil.copytree(model, models[0] / "copy")
    worker, notes = new_worker(*models), CancellingNotes()
    with pytest.raises(CancelledError):
        worker._finder.find(head.identity, rank, notes, notes.cancellation)
    worker.find(rank)
    assert worker.notes.lines == notes.lines, "nothing was read"
    assert re.fullmatch(rf"comparing \d\.\d MB of {where} with the head's weights", *notes.lines)
    worker.find(rank)
    assert worker.notes.lines == [], "all was read before"


class Checks:
    """Raises `CancelledError` at the third call."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1
        if self.num_calls == 3:
            raise CancelledError


def test_the_reading_of_a_copy_ends_within_a_tensor(
    tmp_path: Path, head: WeightHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_digests, "READ_BYTES", 64)
    entry = head.served.open(head.identity).tensor("model.layers.3.mlp.up_proj.weight")
    with pytest.raises(CancelledError):
        TensorDigests(tmp_path).of(entry, Checks())


def test_the_reading_of_the_cache_ends_within_a_tensor(
    new_worker: Callable[..., WeightWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_cache, "READ_BYTES", 64)
    group = TensorGroup.of("g", [TensorShape("a", "I8", (1000,))])
    with new_worker().cache.writer(group) as writer:
        writer.begin(0)
        writer.write(memoryview(bytes(1000)))
        writer.end(b"digest")
        writer.keep()
    with pytest.raises(CancelledError):
        new_worker().cache.find(group, [b"digest"], Checks())


def test_g1_the_end_of_a_worker_waits_for_no_thread_that_writes(
    new_worker: Callable[..., WeightWorker], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, are_daemons = os.fsync, []

    def fsync(handle: int) -> None:
        are_daemons.append(threading.current_thread().daemon)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    worker = new_worker()
    thread = threading.Thread(target=worker.find, args=[last_stage(model)], daemon=False)
    thread.start()
    thread.join()
    assert are_daemons
    assert all(are_daemons)


def test_g1_the_end_of_a_worker_does_not_wait_for_a_disk_that_is_gone(
    new_worker: Callable[..., WeightWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, was_closed = threading.Event(), []

    def rmtree(path: Path, ignore_errors: bool) -> None:
        was_closed.append(closed.wait(10.0))

    worker = new_worker()
    monkeypatch.setattr(weight_cache, "CLOSE_S", 0.0)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    worker.cache.close()
    assert was_closed == []
    closed.set()


def test_a_view_that_was_touched_is_made_anew(
    head: WeightHead, new_worker: Callable[..., WeightWorker], model: Path
) -> None:
    worker, rank = new_worker(), last_stage(model)
    path = worker.find(rank)
    (path / "config.json").unlink()
    (path / "config.json").write_text("{}")
    assert worker.find(rank) == path
    assert (path / "config.json").read_bytes() == (model / "config.json").read_bytes()


def test_g1_a_head_whose_files_are_gone_knows_the_identity_of_its_model_still(
    tmp_path: Path, head: WeightHead, model: Path
) -> None:
    shutil.rmtree(model)
    assert head.served.identify(str(model)) == head.identity
    with pytest.raises(ModelError):
        head.served.identify(str(tmp_path / "another"))
