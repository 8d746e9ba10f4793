"""Decoded blocks can be cut by rows and columns. (What they decode to: tests/doors.)"""

from __future__ import annotations

import pytest
import torch

from gguf_models import random_blocks
from penstock.distributed.share import Share
from penstock.kernels.block_formats import BLOCK_FORMATS
from penstock.kernels.block_rows import dequantize
from penstock.weights.gguf_blocks import decode_rows


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_cut_rows_and_columns_are_those_of_the_whole(name: str) -> None:
    block_format = BLOCK_FORMATS[name]
    rows = decode_rows(block_format, torch.from_numpy(random_blocks(block_format, 6, 1024, seed=4)), 1024)
    whole = dequantize(rows)
    columns = Share(start=256, end=768, whole=1024)
    assert torch.equal(dequantize(rows.cut(slice(1, 4), columns)), whole[1:4, 256:768])
    order = torch.tensor([5, 0, 3])
    assert torch.equal(dequantize(rows.cut(order, None)), whole[order])
