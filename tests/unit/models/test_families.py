"""Every family against transformers (row A18), by torch and by our kernels; and against itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from depth import soaked
from families import COMPARED, FAMILIES, IN_CI, names
from head_requests import request as head_request
from hf_reference import MIN_MARGIN, reference
from kernel_builds import built
from penstock.distributed.group import MemoryGroup
from penstock.distributed.share import vocab_share
from penstock.families.registry import load_spec
from penstock.families.sharding import require_shardable
from penstock.families.spec import ModelSpec
from penstock.kernels.candidates import head_output_of
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from penstock.models.decoder import Decoder
from penstock.models.intermediate import IntermediateTensors
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.loader import load_weights
from stage_driver import StageDriver

PROMPT = torch.randint(0, 150, (40,), generator=torch.Generator().manual_seed(5)).tolist()
NUM_TOKENS = 24
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=names(IN_CI))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param].make(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module", params=names(COMPARED))
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param].make(tmp_path_factory.mktemp("compared"))


def kernels(*switched_off: str) -> CpuKernels:
    return CpuKernels(built(), frozenset(KERNEL_NAMES) - set(switched_off))


@torch.no_grad()
def expected(directory: Path) -> tuple[list[int], Tensor]:
    """The prompt and the greedy tokens after it, and the logits of every position."""
    model, ids = reference(directory), list(PROMPT)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids, model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("with_kernels", [True, *soaked(False)])
def test_a18_logits_and_greedy_tokens_of_every_family(compared: Path, with_kernels: bool) -> None:
    """The prompt is longer than any window; steps of one token, of a few, and the whole prompt at once."""
    own_kernels = kernels() if with_kernels else None
    ids, logits = expected(compared)
    top = logits[len(PROMPT) - 1 : -1].topk(2).values
    assert (top[:, 0] - top[:, 1]).min() > MIN_MARGIN
    assert len(set(ids[len(PROMPT) :])) > 5
    driver = StageDriver(compared, (1,), kernels=own_kernels)
    assert driver.greedy(0, PROMPT, NUM_TOKENS, chunk=9) == ids[len(PROMPT) :]
    for chunk in (7, 64):
        found = StageDriver(compared, (1,), kernels=own_kernels).prefill(0, ids, chunk)
        torch.testing.assert_close(found, logits, atol=1e-4, rtol=0)


def test_a18_bfloat16_rounds_where_transformers_rounds(checkpoint: Path) -> None:
    """Both are some way from the exact logits; ours by torch may be no further, with some slack."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        theirs = model(torch.tensor([PROMPT])).logits[0].float()
        exact = reference(checkpoint)(torch.tensor([PROMPT])).logits[0]
    for own_kernels in (None, kernels()):
        ours = StageDriver(checkpoint, (1,), dtype=torch.bfloat16, kernels=own_kernels).prefill(0, PROMPT, 16)
        assert (ours - exact).square().mean() < 1.5 * (theirs - exact).square().mean()


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_decodes_company_and_stages_do_not_change_a_bit(checkpoint: Path, dtype: torch.dtype) -> None:
    together = StageDriver(checkpoint, (1,), dtype=dtype, kernels=kernels())
    whole = together.prefill(0, PROMPT, len(PROMPT))
    assert torch.equal(together.prefill(1, PROMPT, 7), whole)
    in_company = []
    for token in PROMPT:
        in_company.append(together.step({2: [token], 3: PROMPT[::-1][:5], 4: PROMPT[:11]})[0])
        together.lengths[3] = together.lengths[4] = 0
    assert torch.equal(torch.stack(in_company), whole)
    cut = StageDriver(checkpoint, (1, 2), dtype=dtype, kernels=kernels())
    assert torch.equal(cut.prefill(0, PROMPT, 16), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recorded_forward_is_the_forward_of_every_family(checkpoint: Path, dtype: torch.dtype) -> None:
    eager, recorded = (StageDriver(checkpoint, (1,), dtype=dtype, kernels=kernels()) for _ in range(2))
    for stage, kv in zip(recorded.stages, recorded.kv, strict=True):
        stage.record(kv, 64)
        assert stage._recorded is not None
    decodes = {0: PROMPT[31:32], 1: PROMPT[7:8], 2: PROMPT[:1]}
    for step in ({0: PROMPT[:30]}, {0: PROMPT[30:31], 1: PROMPT[:7]}, decodes, {1: PROMPT[8:]}):
        assert torch.equal(recorded.step(step), eager.step(step))


def test_a_step_without_tokens_is_nothing(checkpoint: Path) -> None:
    """Such a step asks whether all stages are well."""
    for own_kernels in (None, kernels()):
        driver = StageDriver(checkpoint, (1,), kernels=own_kernels)
        assert driver.step({}).shape == (0, 150)


def test_any_kernel_of_any_family_can_be_switched_off(checkpoint: Path) -> None:
    by_torch = StageDriver(checkpoint, (1,)).prefill(0, PROMPT, 16)
    for name in KERNEL_NAMES:
        driver = StageDriver(checkpoint, (1,), kernels=kernels(name))
        for stage, kv in zip(driver.stages, driver.kv, strict=True):
            stage.record(kv, 64)
        torch.testing.assert_close(driver.prefill(0, PROMPT, 16), by_torch, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_s5_a4_a12_every_rank_holds_and_reads_what_the_spec_counts(checkpoint: Path, size: int) -> None:
    """Of layers the ranks of a stage have equally much; of the vocabulary blocks."""
    spec = load_spec(checkpoint)
    require_shardable(spec, size)
    groups = [MemoryGroup(rank, size, name="stage 0", timeout_s=1.0) for rank in range(size)]
    for cuts in ((), (1, 2)):
        ranks = [StageDriver(checkpoint, cuts, group=group) for group in groups]
        for stages in zip(*(rank.stages for rank in ranks), strict=True):
            counts = spec.parameter_counts(stages[0].start_layer, stages[0].end_layer)
            tables, rest = divmod(counts["embedding"] + counts["head"], spec.embedding_parameters())
            assert rest == 0
            layers = counts["layers"] + counts["norm"] + held_again(stages[0], spec, size)
            for rank, stage in enumerate(stages):
                held = sum(parameter.numel() for parameter in stage.parameters())
                ids = vocab_share(spec.vocab_size, rank, size).size
                assert held * size == layers + tables * ids * spec.hidden_size * size
                read = load_weights(stage, Checkpoint(checkpoint), lambda done, total: None)
                assert read.bytes_read == read.tensor_bytes == 4 * held


def held_again(stage: Decoder, spec: ModelSpec, size: int) -> int:
    """Parameters that ranks have beyond one copy: norms but those over all heads, biases, and heads of
    keys and values where there are fewer than ranks."""
    more, copies = 0, max(1, size // spec.num_kv_heads) - 1
    for name, parameter in stage.named_parameters():
        if "qkv_proj" in name:
            inputs = spec.hidden_size if name.endswith("weight") else 1
            more += 2 * copies * spec.kv_size * inputs
        elif spec.qk_norm == "all_heads" and "k_norm" in name:
            more += copies * spec.kv_size
        elif spec.qk_norm == "all_heads" and "q_norm" in name:
            pass  # of its heads alone
        elif "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")):
            more += (size - 1) * parameter.numel()
    return more


@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_candidates_are_those_of_the_logits_that_the_family_gives(
    checkpoint: Path, dtype: torch.dtype, with_kernels: bool
) -> None:
    driver = StageDriver(checkpoint, (2,), dtype=dtype, kernels=kernels() if with_kernels else None)

    def tensors() -> IntermediateTensors:  # anew, for they are used up
        generator = torch.Generator().manual_seed(0)
        noise = {name: torch.randn((5, 32), generator=generator) for name in ("hidden_states", "residual")}
        return IntermediateTensors({name: tensor.to(dtype) for name, tensor in noise.items()})

    wanted, rows, last = head_request([4] * 5, wants=[1, 3]), torch.arange(5), driver.stages[-1]
    found = last.compute_candidates(tensors(), rows, wanted)
    answer = head_output_of(last.compute_logits(tensors(), rows), wanted)
    tolerance = {"atol": 1e-5 if dtype == torch.float32 else 0.02, "rtol": 1e-2}  # the kernel rounds nothing
    np.testing.assert_allclose(found.candidates.values, answer.candidates.values, **tolerance)
    torch.testing.assert_close(found.logits, answer.logits, **tolerance)
    if dtype == torch.float32:
        np.testing.assert_array_equal(found.candidates.ids, answer.candidates.ids)
