"""Host memory holds the same blocks on every rank, however unequal the ranks' parts of a block are."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest

from checkpoints import make_checkpoint
from depth import sampled
from penstock.config.engine import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from penstock.engine.supervisor.host_blocks import host_blocks, host_tier_bytes, rank_block_bytes
from penstock.engine.supervisor.launch import resolve, resolve_replicas
from penstock.errors import UsageError
from penstock.hosts.resources import HostResources
from penstock.kvcache.host_names import HostNames
from penstock.kvstore.host_tier import HostTier, NoStore, block_bytes
from penstock.kvstore.names import record_key
from penstock.process.config import RankConfig

HOST = HostResources(num_cpus=6, free_bytes=1 << 30, num_gpus=0)
BLOCK, LAYERS, ITEM_BYTES, HEAD_DIM = 8, 6, 4, 4
SPACE = bytes(16)
NAMES = [bytes([number]) * 32 for number in range(60)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eight heads of four numbers, two of keys and values."""
    return str(make_checkpoint(tmp_path_factory.mktemp("model"), layers=LAYERS, heads=8, vocab_size=512))


def settings(model: str, host_bytes: int, **parallel: object) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=model, dtype="float32"),
        parallel=ParallelConfig(**parallel),
        cache=CacheConfig(block_size=BLOCK, kv_host_bytes=host_bytes),
    )


class RankMemory:
    """The host tier of a rank, with records of the sizes that its layers and heads give them."""

    def __init__(self, rank: RankConfig, num_heads: int) -> None:
        self._layers, self._heads = range(rank.start_layer, rank.end_layer), range(num_heads)
        self._record = bytes(2 * BLOCK * HEAD_DIM * ITEM_BYTES)
        self.bytes_of_block = block_bytes(len(self._layers) * num_heads, len(self._record))
        assert rank.store is not None
        self.max_bytes = rank.store.host_blocks * self.bytes_of_block
        self.tier = HostTier(NoStore(), self.max_bytes)

    def keys(self, name: bytes) -> list[bytes]:
        return [record_key(SPACE, name, layer, head) for layer in self._layers for head in self._heads]

    def keep(self, names: list[bytes]) -> None:
        """As orders that are carried out together."""
        self.tier.put({key: self._record for name in names for key in self.keys(name)})

    def forget(self, names: list[bytes]) -> None:
        self.tier.release([key for name in names for key in self.keys(name)])

    def names(self) -> set[bytes]:
        """Of blocks that are there as a whole; there is no part of another."""
        there = set(self.tier._payloads)
        whole = {name for name in NAMES if there.issuperset(self.keys(name))}
        assert len(there) == len(whole) * len(self.keys(NAMES[0])), "a part of a block"
        return whole


