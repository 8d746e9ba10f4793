"""What it costs a rank's process to import what it needs: as it does, and with all of torch, in turns.

    python benchmarks/import_cost.py --rounds 12

Each import has an interpreter of its own. Prints medians of CPU time and of the memory that the process
shares with no other, and the ratio of the rank's way to all of torch, with its interval. The control is a
second process that imports all of torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

from ratios import in_turns, shown

IMPORT = "import penstock.rank.rank"
SUBJECTS = {
    "all of torch": IMPORT,
    "as a rank does": "from penstock.process.torch_import import cheap_torch_import\n"
    f"with cheap_torch_import():\n    {IMPORT}",
    "control": IMPORT,
}
REPORT = """
import json, os, time
seconds = time.process_time()
from penstock.rank.spare import own_bytes
print(json.dumps([seconds, own_bytes() / 2**20]), flush=True)
os._exit(0)
"""


def imported(name: str) -> tuple[float, float]:
    """Return the CPU seconds of an import, and the MiB that the process then shares with no other."""
    result = subprocess.run(
        [sys.executable, "-c", SUBJECTS[name] + REPORT], capture_output=True, text=True, check=True
    )
    seconds, mebibytes = json.loads(result.stdout)
    return seconds, mebibytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12, help="rounds in which each imports once (12)")
    rounds = in_turns(list(SUBJECTS), imported, parser.parse_args().rounds, warm_up=1)
    print("| import | CPU s | ratio | own memory, MiB | ratio |\n|---|---|---|---|---|")
    for index, name in enumerate(SUBJECTS):
        cells = []
        for figure in (0, 1):
            median = statistics.median(of_round[index][figure] for of_round in rounds)
            cells += [f"{median:.3g}", shown([each[index][figure] / each[0][figure] for each in rounds])]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
