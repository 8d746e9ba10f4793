"""Decoded blocks are, bit for bit, what the published `gguf` package makes of the same bytes.

And types that only the package decodes: their sizes, their numbers, and a whole model of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoints import make_checkpoint
from gguf_models import as_gguf, random_blocks, random_package_blocks
from penstock import LLM, SamplingParams
from penstock.gguf.block_types import PACKAGE_TYPES, TYPES
from penstock.kernels.block_formats import BLOCK_FORMATS
from penstock.kernels.block_rows import dequantize
from penstock.weights.gguf_blocks import decode_rows
from penstock.weights.gguf_package import decode_floats

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


@pytest.mark.parametrize("name", PACKAGE_TYPES)
def test_what_the_package_decodes_has_its_sizes_and_gives_its_numbers(name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf")
    kind = gguf.GGMLQuantizationType[name]
    own = TYPES[int(kind)]
    assert (own.name, own.block_values, own.block_bytes) == (name, *gguf.GGML_QUANT_SIZES[kind])
    raw = random_package_blocks(name, 7, 1024, seed=5)
    found = decode_floats(name, torch.from_numpy(raw))
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy(), gguf.dequantize(raw, kind))
    assert 1e-4 < float(found.std()) < 1.0


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0", "MXFP4"])
def test_numbers_that_a_type_can_hold_come_back_as_they_were(name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf")
    signs = np.random.default_rng(6).integers(-1, 2, (5, 512)).astype(np.float32)
    raw = gguf.quantize(signs * np.float32(0.5), gguf.GGMLQuantizationType[name])
    assert np.array_equal(decode_floats(name, torch.from_numpy(raw)).numpy(), signs * np.float32(0.5))


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ1_M"])
def test_a_model_of_such_blocks_says_what_its_numbers_say(tmp_path: Path, name: str) -> None:
    pytest.importorskip("gguf", reason="needs gguf")
    checkpoint = make_checkpoint(
        tmp_path / "checkpoint", layers=2, hidden_size=256, intermediate_size=512, vocab_size=96
    )
    made = as_gguf(checkpoint, tmp_path / "gguf", lambda tensor: None if "norm" in tensor else name)

    def tokens(model: Path, *, dequantize: bool, num_stages: int) -> list[int]:
        with LLM(
            str(model),
            dtype="float32",
            gguf_dequantize=dequantize,
            pipeline_parallel_size=num_stages,
            num_blocks=32,
            distributed_executor_backend="inprocess",
        ) as llm:
            sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
            (output,) = llm.generate([{"prompt_token_ids": [1, 5, 9]}], sampling)
        return list(output.outputs[0].token_ids)

    expected = tokens(made.plain, dequantize=False, num_stages=1)
    assert tokens(made.path, dequantize=True, num_stages=2) == expected
