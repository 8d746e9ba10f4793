from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from penstock.distributed.share import Share, vocab_share
from penstock.errors import NotEnoughMemoryError
from penstock.layers.activation import silu_and_multiply
from penstock.layers.compute import Compute
from penstock.layers.embedding import OutputHead, VocabEmbedding
from penstock.layers.linear import FusedLinear, Linear
from penstock.layers.missing import MissingLayer
from penstock.layers.norm import AddRMSNorm

CPU = torch.device("cpu")
FLOAT = {"compute": Compute(dtype=torch.float32, device=CPU)}


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def shares(**sizes: int) -> dict[str, Share]:
    return {name: Share.all(size) for name, size in sizes.items()}


def test_a5_missing_layer_passes_its_first_argument_through() -> None:
    x, y = seeded(2), seeded(3)
    assert MissingLayer()(x, y) is x
    assert MissingLayer()(a=x, b=y) is x
    assert list(MissingLayer().parameters()) == []


def test_a5_missing_layer_can_return_a_tuple() -> None:
    x = seeded(2)
    assert MissingLayer(return_tuple=True)(x) == (x,)


@pytest.mark.parametrize("bias", [False, True])
def test_a13_fused_projection_equals_its_parts(bias: bool) -> None:
    fused = FusedLinear(6, shares(q_proj=8, k_proj=4, v_proj=2), bias=bias, **FLOAT)
    parts = {
        name: Linear(Share.all(6), end - start, bias=bias, **FLOAT)
        for name, (start, end) in fused.parts.items()
    }
    for name, (start, end) in fused.parts.items():
        parts[name].weight.copy_(seeded(end - start, 6))
        fused.weight[start:end] = parts[name].weight
        if bias:
            parts[name].bias.copy_(seeded(end - start))
            fused.bias[start:end] = parts[name].bias
    x = seeded(5, 6)
    for part, output in zip(parts.values(), fused.split(fused(x)), strict=True):
        torch.testing.assert_close(output, part(x))


def test_a13_parts_tile_the_rows() -> None:
    fused = FusedLinear(4, shares(gate_proj=3, up_proj=5), bias=False, **FLOAT)
    assert fused.parts == {"gate_proj": (0, 3), "up_proj": (3, 8)}
    assert fused.weight.shape == (8, 4)


class Bystander:
    """A group in which nobody adds anything: what one rank gives is seen."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_s4_b6_ids_of_other_ranks_give_zeros() -> None:
    table = seeded(70, 3)
    ids = torch.tensor([0, 31, 32, 63, 64, 69, 2**40])
    shards = []
    for rank in range(3):
        compute = replace(FLOAT["compute"], group=Bystander(rank, 3))
        share = vocab_share(70, rank, 3)
        shards.append(VocabEmbedding(share, 3, compute=compute))
        shards[-1].weight.copy_(table[share.start : share.end])
    outputs = [shard(ids) for shard in shards]
    assert torch.equal(sum(outputs)[:-1], table[ids[:-1]])
    assert all(not output[-1].any() for output in outputs)
    edge = [[bool(row.any()) for row in output] for output in outputs]
    assert edge[1] == [False, False, True, True, False, False, False]


def test_embedding_of_no_tokens_is_empty() -> None:
    assert VocabEmbedding(Share.all(4), 3, **FLOAT)(torch.empty(0, dtype=torch.int64)).shape == (0, 3)


def test_tied_and_own_head_are_the_same_product() -> None:
    embedding, head = VocabEmbedding(Share.all(7), 3, **FLOAT), OutputHead(Share.all(7), 3, **FLOAT)
    embedding.weight.copy_(seeded(7, 3))
    head.weight.copy_(embedding.weight)
    x = seeded(2, 3)
    assert torch.equal(embedding.logits(x), head.logits(x))
    torch.testing.assert_close(head.logits(x), x @ seeded(7, 3).T)


def test_a11_norm_adds_the_residual_first() -> None:
    norm = AddRMSNorm(8, 1e-5, **FLOAT)
    norm.weight.copy_(seeded(8))
    branch, residual = seeded(3, 8), seeded(8, 3).T.contiguous()
    before = residual.clone()
    normed, summed = norm(branch, residual)
    assert torch.equal(summed, branch + before)
    assert torch.equal(residual, before)
    torch.testing.assert_close(normed, F.rms_norm(branch + before, (8,), norm.weight, 1e-5))


def test_norm_of_large_half_precision_numbers_does_not_overflow() -> None:
    norm = AddRMSNorm(4, 1e-5, compute=Compute(dtype=torch.float16, device=CPU))
    norm.weight.fill_(1)
    x = torch.full((1, 4), 3e4, dtype=torch.float16)
    assert torch.equal(norm(x, torch.zeros_like(x))[0], torch.ones_like(x))


def test_silu_and_multiply() -> None:
    gate, up = seeded(3, 4), seeded(4, 3).T
    torch.testing.assert_close(silu_and_multiply(gate, up), gate / (1 + torch.exp(-gate)) * up)


def test_a_weight_that_no_machine_holds_is_named_with_its_size() -> None:
    with pytest.raises(NotEnoughMemoryError, match=r"\[1048576, 1048576, 1024\]") as caught:
        FLOAT["compute"].parameter(2**20, 2**20, 2**10)
    assert "4194304.0 GiB" in caught.value.message
