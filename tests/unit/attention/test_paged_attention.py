"""The torch backend against attention written out in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from penstock.attention import metadata as metadata_module
from penstock.attention.metadata import AttentionMetadata, LayerKV
from penstock.attention.torch_paged import attend
from penstock.kernels.cpu.ops import Sight

HEAD_DIM = 8
PLAIN = Sight(scale=HEAD_DIM**-0.5)
SINKS = torch.tensor([0.3, -2.0, 40.0, 1.5])  # of four heads


@dataclass(frozen=True, kw_only=True)
class Step:
    """A random step over random contexts, with the answer."""

    query: Tensor
    key: Tensor
    value: Tensor
    kv: LayerKV
    metadata: AttentionMetadata
    expected: Tensor
    sight: Sight


def make_step(
    counts: list[int],
    contexts: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    sight: Sight = PLAIN,
) -> Step:
    """Rows with `counts` new tokens whose contexts then have `contexts` tokens."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    blocks_per_row = max([1, *(-(-n // block_size) for n in contexts)])
    num_blocks = blocks_per_row * len(counts) + 1
    tables = torch.randperm(num_blocks - 1, generator=generator).view(len(counts), blocks_per_row)
    storage = torch.full((num_blocks * block_size, kv_heads, HEAD_DIM), float("nan"), dtype=dtype)
    kv = LayerKV(key=storage, value=storage.clone())
    slots, expected, queries, keys, values = [], [], [], [], []
    for row, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        position = torch.arange(context)
        places = tables[row][position // block_size] * block_size + position % block_size
        query = noise(count, heads, HEAD_DIM)
        key, value = noise(context, kv_heads, HEAD_DIM), noise(context, kv_heads, HEAD_DIM)
        num_before = context - count
        kv.key[places[:num_before]] = key[:num_before]
        kv.value[places[:num_before]] = value[:num_before]
        slots.append(places[num_before:])
        queries.append(query)
        keys.append(key[num_before:])
        values.append(value[num_before:])
        expected.append(reference(query, key, value, sight))
    starts = [sum(counts[:row]) for row in range(len(counts) + 1)]
    metadata = AttentionMetadata(
        query_starts=starts,
        seq_lens=contexts,
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        num_decodes=next((i for i, count in enumerate(counts) if count != 1), len(counts)),
        block_size=block_size,
    )
    return Step(
        query=torch.cat(queries),
        key=torch.cat(keys),
        value=torch.cat(values),
        kv=kv,
        metadata=metadata,
        expected=torch.cat(expected),
        sight=sight,
    )


def reference(query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> Tensor:
    """Causal attention of the last `len(query)` tokens, one head and one token at a time."""
    count, context, group = len(query), len(key), query.shape[1] // key.shape[1]
    output = torch.zeros(query.shape, dtype=torch.float64)
    for token in range(count):
        seen = context - count + token + 1
        first = max(0, seen - sight.window) if sight.window else 0
        for head in range(query.shape[1]):
            scores = key[first:seen, head // group].double() @ query[token, head].double() * sight.scale
            if sight.soft_cap:
                scores = sight.soft_cap * (scores / sight.soft_cap).tanh()
            if sight.sinks is not None:
                scores = torch.cat((scores, sight.sinks[head : head + 1].double()))
            weights = scores.softmax(0)[: seen - first]
            output[token, head] = weights @ value[first:seen, head // group].double()
    return output


def run(step: Step) -> Tensor:
    return attend(step.query, step.key, step.value, step.kv, step.metadata, step.sight)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 2), (1, 1)])
@pytest.mark.parametrize(
    ("counts", "contexts"),
    [
        ([1], [1]),
        ([1, 1, 1], [9, 1, 17]),
        ([5], [5]),
        ([5], [12]),
        ([1, 1, 3, 7], [4, 8, 3, 16]),
        ([2, 1], [2, 6]),
    ],
)
def test_equals_attention_written_out(
    counts: list[int], contexts: list[int], heads: int, kv_heads: int
) -> None:
    step = make_step(counts, contexts, heads=heads, kv_heads=kv_heads)
    torch.testing.assert_close(run(step).double(), step.expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_any_block_size(block_size: int) -> None:
    step = make_step([1, 1, 4], [7, 20, 19], block_size=block_size)
    torch.testing.assert_close(run(step).double(), step.expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    step = make_step([1, 1, 6], [30, 11, 21], dtype=dtype)
    output = run(step)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), step.expected, atol=3e-2, rtol=0)


def test_no_tokens() -> None:
    kv = LayerKV(key=torch.zeros(8, 2, HEAD_DIM), value=torch.zeros(8, 2, HEAD_DIM))
    empty = AttentionMetadata(
        query_starts=[0],
        seq_lens=[],
        block_tables=torch.empty((0, 0), dtype=torch.int64),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        num_decodes=0,
        block_size=4,
    )
    output = attend(*(torch.empty(0, heads, HEAD_DIM) for heads in (4, 2, 2)), kv, empty, PLAIN)
    assert output.shape == (0, 4, HEAD_DIM)
    assert not kv.key.any()


def test_stores_keys_and_values_at_the_mapped_slots_only() -> None:
    step = make_step([1, 3], [5, 3])
    before = step.kv.key.clone()
    run(step)
    changed = set(step.metadata.slot_mapping.tolist())
    for slot in range(len(before)):
        if slot not in changed:
            assert torch.equal(step.kv.key[slot].isnan(), before[slot].isnan())
    assert torch.equal(step.kv.key[step.metadata.slot_mapping], step.key)
    assert torch.equal(step.kv.value[step.metadata.slot_mapping], step.value)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
@pytest.mark.parametrize("window", [0, 1, 6, 100])
@pytest.mark.parametrize(
    ("counts", "contexts"),
    [([1, 1, 1], [4, 40, 6]), ([1, 3, 9], [9, 30, 9]), ([5], [6]), ([9], [9]), ([20, 2], [20, 8])],
)
def test_windows_and_caps_in_steps_of_any_kind(
    counts: list[int], contexts: list[int], window: int, soft_cap: float, sinks: Tensor | None
) -> None:
    sight = Sight(scale=0.5, soft_cap=soft_cap, window=window, sinks=sinks)
    step = make_step(counts, contexts, sight=sight)
    torch.testing.assert_close(run(step).double(), step.expected, atol=2e-6, rtol=1e-5)


def test_decodes_in_a_window_gather_no_more_than_the_window() -> None:
    step = make_step([1, 1], [300, 70], sight=Sight(scale=1.0, window=40))
    assert step.metadata.reads(40).decode_groups[0].slots.shape == (2, 64)
    assert step.metadata.reads(0).decode_groups[0].slots.shape == (2, 320)
    assert len(make_step([3], [200]).metadata.reads(10).prefill_rows[0].slots) == 12


def test_decode_groups_bound_the_gathered_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_module, "MAX_GROUP_SLOTS", 20)
    step = make_step([1] * 6, [9, 10, 3, 25, 2, 4])
    groups = step.metadata.reads(0).decode_groups
    assert [(group.start, group.end) for group in groups] == [(0, 2), (2, 3), (3, 4), (4, 6)]
    torch.testing.assert_close(run(step).double(), step.expected, atol=2e-6, rtol=1e-5)


def test_nan_of_one_row_does_not_reach_its_neighbours() -> None:
    step = make_step([1, 1, 1], [4, 9, 13])
    step.value[1] = float("nan")
    output = run(step)
    assert output[1].isnan().all()
    torch.testing.assert_close(output[[0, 2]].double(), step.expected[[0, 2]], atol=2e-6, rtol=1e-5)


def test_entries_past_the_context_are_never_used() -> None:
    step = make_step([1, 1, 2], [3, 15, 5])
    tables = step.metadata.block_tables
    tables[0, 1:] = -(10**9)
    tables[2, 2:] = 10**9
    torch.testing.assert_close(run(step).double(), step.expected, atol=2e-6, rtol=1e-5)
