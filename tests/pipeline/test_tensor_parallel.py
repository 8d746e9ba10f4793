"""Every layout of stages and ranks gives the tokens of one rank (rows A10, B, C5, d13)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

import checkpoints
from depth import soaked
from hand_core import Wanted, small_core
from hf_reference import MIN_MARGIN
from margins import smallest_margin
from penstock.errors import StageLostError
from penstock.executor.inprocess import InprocessExecutor
from penstock.faults import parse
from penstock.pipeline.links.memory import MemoryLink
from rank_configs import make_rank_configs

PROMPTS = [[(7 * i + 3 * j) % 90 for j in range(5 + 11 * i)] for i in range(3)]
LAYOUTS = [(1,), (2,), (4,), (1, 1), (2, 2), (4, 4), (2, 2, 2), (2, 1), (1, 2), (4, 2), (1, 4, 2)]
MORE_LAYOUTS = [(1, 1, 1), (4, 4, 4), (1, 4), (4, 2, 1), (1, 2, 4)]


def outputs(model: Path, tp: tuple[int, ...], **changes: object) -> list[list[int]]:
    executor = InprocessExecutor(make_rank_configs(model, len(tp), tp=tp, **changes))
    executor.start()
    wanted = [Wanted(list(prompt), 12) for prompt in PROMPTS]
    small_core(len(tp), 0, 8).generate(executor, wanted)
    executor.shutdown()
    return [request.output for request in wanted]


@pytest.mark.parametrize("kernels", ["auto", *soaked("off")])
def test_a10_b1_d13_every_layout_gives_the_tokens_of_one_rank(tmp_path: Path, kernels: str) -> None:
    checkpoints.make_checkpoint(tmp_path, layers=3, vocab_size=150, seed=0)
    whole = outputs(tmp_path, (1,), kernels="off")
    assert smallest_margin(tmp_path, PROMPTS, whole) > MIN_MARGIN
    for tp in LAYOUTS:
        assert outputs(tmp_path, tp, kernels=kernels) == whole, tp


@pytest.mark.soak
@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a10_b1_d13_many_more_layouts_give_the_tokens_of_one_rank(
    tmp_path: Path, family: checkpoints.Family, tied: bool, kernels: str
) -> None:
    checkpoints.make_checkpoint(tmp_path, family=family, tied=tied, layers=3, vocab_size=150, seed=0)
    whole = outputs(tmp_path, (1,), kernels="off")
    assert smallest_margin(tmp_path, PROMPTS, whole) > MIN_MARGIN
    for tp in LAYOUTS + MORE_LAYOUTS:
        assert outputs(tmp_path, tp, kernels=kernels) == whole, tp


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_r2_a_rank_that_fails_lets_go_those_that_share_its_stage(tmp_path: Path, kernels: str) -> None:
    checkpoints.make_checkpoint(tmp_path, layers=2, vocab_size=150)
    configs = make_rank_configs(tmp_path, 2, tp=(4, 2), kernels=kernels)
    configs[1] = msgspec.structs.replace(configs[1], faults=parse("stage.forward@0:3=raise"))
    executor = InprocessExecutor(configs)
    executor.start()
    with pytest.raises(StageLostError, match="InjectedError") as lost:
        small_core(2, 0, 8).generate(executor, [Wanted(list(prompt), 12) for prompt in PROMPTS])
    assert lost.value.stage == 0
    executor.shutdown()


@pytest.mark.parametrize(
    ("tp", "share", "width"),
    [
        *[((2, 2), 2, 32), ((4, 4), 4, 32), ((2, 1), 1, 32), ((1, 2), 2, 32), ((4, 2), 2, 32)],
        *[((4, 4), 1, 34), ((2, 4), 1, 34)],  # which 4 ranks cannot share
    ],
    ids=str,
)
def test_c5_each_link_carries_a_receivers_part_of_the_hidden_states_or_all_that_have_no_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: tuple[int, ...], share: int, width: int
) -> None:
    sizes = {"hidden_size": width, "head_dim": 8}
    checkpoints.make_checkpoint(tmp_path, layers=3, vocab_size=150, seed=0, **sizes)
    sent: Counter[str] = Counter()
    send = MemoryLink.send_frame

    def counted(link: MemoryLink, header: Any, tensors: Sequence[Tensor], *more: Any) -> None:
        sent[link._name] += sum(tensor.nbytes for tensor in tensors)
        send(link, header, tensors, *more)

    monkeypatch.setattr(MemoryLink, "send_frame", counted)
    tokens = outputs(tmp_path, (1, 1))
    (whole,) = sent.values()
    sent.clear()
    assert outputs(tmp_path, tp) == tokens
    assert list(sent.values()) == [whole / share] * tp[1], "one link for each rank that receives"
