"""Two checkouts of the package against each other: decode rate and CPU time, in turns, with intervals.

    python benchmarks/two_checkouts.py OTHER_CHECKOUT [--model demo] [--batches 1,8,32] [--rounds 30]
    python benchmarks/two_checkouts.py OTHER_CHECKOUT --batches 1 --prompt 512 --tokens 1    # first tokens

Each checkout is run by its own `.venv`. Three engines are loaded: of this checkout, of the other, and of the
other once more, as the control (A against A). In each round all three generate for the same batch, in an
order that turns; the ratio of a round is this checkout's figure by the other's. Prints the median ratio and
the 95 % interval of the median by bootstrap, for tokens a second and for CPU seconds of all processes, as
Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ratios import in_turns, shown

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "decode_turns.py"


class Engine:
    """The engine of one checkout, in processes of its own."""

    def __init__(self, checkout: Path, model: str, stages: int, prompt: int, tokens: int) -> None:
        python = checkout / ".venv" / "bin" / "python"
        words = [model, "--stages", str(stages), "--prompt", str(prompt), "--tokens", str(tokens)]
        self._process = subprocess.Popen(
            [str(python), str(PROGRAM), *words],
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def decode(self, batch: int) -> dict[str, float]:
        """Decode a batch once; return its wall and CPU seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch}\n")
        self._process.stdin.flush()
        answer: dict[str, float] = json.loads(self._line())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def row(batch: int, tokens: int, rounds: Sequence[Sequence[dict[str, float]]]) -> str:
    """Return a line of the table: rates, then both ratios and their controls."""
    rates = [batch * tokens / statistics.median(one[place]["seconds"] for one in rounds) for place in (0, 1)]

    def ratios(key: str, place: int, sign: int) -> list[float]:
        return [(one[place][key] / one[1][key]) ** sign for one in rounds if one[1][key] and one[place][key]]

    cells = [ratios("seconds", 0, -1), ratios("seconds", 2, -1), ratios("cpu_s", 0, 1), ratios("cpu_s", 2, 1)]
    return f"| {batch} | {rates[0]:.3g} | {rates[1]:.3g} | {' | '.join(map(shown, cells))} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=3, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=30)
    options: Any = parser.parse_args()
    checkouts = (HERE.parent, options.other.resolve(), options.other.resolve())
    words = (options.model, options.stages, options.prompt, options.tokens)
    engines = [Engine(checkout, *words) for checkout in checkouts]
    print("| B | tokens/s here | other | rate, here/other | control | CPU, here/other | control |")
    print("|---|---|---|---|---|---|---|")
    for batch in map(int, options.batches.split(",")):
        rounds = in_turns(engines, partial(Engine.decode, batch=batch), options.rounds, warm_up=1)
        print(row(batch, options.tokens, rounds), flush=True)
    for engine in engines:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
