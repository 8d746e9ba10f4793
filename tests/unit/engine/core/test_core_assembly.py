"""The parts of a core that its settings choose."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from fakes import FakeClock
from penstock.config.speculation import SpeculationConfig, SpeculativeMethod
from penstock.engine.core import core_assembly
from recorded_runs import CONFIG

# Of methods whose drafter has another name. The process of a draft model is not there in this test.
NAMES = {"auto": "suffix", "off": "suffix", "draft_model": "suffix"}


def drafter_of(method: Any) -> str:
    """Return the name of the drafter that a core makes for this method."""
    model = "small" if method == "draft_model" else None
    speculation = SpeculationConfig(speculative_method=method, speculative_model=model)
    config = msgspec.structs.replace(CONFIG, speculation=speculation)
    return core_assembly._drafter(config, None, FakeClock()).name


@pytest.mark.parametrize("method", get_args(SpeculativeMethod))
def test_each_method_of_speculation_makes_the_drafter_of_its_name(method: str) -> None:
    assert drafter_of(method) == NAMES.get(method, method)


def test_a_method_for_which_there_is_no_drafter_does_not_get_another_one() -> None:
    with pytest.raises(AssertionError, match="psychic"):
        drafter_of("psychic")
