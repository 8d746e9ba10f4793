"""A number's bits do not depend on the numbers beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from penstock.layers.elementwise import steady

FUNCTIONS = [torch.sigmoid, torch.cos, torch.exp]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("width", [1, 7, 64, 65, 256])
def test_rows_alone_and_among_many_that_threads_share(
    function: Callable[[Tensor], Tensor], width: int
) -> None:
    x = torch.randn(1001, width, generator=torch.Generator().manual_seed(width)) * 4
    torch.set_num_threads(3)
    together = steady(function, x)
    assert torch.equal(torch.cat([steady(function, row) for row in x.split(1)]), together)
    assert torch.equal(steady(function, x[-13:]), together[-13:])
    torch.testing.assert_close(together, function(x), rtol=1e-5, atol=1e-7)


def test_no_rows_and_no_columns() -> None:
    for shape in ((0, 7), (3, 0), (0, 0)):
        assert steady(torch.sigmoid, torch.zeros(shape)).shape == shape


def test_the_plain_function_gives_other_bits_among_others() -> None:
    """What this is for: where it stops being so, `steady` may go."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("torch has no vectors here")
    x = torch.randn(20_000, 1, generator=torch.Generator().manual_seed(0)) * 6
    alone = torch.cat([torch.sigmoid(row) for row in x.split(1)])
    assert not torch.equal(torch.sigmoid(x), alone)
    assert torch.equal(
        steady(torch.sigmoid, x), torch.cat([steady(torch.sigmoid, row) for row in x.split(1)])
    )
