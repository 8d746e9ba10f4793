"""Quantised projections: every layout gives the written numbers exactly; what does not fit is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import checkpoints
from checkpoints import QuantizedLayout, make_quantized_checkpoint, write_weights
from penstock.errors import CheckpointError
from penstock.families.quantization_spec import ModulePattern, QuantizationSpec, WeightScheme
from penstock.families.registry import load_spec
from penstock.kernels.quantized_rows import dequantize
from penstock.weights import quantized_formats
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.quantized_formats import QuantizedCheckpoint

UP = "model.layers.0.mlp.up_proj"
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")

LAYOUTS: list[tuple[QuantizedLayout, int, int | None, bool]] = [
    ("gptq", 4, 16, True),
    ("gptq", 4, 16, False),
    ("gptq", 4, None, False),
    ("gptq", 8, 16, True),
    ("gptq", 8, 16, False),
    ("gptq_v2", 4, 16, False),
    ("gptq_v2", 8, None, True),
    ("awq", 4, 16, True),
    ("awq", 4, 16, False),
    ("awq", 4, None, False),
    ("packed", 4, 16, True),
    ("packed", 4, 16, False),
    ("packed", 4, None, False),
    ("packed", 8, 16, True),
    ("packed", 8, 16, False),
    ("int8", 8, None, True),
    ("int8", 8, None, False),
    ("int8", 8, 16, True),
]


def reader(directory: Path) -> QuantizedCheckpoint:
    spec = load_spec(directory).quantization
    assert spec is not None
    return QuantizedCheckpoint(Checkpoint(directory), spec)


def collected(found: QuantizedCheckpoint, projection: str, out_size: int, in_size: int) -> Tensor:
    """All rows of a projection dequantised, in float32; the pieces must follow each other."""
    pieces, row = [], 0
    for first, rows in found.rows(projection, out_size, in_size):
        assert first == row
        assert (rows.q.dtype, rows.q.is_contiguous()) == (torch.uint8, True)
        pieces.append(dequantize(rows, torch.float32))
        row += len(rows.q)
    assert row == out_size
    return torch.cat(pieces)


def collected_dense(
    found: QuantizedCheckpoint,
    projection: str,
    out_size: int,
    in_size: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    pieces = list(found.dense_rows(projection, out_size, in_size, dtype))
    assert pieces[0][0] == 0
    return torch.cat([rows for _, rows in pieces])


@pytest.mark.parametrize(("layout", "bits", "group_size", "symmetric"), LAYOUTS)
def test_rows_are_the_written_numbers(
    tmp_path: Path, layout: QuantizedLayout, bits: int, group_size: int | None, symmetric: bool
) -> None:
    expected = make_quantized_checkpoint(
        tmp_path, layout, bits=bits, group_size=group_size, symmetric=symmetric, layers=1, num_shards=2
    )
    found = reader(tmp_path)
    for part in PARTS:
        name = f"model.layers.0.{part}"
        weight = expected[f"{name}.weight"]
        assert found.holds(name)
        assert not found.is_dense(name, *weight.shape)
        assert torch.equal(collected(found, name, *weight.shape), weight)
        assert torch.equal(collected_dense(found, name, *weight.shape), weight)


@pytest.mark.parametrize(("layout", "bits", "group_size", "symmetric"), LAYOUTS)
def test_pieces_are_bounded_and_their_form_follows_from_the_scheme(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: QuantizedLayout,
    bits: int,
    group_size: int | None,
    symmetric: bool,
) -> None:
    monkeypatch.setattr(quantized_formats, "PIECE_VALUES", 1)
    expected = make_quantized_checkpoint(
        tmp_path,
        layout,
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        layers=1,
        intermediate_size=80,
    )
    found = reader(tmp_path)
    pieces = list(found.rows(UP, 80, 32))
    assert [first for first, _ in pieces] == [0, 32, 64]
    assert [len(rows.q) for _, rows in pieces] == [32, 32, 16]
    for _, rows in pieces:
        assert (rows.bits, rows.group_size) == (bits, group_size or 32)
        assert (rows.zeros is None) == symmetric
        assert rows.scales.shape == (len(rows.q), 32 // rows.group_size)
    assert torch.equal(collected(found, UP, 80, 32), expected[f"{UP}.weight"])
    assert torch.equal(collected_dense(found, UP, 80, 32), expected[f"{UP}.weight"])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    layout=st.sampled_from(["gptq", "gptq_v2", "awq", "packed", "int8"]),
    out_words=st.integers(1, 9),
    in_words=st.integers(1, 9),
    group_size=st.sampled_from([None, 8, 24, 32, 1024]),
    symmetric=st.booleans(),
    wide=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_size_comes_out_as_it_went_in(
    tmp_path_factory: pytest.TempPathFactory,
    layout: QuantizedLayout,
    out_words: int,
    in_words: int,
    group_size: int | None,
    symmetric: bool,
    wide: bool,
    seed: int,
) -> None:
    bits = 8 if layout == "int8" or (wide and layout != "awq") else 4
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(8 * out_words, 8 * in_words, generator=generator)
    written = checkpoints.quantize_at_random(
        weight, bits=bits, group_size=group_size, symmetric=symmetric, generator=generator
    )
    tensors = checkpoints.quantized_tensors(layout, written, symmetric=symmetric)
    found = of_tensors(tmp_path_factory.mktemp("any"), layout, bits, group_size, symmetric, tensors)
    assert torch.equal(collected(found, UP, *weight.shape), written.dequantized())
    assert torch.equal(collected_dense(found, UP, *weight.shape), written.dequantized())


def of_tensors(
    directory: Path,
    layout: QuantizedLayout,
    bits: int,
    group_size: int | None,
    symmetric: bool,
    tensors: dict[str, Tensor],
) -> QuantizedCheckpoint:
    """One projection, of these tensors."""
    write_weights(directory, {f"{UP}.{part}": tensor for part, tensor in tensors.items()})
    scheme = WeightScheme(
        layout="gptq" if layout == "gptq_v2" else layout,
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        zero_offset=int(layout == "gptq"),
    )
    return QuantizedCheckpoint(Checkpoint(directory), QuantizationSpec(method="gptq", schemes=(scheme,)))


def parts(
    layout: QuantizedLayout, *, bits: int = 4, symmetric: bool = True, **options: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """(tensors of a projection of [32, 64] in groups of 16, the same dequantised)."""
    generator = torch.Generator().manual_seed(1)
    written = checkpoints.quantize_at_random(
        torch.randn(32, 64, generator=generator),
        bits=bits,
        group_size=16,
        symmetric=symmetric,
        generator=generator,
        **options,
    )
    scattered = bool(options.get("scatter", False))
    tensors = checkpoints.quantized_tensors(layout, written, symmetric=symmetric, scattered=scattered)
    return tensors, written.dequantized()


# --- Order of activations ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["gptq", "packed"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_scattered_groups_are_held_dequantised(
    tmp_path: Path, layout: QuantizedLayout, symmetric: bool
) -> None:
    expected = make_quantized_checkpoint(tmp_path, layout, symmetric=symmetric, scatter=True, layers=1)
    found = reader(tmp_path)
    assert found.holds(UP)
    assert found.is_dense(UP, 48, 32)
    weight = expected[f"{UP}.weight"]
    assert torch.equal(collected_dense(found, UP, 48, 32), weight)
    assert torch.equal(collected_dense(found, UP, 48, 32, torch.bfloat16), weight.to(torch.bfloat16))


@pytest.mark.parametrize(("layout", "name"), [("gptq", "g_idx"), ("packed", "weight_g_idx")])
@pytest.mark.parametrize("unset", [0, -1])
def test_a_group_index_that_was_never_set_is_the_usual_order(
    tmp_path: Path, layout: QuantizedLayout, name: str, unset: int
) -> None:
    tensors, expected = parts(layout)
    tensors[name] = torch.full((64,), unset, dtype=torch.int32)
    found = of_tensors(tmp_path, layout, 4, 16, True, tensors)
    assert not found.is_dense(UP, 32, 64)
    assert torch.equal(collected(found, UP, 32, 64), expected)


def test_a_group_index_may_be_absent(tmp_path: Path) -> None:
    tensors, expected = parts("gptq")
    del tensors["g_idx"]
    assert torch.equal(collected(of_tensors(tmp_path, "gptq", 4, 16, True, tensors), UP, 32, 64), expected)


@pytest.mark.parametrize("bad", [-2, 4])
def test_a_group_that_does_not_exist_is_refused(tmp_path: Path, bad: int) -> None:
    tensors, _ = parts("gptq")
    tensors["g_idx"][7] = bad
    found = of_tensors(tmp_path, "gptq", 4, 16, True, tensors)
    with pytest.raises(CheckpointError, match=r"up_proj\.g_idx: expected groups from 0 to 3, found"):
        found.is_dense(UP, 32, 64)


def test_groups_that_the_kernels_do_not_take_are_held_dequantised(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    written = checkpoints.quantize_at_random(
        torch.randn(16, 40, generator=generator), bits=4, group_size=12, symmetric=False, generator=generator
    )
    tensors = checkpoints.quantized_tensors("gptq", written, symmetric=False)
    found = of_tensors(tmp_path, "gptq", 4, 12, False, tensors)
    assert found.is_dense(UP, 16, 40)
    assert torch.equal(collected_dense(found, UP, 16, 40), written.dequantized())


# --- Zero points ---------------------------------------------------------------------------------------


def test_signed_zero_points_that_are_not_packed(tmp_path: Path) -> None:
    """Of the first versions of compressed-tensors."""
    generator = torch.Generator().manual_seed(3)
    written = checkpoints.quantize_at_random(
        torch.randn(32, 64, generator=generator), bits=4, group_size=16, symmetric=False, generator=generator
    )
    tensors = checkpoints.quantized_tensors("packed", written, symmetric=False)
    tensors["weight_zero_point"] = (written.zeros - 8).to(torch.int8)
    found = of_tensors(tmp_path, "packed", 4, 16, False, tensors)
    assert torch.equal(collected(found, UP, 32, 64), written.dequantized())


@pytest.mark.parametrize(("layout", "bits"), [("packed", 4), ("int8", 8)])
def test_zero_points_that_are_all_zero_may_be_left_out(
    tmp_path: Path, layout: QuantizedLayout, bits: int
) -> None:
    tensors, expected = parts(layout, bits=bits)
    assert "weight_zero_point" not in tensors
    found = of_tensors(tmp_path, layout, bits, 16, False, tensors)
    assert torch.equal(collected(found, UP, 32, 64), expected)
    assert all(rows.zeros is not None for _, rows in found.rows(UP, 32, 64))


def test_a_symmetric_scheme_needs_no_zeros_and_refuses_others(tmp_path: Path) -> None:
    tensors, expected = parts("awq")
    (tmp_path / "without").mkdir()
    without = {name: tensor for name, tensor in tensors.items() if name != "qzeros"}
    found = of_tensors(tmp_path / "without", "awq", 4, 16, True, without)
    assert torch.equal(collected(found, UP, 32, 64), expected)
    tensors["qzeros"] = tensors["qzeros"] ^ 1
    found = of_tensors(tmp_path, "awq", 4, 16, True, tensors)
    with pytest.raises(CheckpointError, match=r"qzeros: expected zero points of 8, .* found 8 to 9"):
        list(found.rows(UP, 32, 64))


# --- What does not fit ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("gptq", "qweight"),
        ("gptq", "qzeros"),
        ("gptq", "scales"),
        ("gptq", "g_idx"),
        ("awq", "qweight"),
        ("awq", "qzeros"),
        ("awq", "scales"),
        ("packed", "weight_packed"),
        ("packed", "weight_scale"),
        ("packed", "weight_zero_point"),
        ("packed", "weight_shape"),
        ("int8", "weight"),
        ("int8", "weight_scale"),
        ("int8", "weight_zero_point"),
    ],
)
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda tensor: torch.cat([tensor, tensor[:1]]), "expected shape .* by config.json .*found"),
        (lambda tensor: tensor.to(torch.float64), "expected a dtype of .*, found F64"),
        (lambda tensor: tensor.unsqueeze(0), "expected shape .* by config.json .*found"),
    ],
    ids=["longer", "dtype", "dimension"],
)
def test_a_tensor_of_another_form_is_refused_before_it_is_read(
    tmp_path: Path, layout: QuantizedLayout, name: str, damage: Callable[[Tensor], Tensor], told: str
) -> None:
    bits = 8 if layout == "int8" else 4
    tensors, _ = parts(layout, bits=bits, symmetric=False)
    tensors[name] = damage(tensors[name])
    found = of_tensors(tmp_path, layout, bits, 16, False, tensors)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {UP}\.{name}: {told}") as caught:
        found.is_dense(UP, 32, 64)
    assert caught.value.remedy


@pytest.mark.parametrize("layout", ["gptq", "awq", "packed", "int8"])
@pytest.mark.parametrize("sizes", [(32, 128), (64, 64), (24, 64), (32, 8)])
def test_another_size_than_that_of_config_json_is_refused(
    tmp_path: Path, layout: QuantizedLayout, sizes: tuple[int, int]
) -> None:
    bits = 8 if layout == "int8" else 4
    tensors, _ = parts(layout, bits=bits)
    found = of_tensors(tmp_path, layout, bits, 16, True, tensors)
    for read in (found.is_dense, lambda *words: list(found.dense_rows(*words, torch.float32))):
        with pytest.raises(CheckpointError, match=r"by config\.json"):
            read(UP, *sizes)


def test_the_shape_that_a_packed_tensor_tells_counts_too(tmp_path: Path) -> None:
    tensors, _ = parts("packed")
    tensors["weight_shape"] = torch.tensor([32, 60])
    found = of_tensors(tmp_path, "packed", 4, 16, True, tensors)
    with pytest.raises(CheckpointError, match=r"weight_shape: expected \[32, 64\] .* found \[32, 60\]"):
        list(found.rows(UP, 32, 64))


@pytest.mark.parametrize(("layout", "name"), [("gptq", "scales"), ("packed", "weight_scale")])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -0.5])
def test_a_bad_scale_is_refused_with_its_place(
    tmp_path: Path, layout: QuantizedLayout, name: str, bad: float
) -> None:
    tensors, _ = parts(layout)
    tensors[name].view(-1)[5] = bad
    found = of_tensors(tmp_path, layout, 4, 16, True, tensors)
    with pytest.raises(CheckpointError, match=rf"{name}: expected finite scales above zero, found .* 5\."):
        list(found.rows(UP, 32, 64))


def test_numbers_beyond_float16_are_refused(tmp_path: Path) -> None:
    tensors, expected = parts("packed", scale_dtype=torch.float32)
    tensors["weight_scale"] = tensors["weight_scale"] * 1e6
    found = of_tensors(tmp_path, "packed", 4, 16, True, tensors)
    with pytest.raises(CheckpointError, match="within the range of float16"):
        collected_dense(found, UP, 32, 64, torch.float16)
    assert torch.allclose(collected_dense(found, UP, 32, 64), expected * 1e6)


@pytest.mark.parametrize("layout", ["gptq", "awq", "packed", "int8"])
def test_a_missing_part_is_named(tmp_path: Path, layout: QuantizedLayout) -> None:
    bits = 8 if layout == "int8" else 4
    tensors, _ = parts(layout, bits=bits, symmetric=False)
    optional = {"g_idx", "weight_shape", "weight_zero_point"}
    mark = {"gptq": "qweight", "awq": "qweight", "packed": "weight_packed", "int8": "weight_scale"}[layout]
    for missing in tensors.keys() - optional - {mark}:
        directory = tmp_path / missing
        directory.mkdir()
        rest = {name: tensor for name, tensor in tensors.items() if name != missing}
        found = of_tensors(directory, layout, bits, 16, False, rest)
        assert found.holds(UP)
        with pytest.raises(CheckpointError, match=rf"{missing}: expected this tensor, found no such name"):
            list(found.rows(UP, 32, 64))


def test_a_file_that_shrinks_meanwhile_is_refused(tmp_path: Path) -> None:
    tensors, _ = parts("gptq")
    found = of_tensors(tmp_path, "gptq", 4, 16, True, tensors)
    rows = found.rows(UP, 32, 64)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(CheckpointError, match="the end of the file after"):
        list(rows)


# --- Which projections, which names, how many bytes ----------------------------------------------------


def test_what_is_not_quantised_is_not_held(tmp_path: Path) -> None:
    make_quantized_checkpoint(tmp_path, "packed", layers=1)
    found = reader(tmp_path)
    assert not found.holds("lm_head")
    assert not found.holds("model.embed_tokens")
    assert not found.holds("model.layers.7.mlp.up_proj")


def test_an_ignored_projection_that_is_quantised_is_a_contradiction(tmp_path: Path) -> None:
    tensors, _ = parts("packed")
    of_tensors(tmp_path, "packed", 4, 16, True, tensors)
    scheme = WeightScheme(layout="packed", bits=4, group_size=16, symmetric=True)
    ignore = (ModulePattern("re:.*up_proj"),)
    spec = QuantizationSpec(method="compressed-tensors", schemes=(scheme,), ignore=ignore)
    with pytest.raises(CheckpointError, match=r"weight_packed: expected no such tensor .* found I32 of"):
        QuantizedCheckpoint(Checkpoint(tmp_path), spec).holds(UP)


@pytest.mark.parametrize("layout", ["gptq", "awq", "packed", "int8"])
def test_all_names_and_bytes_are_accounted_for(tmp_path: Path, layout: QuantizedLayout) -> None:
    bits = 8 if layout == "int8" else 4
    tensors, _ = parts(layout, bits=bits, symmetric=False)
    tensors["bias"] = torch.ones(32)
    found = of_tensors(tmp_path, layout, bits, 16, False, tensors)
    expected = {f"{UP}.{name}" for name in tensors if name != "bias"}
    assert set(found.tensor_names(UP)) == expected
    assert found.num_bytes(UP) == sum(t.nbytes for name, t in tensors.items() if name != "bias")


def test_a_bias_of_zeros_belongs_to_the_projection(tmp_path: Path) -> None:
    tensors, _ = parts("gptq")
    found = of_tensors(tmp_path, "gptq", 4, 16, True, tensors | {"bias": torch.zeros(32)})
    assert f"{UP}.bias" in found.tensor_names(UP)
    assert found.num_bytes(UP) == sum(tensor.nbytes for tensor in tensors.values())


def test_the_plain_twin_holds_the_same_numbers(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    expected = make_quantized_checkpoint(tmp_path / "awq", "awq", family="qwen2", layers=1, plain=plain)
    assert load_spec(plain).quantization is None
    tensors = load_file(plain / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    stored = load_file(tmp_path / "awq" / "model.safetensors")
    assert stored[f"{UP}.qweight"].dtype == torch.int32, "safetensors reads what the helper writes"
