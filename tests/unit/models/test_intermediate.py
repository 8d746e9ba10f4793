from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from penstock.errors import UnsupportedModelError
from penstock.models.decoder import Decoder
from penstock.models.interfaces import require_pp, supports_pp
from penstock.models.intermediate import IntermediateTensors, make_empty_intermediate_tensors_factory


def make() -> IntermediateTensors:
    return IntermediateTensors(
        {"hidden_states": torch.arange(12.0).view(4, 3), "residual": -torch.arange(12.0).view(4, 3)}
    )


def test_a8_a_string_selects_a_tensor() -> None:
    tensors = make()
    assert tensors["residual"] is tensors.tensors["residual"]


def test_a8_a_slice_selects_tokens_and_keeps_the_names() -> None:
    part = make()[1:3]
    assert [name for name, _ in part.items()] == ["hidden_states", "residual"]
    assert torch.equal(part["hidden_states"], torch.arange(3.0, 9.0).view(2, 3))
    assert torch.equal(part["residual"], -part["hidden_states"])


def test_a8_set_replaces_one_tensor() -> None:
    tensors = make()
    tensors["residual"] = torch.zeros(4, 3)
    assert not tensors["residual"].any()
    assert tensors["hidden_states"].any()


def test_a8_empty_like_has_the_same_shapes_in_new_memory() -> None:
    tensors = make()
    empty = tensors.empty_like()
    for name, tensor in tensors.items():
        assert empty[name].shape == tensor.shape
        assert empty[name].dtype == tensor.dtype
        assert empty[name].data_ptr() != tensor.data_ptr()


def test_a8_repr_shows_shapes_not_numbers() -> None:
    assert repr(make()) == "IntermediateTensors(hidden_states=(4, 3), residual=(4, 3))"


def test_a9_factory_makes_what_a_stage_receives() -> None:
    make_empty = make_empty_intermediate_tensors_factory(6, dtype=torch.bfloat16, device=torch.device("cpu"))
    tensors = make_empty(5)
    assert sorted(name for name, _ in tensors.items()) == ["hidden_states", "residual"]
    for name in ("hidden_states", "residual"):
        tensor = tensors[name]
        assert tensor.shape == (5, 6)
        assert tensor.dtype == torch.bfloat16
        assert tensor.device.type == "cpu"


def test_a7_decoder_can_be_cut() -> None:
    assert supports_pp(Decoder)
    require_pp(Decoder)


def test_a7_a_class_without_the_flag_is_refused_before_loading() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            raise AssertionError("must not be built")

    assert not supports_pp(Whole)
    with pytest.raises(UnsupportedModelError, match="Whole does not implement pipeline parallelism"):
        require_pp(Whole)


def test_a7_the_flag_without_the_argument_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Pretender(nn.Module):
        supports_pp = True

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    with caplog.at_level(logging.WARNING):
        assert not supports_pp(Pretender)
    assert "Pretender sets supports_pp" in caplog.text
