"""The page of what goes with what is what running it finds (row d17)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import compatibility
from depth import sampled

PAGE = compatibility.PAGE.read_text(encoding="utf-8")
REASONS = dict(re.findall(r"^(\d+)\. (.+)$", PAGE, re.MULTILINE))
ROWS = {
    cells[0]: [REASONS[cell[1:-1]] if cell.startswith("[") else cell for cell in cells[1:]]
    for cells in (line.strip("| ").split(" | ") for line in re.findall(r"^\| [^|\s].*$", PAGE, re.MULTILINE))
}


def test_the_page_has_a_row_for_each_feature_and_a_column_for_each_layout() -> None:
    assert list(ROWS) == list(compatibility.FEATURES)
    assert f"| | {' | '.join(compatibility.LAYOUTS)} |" in PAGE
    assert {len(cells) for cells in ROWS.values()} == {len(compatibility.LAYOUTS)}


@pytest.mark.parametrize("name", sampled(compatibility.FEATURES, 2))
def test_d17_the_page_of_compatibility_is_what_was_found(name: str, tmp_path: Path) -> None:
    found = compatibility.found(compatibility.FEATURES[name], tmp_path)
    assert found == ROWS[name], "run `python tests/support/compatibility.py`"
