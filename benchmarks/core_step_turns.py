"""CPU time a step of core and API process, this checkout against another, in turns, with intervals.

    python benchmarks/core_step_turns.py OTHER_CHECKOUT [--rounds 30] [--steps 300]

Each checkout is run by its own `.venv`, with its own `core_step_cost.py`. In each round that runs for this
checkout, for the other, and for the other once more, as the control, in an order that turns; the ratio of a
round is this checkout's figure by the other's. Prints medians, and the median ratios with the 95 % interval
of the median by bootstrap, as Markdown.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from ratios import in_turns, print_compared

COST = re.compile(r"^(\w+) +([\d.]+) ms of CPU", re.MULTILINE)
PROCESSES = ("core", "api")


def costs(checkout: Path, steps: int) -> dict[str, float]:
    """Return the milliseconds of CPU a step, by process; a bar that is missed does not matter here."""
    command = [str(checkout / ".venv/bin/python"), "benchmarks/core_step_cost.py", "--steps", str(steps)]
    result = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    found = {name: float(cost) for name, cost in COST.findall(result.stdout)}
    if set(found) != set(PROCESSES):
        raise SystemExit(f"{checkout} has told no costs:\n{result.stdout}{result.stderr[-2000:]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    here, other = Path(__file__).resolve().parent.parent, options.other.resolve()
    rounds = in_turns((here, other, other), lambda root: costs(root, options.steps), options.rounds)
    print_compared("ms of CPU a step", PROCESSES, rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
