"""The page of what goes with what is what running it finds (row d17)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import compatibility
import compatibility_families
from depth import sampled

PAGE = compatibility.PAGE.read_text(encoding="utf-8")
REASONS = dict(re.findall(r"^(\d+)\. (.+)$", PAGE, re.MULTILINE))
OF_FEATURES, _, OF_FAMILIES = PAGE.partition(compatibility_families.TITLE)


def rows(part: str) -> dict[str, list[str]]:
    """Return the cells of each row of a part of the page, reasons in place of their numbers."""
    lines = re.findall(r"^\| [^|\s].*$", part, re.MULTILINE)
    return {
        cells[0]: [REASONS[cell[1:-1]] if cell.startswith("[") else cell for cell in cells[1:]]
        for cells in (line.strip("| ").split(" | ") for line in lines)
    }


ROWS, FAMILY_ROWS = rows(OF_FEATURES), rows(OF_FAMILIES)


def test_the_page_has_a_row_for_each_feature_and_a_column_for_each_layout() -> None:
    assert list(ROWS) == list(compatibility.FEATURES)
    assert f"| | {' | '.join(compatibility.LAYOUTS)} |" in PAGE
    assert {len(cells) for cells in ROWS.values()} == {len(compatibility.LAYOUTS)}


@pytest.mark.parametrize("name", sampled(compatibility.FEATURES, 2))
def test_d17_the_page_of_compatibility_is_what_was_found(name: str, tmp_path: Path) -> None:
    found = compatibility.found(compatibility.FEATURES[name], tmp_path)
    assert found == ROWS[name], "run `python tests/support/compatibility.py`"


@pytest.mark.parametrize(("other", "is_near"), [(8, True), (9, False), (3, False)])
def test_d17_rounding_may_choose_between_tokens_that_are_almost_as_likely_and_no_others(
    other: int, is_near: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts: list[list[int]] = []

    def likeliest(_: object, __: Path, ids: list[int]) -> dict[int, float]:
        texts.append(ids)
        return {7: -0.5, 8: -0.51, 9: -0.6}

    monkeypatch.setattr(compatibility, "likeliest_after", likeliest)
    feature = compatibility.FEATURES["bfloat16"]
    alone = [[5, 7, 1] for _ in compatibility.PROMPTS]
    shared = [*alone[1:], [5, other, 2]]  # what comes behind another token may be anything
    if is_near:
        compatibility.check_near(feature, tmp_path, shared, alone)
    else:
        with pytest.raises(AssertionError):
            compatibility.check_near(feature, tmp_path, shared, alone)
    assert texts == [[*compatibility.PROMPTS[-1]["prompt_token_ids"], 5]]


def test_the_page_has_a_row_for_each_family_and_its_architecture_in_gguf() -> None:
    families = compatibility_families
    assert list(FAMILY_ROWS) == list(families.ROWS), "run `python tests/support/compatibility.py`"
    assert f"| | {' | '.join(families.LAYOUTS)} | {families.GGUF} |" in OF_FAMILIES
    assert {len(cells) for cells in FAMILY_ROWS.values()} == {len(families.LAYOUTS) + 1}


@pytest.mark.parametrize("name", sampled(compatibility_families.ROWS, 3))
def test_d17_what_the_page_says_of_families_is_what_was_found(name: str, tmp_path: Path) -> None:
    found = compatibility_families.found(compatibility_families.ROWS[name], tmp_path)
    assert found == FAMILY_ROWS[name], "run `python tests/support/compatibility.py`"
