"""The page of what goes with what is what running it finds (row d17)."""

from __future__ import annotations

import pytest

import compatibility


@pytest.mark.parametrize("one_in", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_d17_the_page_of_compatibility_is_what_was_found(one_in: int) -> None:
    assert compatibility.page(one_in) == compatibility.PAGE.read_text(encoding="utf-8"), (
        "run `python tests/compatibility.py`"
    )
