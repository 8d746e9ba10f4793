"""How far apart the likeliest two tokens of a greedy run are; below some gap rounding may choose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stage_driver import StageDriver


def smallest_margin(model: Path, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> float:
    """Of all tokens of the outputs, each after the prompt of its place; by one stage and by torch.

    Raises:
        AssertionError: a token is not the likeliest.
    """
    margins = []
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = StageDriver(model).prefill(0, [*prompt, *output[:-1]], 64)[len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == list(output)
        top = logits.topk(2).values
        margins.append(float((top[:, 0] - top[:, 1]).min()))
    return min(margins)
