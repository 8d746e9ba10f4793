"""vLLM's object for speculation, as it is and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import pytest

from penstock.config.declared import configured_engine
from penstock.config.speculation import SpeculationConfig, SpeculativeMethod, with_speculative_config
from penstock.errors import UsageError

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


@pytest.mark.parametrize("given", [NGRAM, '{"method":"ngram","num_speculative_tokens":5}'])
def test_an_object_or_json_of_it_says_method_and_number(given: str | Mapping[str, Any]) -> None:
    config = with_speculative_config(SpeculationConfig(), given)
    assert (config.speculative_method, config.most_drafts) == ("suffix", 5)


@pytest.mark.parametrize("method", get_args(SpeculativeMethod))
def test_each_method_can_be_named_in_the_object(method: str) -> None:
    given = {"method": method} | ({"model": "small"} if method == "draft_model" else {})
    assert with_speculative_config(SpeculationConfig(), given).speculative_method == method


def test_what_is_not_said_stays_as_it_was() -> None:
    before = SpeculationConfig(num_speculative_tokens=3)
    assert with_speculative_config(before, None) is before
    assert with_speculative_config(before, {"method": "suffix"}).most_drafts == 3
    off = with_speculative_config(SpeculationConfig(speculative_method="suffix"), {"method": "off"})
    assert not off.is_on
    assert off.most_drafts == 0


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("{", "it is not JSON"),
        ("[1]", "it is not a JSON object"),
        ([1], "it is not a JSON object"),
        ({"method": ["x"]}, "method is"),
        ({"method": "eagle"}, "method is 'eagle'"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 2.5}, "num_speculative_tokens"),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size is not 1"),
        ({"model": 7}, "speculative_model"),
        ({"model": "small", "quantization": "int3"}, "speculative_quantization"),
        ({"model": "small", "prefix": 3}, "prefix is not known"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(given: Any, why: str) -> None:
    with pytest.raises(UsageError, match="speculative_config: ") as raised:
        with_speculative_config(SpeculationConfig(), given)
    assert why in raised.value.message
    assert raised.value.remedy


@pytest.mark.parametrize("count", [0, 65])
def test_a_number_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(UsageError):
        with_speculative_config(SpeculationConfig(), {"num_speculative_tokens": count})


def test_the_command_line_takes_it_as_json() -> None:
    engine = configured_engine({"speculative_config": '{"method": "suffix"}'}, "m")
    assert engine.speculation == SpeculationConfig(speculative_method="suffix")


def test_a_model_that_is_named_drafts() -> None:
    given = {"model": "small", "num_speculative_tokens": 4, "quantization": "int4", "device": "cuda:1"}
    config = with_speculative_config(SpeculationConfig(), given | {"draft_tensor_parallel_size": 1})
    assert config == SpeculationConfig(
        speculative_method="draft_model",
        num_speculative_tokens=4,
        speculative_model="small",
        speculative_quantization="int4",
        speculative_device="cuda:1",
    )
    assert SpeculationConfig(speculative_model="small").method == "draft_model"
    assert not with_speculative_config(config, {"method": "off"}).is_on


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"speculative_method": "draft_model"}, "speculative_model"),
        ({"speculative_method": "suffix", "speculative_model": "small"}, "speculative_model"),
        ({"speculative_model": "small", "speculative_device": "tpu"}, "speculative_device"),
    ],
)
def test_what_does_not_go_together_is_refused(given: Any, param: str) -> None:
    with pytest.raises(UsageError) as raised:
        SpeculationConfig(**given)
    assert raised.value.param == param
    assert raised.value.remedy
