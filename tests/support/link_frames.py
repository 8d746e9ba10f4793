"""Frames that tests send over a link: their headers, tensors drawn by the step, and where to receive them."""

from __future__ import annotations

from dataclasses import replace

import torch

from carriers import WIDTH
from penstock.pipeline.links.frame import FrameHeader, FrameKind


def header(step_id: int = 0, num_tokens: int = 3, dtype: str = "float32", **changes: object) -> FrameHeader:
    made = FrameHeader(
        epoch=0,
        step_id=step_id,
        kind=FrameKind.HIDDEN,
        num_tokens=num_tokens,
        width=WIDTH,
        dtype=dtype,
        num_tensors=2,
        digest=5,
    )
    return replace(made, **changes)


def tensors(step_id: int, num_tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step_id)
    return [torch.randn(num_tokens, WIDTH, generator=generator).to(dtype) for _ in range(2)]


def blank(num_tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.full((num_tokens, WIDTH), 99.0, dtype=dtype) for _ in range(2)]
