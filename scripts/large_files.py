"""Fails where a file given on the command line is larger than what the repository may carry.

Called by pre-commit. The demo model is the largest file that belongs in the repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

MAX_BYTES = 6_000_000


def main(arguments: list[str]) -> int:
    large = [path for path in map(Path, arguments) if path.is_file() and path.stat().st_size > MAX_BYTES]
    for path in large:
        print(f"{path}: {path.stat().st_size:,} bytes, at most {MAX_BYTES:,}", file=sys.stderr)
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
