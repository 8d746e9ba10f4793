"""What the tests of the kernels share: a library built for a target, and the number of threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from kernel_builds import built


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """By indirect parameters: flags of the compiler."""
    return built(request.param)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
