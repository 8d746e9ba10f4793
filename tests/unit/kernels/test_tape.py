"""Recorded calls: what they share, and that replaying them is calling them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kernel_builds import built
from penstock.kernels.cpu.abi import Step
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import DTYPES, CpuKernels
from penstock.kernels.cpu.tape import Tape, step_memory
from penstock.layers.matrix import GATE, PLAIN, UP, Matrix, PackedMatrix, QuantizedFormat, QuantizedMatrix

HIDDEN, INNER, HEAD_DIM = 40, 72, 8
MAX_TOKENS = 40
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


@pytest.fixture
def kernels() -> CpuKernels:
    return CpuKernels(built(), frozenset(KERNEL_NAMES))


def filled(matrix: Matrix, seed: int) -> Matrix:
    rows = (
        torch.randn(matrix.out_size, matrix.in_size, generator=torch.Generator().manual_seed(seed))
        / matrix.in_size**0.5
    )
    for role, part in zip(
        (GATE, UP) if matrix.gated else (PLAIN,), rows.chunk(1 + matrix.gated), strict=True
    ):
        matrix.put(0, part.to(matrix.dtype), role)
    return matrix


@dataclass
class Layers:
    """Norms and products in a row, each layer with weights of its own; the second is not quantised."""

    kernels: CpuKernels
    dtype: torch.dtype
    layers: list[tuple[Tensor, Matrix, Matrix]] = field(init=False)

    def __post_init__(self) -> None:
        form = QuantizedFormat(bits=8, group_size=INNER, scale_dtype=torch.bfloat16, has_zeros=False)
        self.layers = []
        for seed in range(3):
            norm = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed)).to(self.dtype)
            inner = PackedMatrix(2 * INNER, HIDDEN, self.dtype, self.kernels, gated=True)
            outer: Matrix = PackedMatrix(HIDDEN, INNER, self.dtype, self.kernels)
            if seed != 1:
                outer = QuantizedMatrix(HIDDEN, INNER, self.dtype, form, self.kernels)
            self.layers.append((norm, filled(inner, seed), filled(outer, seed)))

    def run(self, x: Tensor, residual: Tensor, start_layer: Callable[[], None] = lambda: None) -> Tensor:
        """The last branch; `residual` is added to in place."""
        for norm, inner, outer in self.layers:
            start_layer()
            x = outer.multiply(inner.multiply(self.kernels.add_rms_norm(x, residual, norm, 1e-6), None), None)
        return x


@dataclass
class Recorded:
    """The same layers on a tape."""

    layers: Layers

    def __post_init__(self) -> None:
        self.tape = Tape(MAX_TOKENS)
        self.x, self.residual = (step_memory(MAX_TOKENS, HIDDEN, self.layers.dtype) for _ in range(2))
        with self.layers.kernels.recording(self.tape):
            self.output = self.layers.run(self.x, self.residual, self.tape.start_layer)

    def run(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        num_tokens = len(x)
        self.x[:num_tokens], self.residual[:num_tokens] = x, residual
        self.tape.replay(Step(num_tokens=num_tokens))
        return self.output[:num_tokens], self.residual[:num_tokens]


@EACH_DTYPE
def test_a_replay_equals_the_calls_for_any_number_of_tokens(kernels: CpuKernels, dtype: torch.dtype) -> None:
    layers = Layers(kernels, dtype)
    recorded = Recorded(layers)
    recorded.tape.finish(kernels.library)
    torch.manual_seed(0)
    for num_tokens in (1, MAX_TOKENS, 5, 0, 33, 1):
        x, residual = (torch.randn(num_tokens, HIDDEN).to(dtype) for _ in range(2))
        stream = residual.clone()
        expected = layers.run(x, stream)
        found, found_stream = recorded.run(x, residual)
        assert torch.equal(found, expected)
        assert torch.equal(found_stream, stream)


def test_a_replay_writes_no_rows_but_the_steps(kernels: CpuKernels) -> None:
    recorded = Recorded(Layers(kernels, torch.float32))
    recorded.tape.finish(kernels.library)
    recorded.residual[7:] = recorded.output[7:] = 3.0
    recorded.run(torch.ones(7, HIDDEN), torch.ones(7, HIDDEN))
    assert recorded.output[:7].any(dim=1).all()
    assert (recorded.output[7:] == 3).all()
    assert (recorded.residual[7:] == 3).all()


def test_what_is_recorded_is_not_run(kernels: CpuKernels) -> None:
    recorded = Recorded(Layers(kernels, torch.float32))
    assert not recorded.output.any()
    with pytest.raises(AssertionError, match="still being recorded"):
        recorded.tape.replay(Step(num_tokens=1))


def test_after_a_failed_recording_calls_run_again(kernels: CpuKernels) -> None:
    with pytest.raises(ZeroDivisionError), kernels.recording(Tape(4)):
        _ = 1 / 0
    one = torch.ones(1, 4)
    assert torch.equal(kernels.add_rms_norm(one, torch.zeros(1, 4), torch.ones(4), 0.0), one)


@EACH_DTYPE
def test_a_norm_of_selected_rows_is_that_of_all_rows(kernels: CpuKernels, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((9, 40), (9, 40), (40,)))
    expected = kernels.add_rms_norm(x, residual.clone(), weight, 1e-6)
    selected = torch.tensor([0, 3, 4, 8])
    assert torch.equal(kernels.add_rms_norm(x, residual.clone(), weight, 1e-6, selected), expected[selected])
    tape = Tape(9)
    with kernels.recording(tape):
        y = kernels.add_rms_norm(x, residual, weight, 1e-6, selected)
    tape.finish(kernels.library)
    tape.replay(Step(num_tokens=2, selected=selected[1:].data_ptr()))
    assert torch.equal(y[:2], expected[selected[1:3]])
    assert not y[2:].any()


@EACH_DTYPE
def test_zeros_are_written_for_the_tokens_of_the_step_only(kernels: CpuKernels, dtype: torch.dtype) -> None:
    tape, rows = Tape(5), torch.zeros(5, dtype=torch.int64)
    with kernels.recording(tape):
        y = kernels.zeros(rows, 7, dtype)
    tape.finish(kernels.library)
    y.fill_(3)
    tape.replay(Step(num_tokens=2))
    assert not y[:2].any()
    assert (y[2:] == 3).all()
    assert torch.equal(kernels.zeros(rows[:3], 7, dtype), torch.zeros(3, 7, dtype=dtype))


def test_the_step_brings_the_positions(kernels: CpuKernels) -> None:
    frequencies = torch.rand(HEAD_DIM // 2, generator=torch.Generator().manual_seed(1))
    tape = Tape(4)
    with kernels.recording(tape):
        anywhere = torch.zeros(4, dtype=torch.int64)
        angles = kernels.rope_angles(anywhere, frequencies, 1.5, HEAD_DIM, torch.float32)
    tape.finish(kernels.library)
    for numbers in ([3], [0, 1000, 7, 9], [5, 6]):
        positions = torch.tensor(numbers)
        tape.replay(Step(num_tokens=len(numbers), positions=positions.data_ptr()))
        expected = kernels.rope_angles(positions, frequencies, 1.5, HEAD_DIM, torch.float32)
        assert torch.equal(angles[: len(numbers)], expected)


def test_the_same_output_of_each_layer_is_the_same_memory() -> None:
    tape, layers = Tape(4), []
    for _ in range(3):
        tape.start_layer()
        layers.append([tape.output(6, torch.float32), tape.output(6, torch.float32)])
    for first, second in layers:
        assert first is layers[0][0]
        assert second is layers[0][1]
    ours, others = (output.untyped_storage().data_ptr() for output in layers[0])
    assert ours != others
    assert layers[0][0].shape == (4, 6)


def test_layers_that_differ_share_what_they_have_in_common() -> None:
    tape = Tape(4)
    tape.start_layer()
    first, second = tape.output(6, torch.float32), tape.output(6, torch.float32)
    tape.start_layer()
    assert tape.output(6, torch.float32) is first
    others = tape.output(5, torch.float32), tape.output(6, torch.bfloat16)
    assert tape.output(6, torch.float32) is second
    outputs = (first, second, *others)
    assert [tuple(output.shape) for output in outputs] == [(4, 6), (4, 6), (4, 5), (4, 6)]
    assert others[1].dtype == torch.bfloat16
    assert len({output.untyped_storage().data_ptr() for output in outputs}) == 4


@EACH_DTYPE
def test_memory_of_a_step_starts_at_a_page_and_at_zero(dtype: torch.dtype) -> None:
    memory = step_memory(3, 5, dtype)
    assert (memory.shape, memory.dtype) == ((3, 5), dtype)
    assert memory.data_ptr() % 4096 == 0
    assert not memory.any()
