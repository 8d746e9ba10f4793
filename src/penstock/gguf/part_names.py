"""The names of the files of a split model in GGUF: `NAME-00001-of-0000N.gguf`."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.errors import CheckpointError
from penstock.told_text import printable

SUFFIX = ".gguf"
MAX_PARTS = 4096
# Matches the name of a part without its suffix.
PART_STEM = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.DOTALL)


def part_paths(path: Path) -> list[Path]:
    """Return the files of a model, in order, given one of them.

    Raises:
        CheckpointError: one of them is missing, which the error names; or the number in the name is bad.
    """
    name = PART_STEM.fullmatch(path.stem) if path.suffix.lower() == SUFFIX else None
    if name is None:
        return [path]
    count = int(name["count"])
    if not 1 <= int(name["number"]) <= count <= MAX_PARTS:
        raise CheckpointError(
            file=printable(path.name),
            expected=f"a name with a part of 1 to N, N at most {MAX_PARTS}",
            found="another",
        )
    stem, suffix = name["stem"], path.suffix
    paths = [path.with_name(part_name(stem, number, count, suffix)) for number in range(1, count + 1)]
    missing = [each.name for each in paths if not each.exists()]
    if missing:
        raise CheckpointError(
            file=printable(missing[0]),
            expected=f"all {count} parts of {printable(stem)} in one directory",
            found=f"{count - len(missing)} of them",
            remedy="Put the missing parts beside the others.",
        )
    return paths


def part_name(stem: str, number: int, count: int, suffix: str = SUFFIX) -> str:
    """Return the name of a part of a split model; the first has number 1."""
    return f"{stem}-{number:05}-of-{count:05}{suffix}"
