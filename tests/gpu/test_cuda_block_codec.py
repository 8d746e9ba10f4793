"""Blocks out of a device's memory and back. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from penstock.attention.backend import AttentionBackend
from penstock.attention.latent_paged import LatentPagedAttention
from penstock.attention.torch_paged import TorchPagedAttention
from penstock.families.latent_spec import LatentSpec
from penstock.kernels.cpu.ops import HeadShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

NUM_BLOCKS, BLOCK = 4, 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "latent"])
def test_d15_bytes_are_the_same_from_a_device_and_from_the_host(kind: str, dtype: torch.dtype) -> None:
    backend: AttentionBackend
    if kind == "plain":
        backend = TorchPagedAttention(HeadShape(num_heads=4, num_kv_heads=2, head_dim=20), dtype)
    else:
        latent = LatentSpec(rank=10, query_rank=0, plain_dim=6, rotary_dim=4, value_dim=5)
        backend = LatentPagedAttention(3, latent, dtype)
    size = NUM_BLOCKS * backend.block_bytes(BLOCK)
    memory = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    on_device = memory.cuda()
    host, device, codec = backend.layer_kv(memory), backend.layer_kv(on_device), backend.block_codec(BLOCK)
    found = [codec.export_blocks([(device, block)]) for block in range(NUM_BLOCKS)]
    assert found == [codec.export_blocks([(host, block)]) for block in range(NUM_BLOCKS)]
    on_device.zero_()
    for block in range(NUM_BLOCKS):
        codec.import_blocks([(device, block)], found[block])
    assert torch.equal(on_device.cpu(), memory)
