"""The page for those who come from another engine names the flags that the command line answers with."""

from __future__ import annotations

import re

import pytest

from pages import section
from paths import REPOSITORY
from penstock.config.foreign_flags import FOREIGN_FLAGS

FLAGS_PAGE = (REPOSITORY / "docs" / "flags.md").read_text(encoding="utf-8")
OURS = FLAGS_PAGE.partition("## Flags of other engines")[0]


def rows_of_flags(engine: str) -> list[tuple[str, str]]:
    """Return each flag of another engine with the cell that says what to use here."""
    cells = [line.strip("|").split(" | ") for line in section("coming-from", engine).splitlines()]
    flags = [row for row in cells if len(row) == 2 and row[0].strip().startswith("`-")]
    return [(flag, here) for theirs, here in flags for flag in re.findall(r"`([^`]+)`", theirs)]


@pytest.mark.parametrize("engine", ["vLLM", "llama.cpp"])
def test_flags_of_other_engines_are_answered_as_the_page_says(engine: str) -> None:
    rows = rows_of_flags(engine)
    assert len(rows) > 12
    for flag, here in rows:
        known = FOREIGN_FLAGS.get(flag)
        if known is None:
            assert f"`{flag}`" in OURS, f"{flag} is neither a flag here nor known as one of {engine}"
            assert f"`{flag}`" in here or here.strip().startswith("the same"), (flag, here)
        elif known.ours:
            assert f"`{known.ours}`" in here, (flag, here)
            assert engine in known.engines, flag
        else:
            assert here.strip().startswith("none"), (flag, here)
