"""Tokens of a checkpoint in a layout of stages and ranks, by whole ranks in this process."""

from __future__ import annotations

from pathlib import Path

from hand_core import Wanted, small_core
from penstock.executor.inprocess import InprocessExecutor
from rank_configs import make_rank_configs

PROMPTS = [[(7 * i + 3 * j) % 150 for j in range(5 + 14 * i)] for i in range(3)]


def tokens(model: Path, tp: tuple[int, ...], **changes: object) -> list[list[int]]:
    """What the prompts become, eight tokens of a prompt at a time."""
    executor = InprocessExecutor(make_rank_configs(model, len(tp), tp=tp, **changes))
    executor.start()
    wanted = [Wanted(list(prompt), 12) for prompt in PROMPTS]
    small_core(len(tp), 0, 8).generate(executor, wanted)
    executor.shutdown()
    return [request.output for request in wanted]
