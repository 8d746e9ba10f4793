"""The page of what goes with what is what running it finds (row d17)."""

from __future__ import annotations

import compatibility


def test_d17_the_page_of_compatibility_is_what_was_found() -> None:
    assert compatibility.page() == compatibility.PAGE.read_text(encoding="utf-8"), (
        "run `python tests/support/compatibility.py`"
    )
