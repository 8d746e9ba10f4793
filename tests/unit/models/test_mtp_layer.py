"""The MTP layer against transformers', by torch and by our kernels, and what a model without it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepseek_models import make_with_mtp
from kernel_builds import built
from mtp_reference import MTPReference
from penstock.attention.metadata import AttentionMetadata
from penstock.families.registry import load_spec
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from penstock.models.decoder import Decoder
from penstock.models.mtp_layer import MTPLayer
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.loader import held_bytes, load_weights

PROMPT = torch.randint(0, 150, (21,), generator=torch.Generator().manual_seed(8)).tolist()
BLOCK = 4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["v3", "glm4_moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_with_mtp(tmp_path_factory.mktemp("mtp"), name=request.param)


def kernels(*, are_used: bool) -> CpuKernels | None:
    return CpuKernels(built(), frozenset(KERNEL_NAMES)) if are_used else None


def last_stage(directory: Path, *, with_mtp: bool, own_kernels: CpuKernels | None = None) -> Decoder:
    """The last layer and the head."""
    spec = load_spec(directory)
    stage = Decoder(
        spec,
        (spec.num_layers - 1, spec.num_layers),
        dtype=torch.float32,
        device="cpu",
        kernels=own_kernels,
        block_size=BLOCK,
        with_mtp=with_mtp,
    )
    load_weights(stage, Checkpoint(directory), lambda done, total: None)
    return stage


def metadata(start: int, end: int) -> AttentionMetadata:
    """Of one row, whose blocks lie in a row."""
    return AttentionMetadata(
        query_starts=[0, end - start],
        seq_lens=[end],
        block_tables=torch.arange(-(-end // BLOCK))[None],
        slot_mapping=torch.arange(start, end),
        num_decodes=int(end - start == 1),
        block_size=BLOCK,
    )


def guessed(stage: Decoder, states: Tensor, next_ids: list[int], cuts: list[int]) -> Tensor:
    """What the layer makes of all tokens, given to it in pieces."""
    kv = stage.attention.layer_kv(torch.zeros(8 * stage.attention.block_bytes(BLOCK), dtype=torch.uint8))
    parts = []
    for start, end in zip([0, *cuts], [*cuts, len(next_ids)], strict=True):
        ids, positions = torch.tensor(next_ids[start:end]), torch.arange(start, end)
        parts.append(stage.guess(states[start:end].clone(), ids, positions, kv, metadata(start, end)).clone())
    return torch.cat(parts)


@pytest.mark.parametrize("are_used", [True, False])
def test_states_equal_those_of_transformers(checkpoint: Path, are_used: bool) -> None:
    reference = MTPReference(checkpoint)
    states = reference.model_states(PROMPT)[:-1]
    expected = reference.states(states, PROMPT[1:])
    stage = last_stage(checkpoint, with_mtp=True, own_kernels=kernels(are_used=are_used))
    for cuts in ([], [7, 8, 9, 15]):
        with torch.inference_mode():
            found = guessed(stage, states, PROMPT[1:], cuts)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_without_it_nothing_of_it_is_held(checkpoint: Path) -> None:
    spec = load_spec(checkpoint)
    plain, more = (last_stage(checkpoint, with_mtp=with_mtp) for with_mtp in (False, True))
    layers = [layer for layer in more.layers if isinstance(layer, MTPLayer)]
    assert len(layers) == 1
    assert len(plain.layers) == spec.num_layers
    added = held_bytes(more) - held_bytes(plain)
    assert added == 4 * spec.mtp_parameters(with_embedding=True)


def test_other_stages_hold_nothing_of_it(checkpoint: Path) -> None:
    spec = load_spec(checkpoint)
    first = Decoder(spec, (0, 1), dtype=torch.float32, device="cpu", with_mtp=True)
    assert not any(isinstance(layer, MTPLayer) for layer in first.layers)
