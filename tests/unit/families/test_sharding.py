"""Layers shared by the ranks of a stage give what one rank gives (rows B1 to B9)."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import checkpoints
from depth import soaked
from kernel_builds import built
from penstock.distributed.group import MeetingPlace, MemoryGroup, TensorGroup
from penstock.distributed.share import IDS
from penstock.errors import UsageError
from penstock.families.registry import load_spec
from penstock.families.sharding import require_shardable
from penstock.families.spec import ModelSpec
from penstock.kernels.cpu.collective import SharedGroup
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from penstock.models.decoder import Decoder
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.loader import load_weights
from stage_driver import StageDriver
from tensor_ranks import joined, together

PROMPT = [1, 40, 7, 7, 90, 3, 22, 5, 61, 11, 2]
MODELS = {
    "llama with biases": {"kv_heads": 4, "attention_bias": True, "mlp_bias": True},
    "llama tied, two kv heads": {"tied": True},
    "qwen2, one kv head": {"family": "qwen2", "kv_heads": 1},
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    return checkpoints.make_checkpoint(directory, layers=3, vocab_size=150, seed=3, **MODELS[request.param])


def connect(size: int, with_kernels: bool) -> tuple[list[TensorGroup], CpuKernels | None]:
    if not with_kernels:
        groups = [MemoryGroup(rank, size, name="stage 0", timeout_s=60.0) for rank in range(size)]
        return joined(groups), None
    kernels = CpuKernels(built(), frozenset(KERNEL_NAMES))
    shared = [SharedGroup(kernels, rank, size, name="stage 0", timeout_s=60.0) for rank in range(size)]
    return joined(shared, 1024), kernels


def trace(driver: StageDriver) -> Tensor:
    """Prefill in chunks of one row among decodes of two others; logits of all tokens."""
    steps = [{0: PROMPT[:4], 1: PROMPT[3:10]}, {0: [5], 1: [17], 2: PROMPT[:6]}]
    steps += [{1: [8], 0: [60], 2: PROMPT[6:]}]
    steps += [{0: [n], 1: [n + 1], 2: [n + 2]} for n in range(20, 24)]
    return torch.cat([driver.step(step) for step in steps])


@pytest.mark.parametrize("with_kernels", [True, *soaked(False)])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cuts", [(), (1,)])
def test_b1_b7_ranks_together_give_the_logits_of_one(
    checkpoint: Path, size: int, cuts: tuple[int, ...], with_kernels: bool
) -> None:
    whole = trace(StageDriver(checkpoint))
    groups, kernels = connect(size, with_kernels)
    found = together(groups, lambda group: trace(StageDriver(checkpoint, cuts, kernels=kernels, group=group)))
    for logits in found:
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)
        assert torch.equal(logits, found[0]), "all ranks have the same bits"
    assert torch.equal(found[0].argmax(-1), whole.argmax(-1))


@pytest.mark.parametrize("size", [2, 4])
def test_a4_a12_ranks_hold_and_read_their_shares(checkpoint: Path, size: int) -> None:
    whole = StageDriver(checkpoint)
    groups, _ = connect(size, False)
    ranks = [StageDriver(checkpoint, group=group) for group in groups]
    held = [Counter(sizes(rank)) for rank in ranks]
    for name, number in sizes(whole).items():
        own = [each[name] for each in held]
        if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")):
            assert own == [number] * size
        elif "qkv_proj" in name:
            spec, heads = whole.spec, max(1, whole.spec.num_kv_heads // size)
            rows = (spec.num_heads // size + 2 * heads) * spec.head_dim
            assert own == [rows * number // (spec.query_size + 2 * spec.kv_size)] * size
        else:
            assert sum(own) == number
            if "embed_tokens" not in name and "lm_head" not in name:
                assert own == [number // size] * size
            assert max(own) - min(own) < 2 * IDS * whole.spec.hidden_size
    for rank in ranks:
        (stage,) = rank.stages
        read = load_weights(stage, Checkpoint(checkpoint), lambda done, total: None)
        assert read.bytes_read == read.tensor_bytes == 4 * sum(p.numel() for p in stage.parameters())


@pytest.mark.parametrize(("size", "ids"), [(2, (0, 96, 150)), (4, (0, 64, 96, 128, 150))])
def test_a13_b3_every_rank_has_its_slices_of_the_checkpoint(
    checkpoint: Path, size: int, ids: tuple[int, ...]
) -> None:
    """Ids in blocks of 32; of fewer key-value heads than ranks each is whole on some."""
    stored = load_file(checkpoint / "model.safetensors")
    for group in connect(size, False)[0]:
        rank, driver = group.rank, StageDriver(checkpoint, group=group)
        held = dict(driver.stages[0].named_parameters())
        num_kv = driver.spec.num_kv_heads
        kv_parts = min(size, num_kv)
        expected = {"model.norm.weight": stored["model.norm.weight"]}
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in stored:
                expected[name] = stored[name][ids[rank] : ids[rank + 1]]
        for layer in range(driver.spec.num_layers):
            prefix = f"model.layers.{layer}."
            for kind in ("weight", "bias"):
                parts = [stored.get(f"{prefix}self_attn.{part}_proj.{kind}") for part in "qkv"]
                if (query := parts[0]) is not None:
                    own = [query.chunk(size)[rank]]
                    own += [part.chunk(kv_parts)[rank * kv_parts // size] for part in parts[1:]]
                    expected[f"{prefix}self_attn.qkv_proj.{kind}"] = torch.cat(own)
                mlp = [stored.get(f"{prefix}mlp.{part}_proj.{kind}") for part in ("gate", "up")]
                if all(part is not None for part in mlp):
                    shares = [part.chunk(size)[rank] for part in mlp]
                    expected[f"{prefix}mlp.gate_up_proj.{kind}"] = torch.cat(shares)
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                expected[f"{prefix}{name}.weight"] = stored[f"{prefix}{name}.weight"].chunk(size, dim=1)[rank]
                if f"{prefix}{name}.bias" in stored:
                    expected[f"{prefix}{name}.bias"] = stored[f"{prefix}{name}.bias"]
            for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
                expected[prefix + name] = stored[prefix + name]
        assert held.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(held[name], tensor), name


def test_b2_b8_s10_a_block_of_a_70b_model_on_one_of_four_ranks(checkpoint: Path) -> None:
    """80 KiB for each token, 1.25 MiB for a block; the numbers of the blocks are the same on all ranks."""
    sizes_of_70b = {"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256}
    heads = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 128}
    spec = replace(load_spec(checkpoint), num_layers=80, qkv_bias=False, **sizes_of_70b, **heads)
    for rank in range(4):
        group = MemoryGroup(rank, 4, name="stage 0", timeout_s=1.0)
        layer = Decoder(spec, (0, 1), dtype=torch.bfloat16, device="meta", group=group)
        assert 80 * layer.attention.block_bytes(16) == 16 * 80 << 10 == 1280 << 10
        assert layer.layers[0].self_attn.qkv_proj.weight.shape == (2048 + 256 + 256, 8192)


def sizes(driver: StageDriver) -> dict[str, int]:
    (stage,) = driver.stages
    return {name: parameter.numel() for name, parameter in stage.named_parameters()}


class Counting:
    """A group that counts."""

    def __init__(self, group: TensorGroup) -> None:
        self.rank, self.size, self._group = group.rank, group.size, group
        self.calls: Counter[str] = Counter()

    def join(self, place: MeetingPlace) -> None:
        self._group.join(place)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls["all_reduce"] += 1
        return self._group.all_reduce(x)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        self.calls["all_gather"] += 1
        return self._group.all_gather(x)

    def check(self) -> None:
        self._group.check()

    def close(self) -> None:
        self._group.close()


def test_b5_two_all_reduces_a_layer_one_for_the_embedding_one_gather_for_logits(checkpoint: Path) -> None:
    groups = [Counting(group) for group in connect(2, False)[0]]
    together(list(groups), lambda group: StageDriver(checkpoint, group=group).step({0: PROMPT}))
    assert [group.calls for group in groups] == [Counter(all_reduce=2 * 3 + 1, all_gather=1)] * 2


@pytest.mark.parametrize(
    ("changes", "size", "said"),
    [
        ({"heads": 4}, 3, "4 attention heads, which 3 ranks cannot share"),
        ({"heads": 6, "kv_heads": 2, "hidden_size": 48}, 3, "2 key-value heads, which 3 ranks can neither"),
        ({"heads": 8, "intermediate_size": 52}, 8, "the MLP is 52 wide, which 8 ranks cannot share"),
        ({"heads": 4}, 4, "a vocabulary of 96 ids is too small for 4 ranks"),
    ],
)
def test_b9_what_cannot_be_shared_is_refused_with_the_number(
    tmp_path: Path, changes: dict[str, int], size: int, said: str
) -> None:
    spec: ModelSpec = load_spec(checkpoints.make_checkpoint(tmp_path, layers=1, **changes))
    require_shardable(spec, 1)
    with pytest.raises(UsageError, match=said) as refused:
        require_shardable(spec, size)
    assert refused.value.param == "tensor_parallel_size"
    named = [int(each) for each in re.findall(r"[0-9]+", refused.value.remedy or "")]
    assert 1 in named
    assert size not in named
    for each in named:
        require_shardable(spec, each)
