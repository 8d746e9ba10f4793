"""The head of an engine over hosts that are namespaces: a program, because its sockets must be its host's.

    python far_head.py '{"model": PATH, "settings": {…}}'

Asks what `linked_engines` asks, and prints a line of JSON with the tokens and the numbers of the scheduler.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from linked_engines import make_llm, tokens


def main() -> None:
    given = json.loads(sys.argv[1])
    with make_llm(Path(given["model"]), **given["settings"]) as llm:
        found = tokens(llm)
        stats = llm.stats()
        assert stats is not None
        print(json.dumps({"tokens": found, "scheduler": msgspec.to_builtins(stats.scheduler)}), flush=True)


if __name__ == "__main__":
    main()
