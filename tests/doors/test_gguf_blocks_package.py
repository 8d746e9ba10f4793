"""Decoded blocks are, bit for bit, what the published `gguf` package makes of the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gguf_models import random_blocks
from penstock.kernels.block_formats import BLOCK_FORMATS
from penstock.kernels.block_rows import dequantize
from penstock.weights.gguf_blocks import decode_rows

pytestmark = pytest.mark.doors


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_every_format_is_decoded_as_the_package_decodes_it(name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf")
    block_format, kind = BLOCK_FORMATS[name], gguf.GGMLQuantizationType[name]
    assert (int(kind), *gguf.GGML_QUANT_SIZES[kind]) == (
        block_format.number,
        block_format.inputs,
        block_format.block_bytes,
    )
    raw = random_blocks(block_format, 37, 1024, seed=3)
    found = dequantize(decode_rows(block_format, torch.from_numpy(raw), 1024))
    assert np.array_equal(found.numpy(), gguf.dequantize(raw, kind))
