"""Blocks of every backend as bytes that do not depend on it, and back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from depth import sampled
from kernel_builds import built
from penstock.attention.backend import AttentionBackend
from penstock.attention.block_codec import BlockCodec
from penstock.attention.cpu_paged import CpuPagedAttention
from penstock.attention.latent_paged import LatentPagedAttention
from penstock.attention.metadata import AnyKV, AttentionMetadata
from penstock.attention.torch_paged import TorchPagedAttention
from penstock.families.latent_spec import LatentSpec
from penstock.families.rope_spec import RopeSpec
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels, HeadShape, Sight
from penstock.kernels.cpu.tape import Tape
from penstock.layers.compute import Compute
from penstock.layers.rope import RotaryEmbedding

NUM_BLOCKS = 8
HEADS = HeadShape(num_heads=4, num_kv_heads=2, head_dim=20)
LATENT = LatentSpec(rank=10, query_rank=0, plain_dim=6, rotary_dim=4, value_dim=5)
SIGHT = Sight(scale=0.3)
BLOCK_SIZES = [1, 5, 16, 20, 32]


def kernels() -> CpuKernels:
    return CpuKernels(built(), frozenset(KERNEL_NAMES))


def compute(dtype: torch.dtype) -> Compute:
    return Compute(dtype=dtype, device=torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A backend with memory of one layer, full of NaN. `angles` are those of positions, for the backend."""

    backend: AttentionBackend
    angles: Callable[[Tensor], Any]
    qkv_size: int
    dtype: torch.dtype
    block_size: int
    kv: AnyKV

    @property
    def codec(self) -> BlockCodec:
        return self.backend.block_codec(self.block_size)

    def records(self) -> Tensor:
        return torch.zeros(self.codec.num_records, self.codec.record_bytes, dtype=torch.uint8)

    def exported(self, block: int) -> Tensor:
        found = self.codec.export_blocks([(self.kv, block)])
        return torch.frombuffer(bytearray(b"".join(found)), dtype=torch.uint8).view(self.records().shape)

    def imported(self, block: int, records: Tensor) -> None:
        self.codec.import_blocks([(self.kv, block)], as_bytes(records))

    def attend(self, qkv: Tensor, blocks: list[int], length: int) -> Tensor:
        """The tokens at the end of a row of `length` tokens that lies in `blocks`."""
        positions = torch.arange(length - len(qkv), length)
        tables = torch.tensor([blocks])
        slots = tables[0][positions // self.block_size] * self.block_size + positions % self.block_size
        metadata = AttentionMetadata(
            query_starts=[0, len(qkv)],
            seq_lens=[length],
            block_tables=tables,
            slot_mapping=slots,
            num_decodes=int(len(qkv) == 1),
            block_size=self.block_size,
        )
        return self.backend.attend(qkv.clone(), self.angles(positions), self.kv, metadata, SIGHT)


def cache(kind: str, dtype: torch.dtype, block_size: int, shape: HeadShape = HEADS) -> Cache:
    if kind == "latent":
        backend: AttentionBackend = LatentPagedAttention(3, LATENT, dtype)
        rotary = RotaryEmbedding(RopeSpec(), LATENT.rotary_dim, compute=compute(dtype)).angles
        size = 4 * LATENT.width
    elif kind == "cpu":
        own = kernels()
        backend = CpuPagedAttention(shape, dtype, block_size, own)
        turns = 100.0 ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        size = shape.qkv_size

        def rotary(positions: Tensor) -> Any:
            return own.rope_angles(positions, turns, 1.0, shape.head_dim, dtype)
    else:
        backend, size = TorchPagedAttention(shape, dtype), shape.qkv_size
        rotary = RotaryEmbedding(RopeSpec(), shape.head_dim, compute=compute(dtype)).angles
    memory = torch.full((NUM_BLOCKS * backend.block_bytes(block_size),), 0xFF, dtype=torch.uint8)
    kv = backend.layer_kv(memory)
    return Cache(backend=backend, angles=rotary, qkv_size=size, dtype=dtype, block_size=block_size, kv=kv)


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def any_records(held: Cache, seed: int) -> Tensor:
    """Bits of every kind, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, held.records().shape, dtype=torch.uint8, generator=generator)


def as_bytes(records: Tensor) -> list[bytes]:
    return [record.numpy().tobytes() for record in records]


KINDS = {
    "cpu": (torch.float32, torch.bfloat16),
    "torch": (torch.float32, torch.bfloat16, torch.float16),
    "latent": (torch.float32, torch.bfloat16, torch.float16),
}
EACH = pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, dtype) for kind, dtypes in KINDS.items() for dtype in dtypes]
)
EACH_BLOCK_SIZE = pytest.mark.parametrize("block_size", sampled(BLOCK_SIZES, 2))


@EACH
@EACH_BLOCK_SIZE
def test_d15_a_block_comes_back_bit_for_bit_and_its_neighbours_stay(
    kind: str, dtype: torch.dtype, block_size: int
) -> None:
    held = cache(kind, dtype, block_size)
    sources = [any_records(held, seed) for seed in range(NUM_BLOCKS)]
    for block in (0, 2, 4, 7, 5, 3, 1, 6):
        held.imported(block, sources[block])
    for block, source in enumerate(sources):
        assert torch.equal(held.exported(block), source)
    replaced = any_records(held, NUM_BLOCKS)
    held.imported(3, replaced)
    for block, source in enumerate(sources):
        assert torch.equal(held.exported(block), replaced if block == 3 else source)


@EACH
@EACH_BLOCK_SIZE
@pytest.mark.parametrize("num_new", [1, 3])
def test_h1_attention_over_blocks_that_were_brought_back_is_bit_equal(
    kind: str, dtype: torch.dtype, block_size: int, num_new: int
) -> None:
    """In other memory and other blocks, the last of which is filled in part."""
    length = 2 * block_size + (block_size + 1) // 2
    held, other = cache(kind, dtype, block_size), cache(kind, dtype, block_size)
    tokens = noise(length + num_new, held.qkv_size, dtype=dtype)
    blocks, others = [3, 0, 5, 1, 7, 2], [2, 4, 1, 5, 0, 6]
    held.attend(tokens[:length], blocks, length)
    for block, place in zip(blocks[:3], others[:3], strict=True):
        other.imported(place, held.exported(block))
    found = other.attend(tokens[length:], others, length + num_new)
    assert found.isfinite().all()
    assert torch.equal(found, held.attend(tokens[length:], blocks, length + num_new))


def stored(held: Cache, key: Tensor, value: Tensor, block: int) -> None:
    """Keys, which are not turned, and values [num_tokens, num_kv_heads, head_dim] in the front of a block."""
    shape = (len(key), HEADS.num_heads // HEADS.num_kv_heads * key.shape[1], HEADS.head_dim)
    qkv = torch.cat((torch.zeros(shape, dtype=held.dtype), key, value), dim=1).flatten(1)
    first = block * held.block_size
    for token, row in enumerate(qkv):  # each at position 0 of a row of its own, where rotation does nothing
        metadata = AttentionMetadata(
            query_starts=[0, 1],
            seq_lens=[1],
            block_tables=torch.zeros(1, 1, dtype=torch.int64),
            slot_mapping=torch.tensor([first + token]),
            num_decodes=1,
            block_size=held.block_size,
        )
        held.backend.attend(
            row[None], held.angles(torch.zeros(1, dtype=torch.int64)), held.kv, metadata, SIGHT
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EACH_BLOCK_SIZE
def test_d15_bytes_are_the_same_from_kernels_and_from_torch(dtype: torch.dtype, block_size: int) -> None:
    """And those that the numbers have in order."""
    shape = (block_size, HEADS.num_kv_heads, HEADS.head_dim)
    key, value = noise(*shape, dtype=dtype), noise(*shape, dtype=dtype, seed=1)
    wanted = torch.stack((key, value)).permute(2, 0, 1, 3).contiguous().view(torch.uint8)
    for kind in ("cpu", "torch"):
        held = cache(kind, dtype, block_size)
        stored(held, key, value, 2)
        assert torch.equal(held.exported(2), wanted.view(held.records().shape))
        assert held.codec.num_records == 2
        assert held.codec.record_bytes == 2 * block_size * HEADS.head_dim * dtype.itemsize


@pytest.mark.parametrize(("source", "target"), [("cpu", "torch"), ("torch", "cpu")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_d15_blocks_filled_in_part_pass_between_kernels_and_torch(
    source: str, target: str, dtype: torch.dtype
) -> None:
    key, value = (noise(5, HEADS.num_kv_heads, HEADS.head_dim, dtype=dtype, seed=seed) for seed in (0, 1))
    held, other = cache(source, dtype, 20), cache(target, dtype, 20)
    stored(held, key, value, 1)
    other.imported(4, held.exported(1))
    assert torch.equal(other.exported(4), held.exported(1))
    found = other.exported(4).view(dtype).view(HEADS.num_kv_heads, 2, 20, HEADS.head_dim)
    assert torch.equal(found[:, :, :5], torch.stack((key, value)).permute(2, 0, 1, 3))


@pytest.mark.parametrize("kind", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EACH_BLOCK_SIZE
def test_d15_records_of_two_ranks_are_those_of_one(kind: str, dtype: torch.dtype, block_size: int) -> None:
    """Under tensor parallelism each rank has the records of its own heads."""
    shape = (block_size, HEADS.num_kv_heads, HEADS.head_dim)
    key, value = noise(*shape, dtype=dtype), noise(*shape, dtype=dtype, seed=1)
    whole = cache(kind, dtype, block_size)
    stored(whole, key, value, 1)
    half = HeadShape(num_heads=2, num_kv_heads=1, head_dim=HEADS.head_dim)
    halves = [cache(kind, dtype, block_size, half) for _ in range(2)]
    for rank, held in enumerate(halves):
        stored(held, key[:, rank : rank + 1], value[:, rank : rank + 1], 4)
    assert torch.equal(torch.cat([held.exported(4) for held in halves]), whole.exported(1))
    other = cache(kind, dtype, block_size)
    other.imported(0, torch.cat([held.exported(4) for held in halves]))
    assert torch.equal(other.exported(0), whole.exported(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_d15_a_latent_block_is_one_record_of_its_vectors(dtype: torch.dtype) -> None:
    held = cache("latent", dtype, 5)
    qkv = noise(5, held.qkv_size, dtype=dtype)
    held.attend(qkv, [2], 5)
    found = held.exported(2)
    assert found.shape == (1, 5 * LATENT.width * dtype.itemsize)
    vectors = found.view(dtype).view(5, LATENT.width)
    assert torch.equal(vectors[:, : LATENT.rank], qkv[:, 3 * LATENT.width :][:, : LATENT.rank])
    assert torch.equal(vectors[0], qkv[0, 3 * LATENT.width :])  # at position 0 the key is not turned


@pytest.mark.parametrize("kind", ["cpu", "torch", "latent"])
def test_a_block_that_is_not_there_and_memory_of_another_form_are_refused(kind: str) -> None:
    held = cache(kind, torch.bfloat16, 16)
    records = as_bytes(held.records())
    for block in (-1, NUM_BLOCKS):
        with pytest.raises(AssertionError):
            held.codec.export_blocks([(held.kv, block)])
        with pytest.raises(AssertionError):
            held.codec.import_blocks([(held.kv, block)], records)
    for wrong in ([*records, records[0]], records[1:], [records[0][:-1], *records[1:]]):
        with pytest.raises(AssertionError):
            held.codec.import_blocks([(held.kv, 0)], wrong)


@EACH
def test_d15_the_records_of_several_blocks_follow_each_other(kind: str, dtype: torch.dtype) -> None:
    layers = [cache(kind, dtype, 20) for _ in range(3)]
    codec, blocks = layers[0].codec, (5, 0, 5)
    places = [(layer.kv, block) for layer, block in zip(layers, blocks, strict=True)]
    sources = [any_records(layers[0], seed) for seed in range(3)]
    records = [as_bytes(source) for source in sources]
    codec.import_blocks(places, [record for own in records for record in own])
    for layer, block, source in zip(layers, blocks, sources, strict=True):
        assert torch.equal(layer.exported(block), source)
    assert codec.export_blocks(places[1:]) == [*records[1], *records[2]]
    codec.import_blocks([], [])
    assert codec.export_blocks([]) == []


def test_h1_a_step_that_is_being_recorded_does_not_take_down_a_copy() -> None:
    """Copies run beside the steps, and the first of those is recorded."""
    own = kernels()
    backend = CpuPagedAttention(HEADS, torch.float32, 16, own)
    codec = backend.block_codec(16)
    kv = backend.layer_kv(torch.zeros(backend.block_bytes(16), dtype=torch.uint8))
    size = codec.num_records * codec.record_bytes
    source = as_bytes(torch.arange(size).to(torch.uint8).view(codec.num_records, codec.record_bytes))
    with own.recording(Tape(num_tokens=4)):
        codec.import_blocks([(kv, 0)], source)
        found = codec.export_blocks([(kv, 0)])
    assert found == source


def test_h1_blocks_are_copied_on_a_thread_of_their_own_beside_steps() -> None:
    """The steps' answers are those of a cache that nobody copies from or to."""
    held, alone = cache("cpu", torch.bfloat16, 20), cache("cpu", torch.bfloat16, 20)
    tokens, records = noise(90, held.qkv_size, dtype=torch.bfloat16), any_records(held, 0)
    is_over, copies = threading.Event(), []

    def copy() -> None:
        while not is_over.is_set() or not copies:
            held.imported(1, records)  # a block of nobody's
            copies.append((held.exported(1), held.exported(3)))  # and one that steps read

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        found = [held.attend(tokens[end - 30 : end], [3, 0, 5, 4, 2], end) for end in (30, 60, 90)]
    finally:
        is_over.set()
        thread.join()
    wanted = [alone.attend(tokens[end - 30 : end], [3, 0, 5, 4, 2], end) for end in (30, 60, 90)]
    assert all(map(torch.equal, found, wanted))
    assert all(torch.equal(copied, records) for copied, _ in copies)
    assert torch.equal(held.exported(3), alone.exported(3))
