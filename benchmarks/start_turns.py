"""How long a start takes, this checkout against another, in turns, with intervals.

    python benchmarks/start_turns.py OTHER_CHECKOUT [--rounds 30]

Each checkout is run by its own `.venv`. In each round this checkout, the other, and the other once more, as
the control, in an order that turns, do two things: `penstock serve demo --pp 2` until it says that it is
ready, in seconds, and `penstock --help`, in CPU seconds. The ratio of a round is this checkout's figure by
the other's. Prints medians, and the median ratios with the 95 % interval of the median by bootstrap.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from ratios import in_turns, print_compared

SERVE = ("serve", "demo", "--pp", "2", "--port", "0")


def ready_s(checkout: Path) -> float:
    """Seconds until a server is ready; it is ended afterwards."""
    began = time.monotonic()
    with subprocess.Popen(
        [str(checkout / ".venv/bin/penstock"), *SERVE],
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready in"):
                break
        took = time.monotonic() - began
        process.terminate()
        process.stdout.read()
    if not lines[-1].startswith("ready in"):
        raise SystemExit(f"{checkout} was not ready:\n{''.join(lines)}")
    return took


def help_cpu_s(checkout: Path) -> float:
    """CPU seconds of `penstock --help`."""
    before = os.times()
    subprocess.run([str(checkout / ".venv/bin/penstock"), "--help"], stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


MEASURES = {"ready, s": ready_s, "--help, CPU s": help_cpu_s}


def figures(checkout: Path) -> dict[str, float]:
    return {name: take(checkout) for name, take in MEASURES.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    here, other = Path(__file__).resolve().parent.parent, options.other.resolve()
    rounds = in_turns((here, other, other), figures, options.rounds, warm_up=1)
    print_compared("measure", MEASURES, rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