def drive(chance: random.Random, ranks: list[RankConfig], kv_heads: int) -> None:
    """Plans that give up blocks and order copies, which each rank carries out in an order of its own."""
    memories = [RankMemory(rank, max(1, kv_heads // rank.tp_size)) for rank in ranks]
    assert ranks[0].store is not None
    chosen = HostNames(ranks[0].store.host_blocks)
    for _ in range(40):
        wanted = chance.sample(NAMES, chance.randint(1, 9))
        stored = [name for name in wanted if name not in chosen and chosen.make_room(name)]
        lost = [name for name in stored if chance.random() < 0.1]  # a rank cannot store its part
        forgotten = chosen.take_given_up()
        for memory in memories:
            memory.forget(forgotten)
            fails = lost if memory is memories[0] else []
            memory.keep([name for name in chance.sample(stored, len(stored)) if name not in fails])
            for name in chance.sample(sorted(memory.names()), len(memory.names()) // 2):
                memory.tier.get(memory.keys(name))  # ranks use what they have in orders of their own
        for name in stored:
            chosen.end_store(name, "failed" if name in lost else "done")
        forgotten = chosen.take_given_up()
        for memory in memories:
            memory.forget(forgotten)
            assert memory.names() == {name for name in NAMES if name in chosen}
            used = memory.tier.use().host_bytes_used
            assert used == len(chosen) * memory.bytes_of_block <= memory.max_bytes


@pytest.mark.parametrize("seed", sampled(range(24), 8))
def test_h9_ranks_of_any_layout_keep_the_same_blocks(model: str, seed: int) -> None:
    """Issue 25, point 7: unequal stages, ranks that share a stage, replicas, and any number of bytes."""
    chance = random.Random(seed)
    stages = chance.randint(1, 4)
    cuts = [0, *sorted(chance.sample(range(1, LAYERS), stages - 1)), LAYERS]
    layout = {
        "pipeline_parallel_size": stages,
        "partition": ",".join(str(end - start) for start, end in pairwise(cuts)),
        "tensor_parallel_size": ",".join(str(chance.choice([1, 2, 4])) for _ in range(stages)),
        "data_parallel_size": chance.choice([1, 2]),
    }
    host_bytes = chance.randint(80_000, 2_000_000)
    plans = resolve_replicas(settings(model, host_bytes, **layout), [HOST])
    spec, ranks = plans[0].spec, [rank for plan in plans for rank in plan.ranks]
    each = [rank_block_bytes(spec, rank, ITEM_BYTES) for rank in ranks]
    stores = [rank.store for rank in ranks] + [plan.core.store for plan in plans]
    (num_blocks,) = {store.host_blocks for store in stores if store is not None}
    assert num_blocks * sum(each) <= host_bytes < (num_blocks + 1) * sum(each)
    memories = [RankMemory(rank, max(1, 2 // rank.tp_size)) for rank in ranks]
    assert [memory.bytes_of_block for memory in memories] == each, "what the ranks come to themselves"
    drive(chance, plans[0].ranks, spec.num_kv_heads)


@pytest.mark.parametrize("partition", ["3,3", "5,1", "1,5"])
def test_h9_how_layers_are_cut_does_not_change_how_many_blocks_fit(model: str, partition: str) -> None:
    """Issue 25, point 7."""
    config = settings(model, 1 << 20, pipeline_parallel_size=2, partition=partition)
    store = resolve(config, [HOST]).core.store
    assert store is not None
    assert store.host_blocks == (1 << 20) // (2 * LAYERS * (52 + 200 + 2 * BLOCK * HEAD_DIM * ITEM_BYTES))


def test_host_memory_without_room_for_a_block_is_refused(model: str) -> None:
    plan = resolve(settings(model, 1 << 20), [HOST])
    needed = sum(rank_block_bytes(plan.spec, rank, ITEM_BYTES) for rank in plan.ranks)
    with pytest.raises(UsageError, match=f"--kv-host-bytes {needed} or more") as raised:
        resolve(settings(model, needed - 1), [HOST])
    assert raised.value.param == "kv_host_bytes"
    assert host_blocks(needed, plan.spec, plan.ranks, ITEM_BYTES) == 1
    assert host_blocks(0, plan.spec, plan.ranks, ITEM_BYTES) == 0


def test_g1_each_host_has_so_many_bytes_and_the_fullest_one_decides(model: str) -> None:
    tower, desk = (msgspec.structs.replace(HOST, name=name) for name in ("tower", "desk"))
    for partition, share in (("3,3", 3), ("5,1", 5), ("1,5", 5)):
        config = settings(model, 1 << 20, pipeline_parallel_size=2, partition=partition)
        plan = resolve(config, [tower, desk])
        assert [rank.host for rank in plan.ranks] == ["tower", "desk"]
        store = plan.core.store
        assert store is not None
        assert store.host_blocks == (1 << 20) // (2 * share * (52 + 200 + 2 * BLOCK * HEAD_DIM * ITEM_BYTES))
        filled = [host_tier_bytes(plan.spec, rank, ITEM_BYTES) for rank in plan.ranks]
        assert max(filled) <= 1 << 20


def test_g1_the_host_without_room_for_a_block_is_named(model: str) -> None:
    tower, desk = (msgspec.structs.replace(HOST, name=name) for name in ("tower", "desk"))
    config = settings(model, 1, pipeline_parallel_size=2, partition="1,5")
    with pytest.raises(UsageError, match=r"one block takes [0-9,]+ bytes of host memory on desk\."):
        resolve(config, [tower, desk])
