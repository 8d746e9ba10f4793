"""Runs grids and long runs: every test marked `soak` or `deep`, and the mutants. Goes on where it stopped.

    python scripts/soak.py                  all of it, two test files at a time
    python scripts/soak.py --shard 2/3      the second of three parts; together they are all of it
    python scripts/soak.py --again          forgets what has passed at this commit, and runs it anew
    python scripts/soak.py --list           prints the parts of the shard and what is known of them

A part is one test file, the mutants, or what computes without a compiler. What passed is kept in `.soak`, by
commit: a later run of the same commit skips it. A tree with changes that are not committed has a name of its
own. A part whose tests were all skipped, as without the shared data, has not passed. `./run soak` calls this.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKS = "(soak or deep) and not gpu and not doors"
MUTANTS = "scripts/mutants.py"
NO_COMPILER = "without a compiler"
# What computes, by torch alone: every test of it, as `./run test` asks a few.
COMPUTING = [
    *(f"tests/unit/{room}" for room in ("kernels", "layers", "models", "weights")),
    "tests/pipeline/test_exactness.py",
]
# Parts that take longer than their number of tests tells. The heaviest begin first: none is left over.
WEIGHTS = {
    "tests/fault/test_chaos.py": 10_000,
    "tests/fault/test_stage_loss.py": 9_000,
    "tests/pipeline/test_carrier_grid.py": 5_000,
    MUTANTS: 4_500,
    "tests/pipeline/test_golden_grid.py": 4_000,
    "tests/pipeline/test_speculation.py": 3_500,
    "tests/unit/kernels/test_sanitizer.py": 3_000,
    "tests/unit/scheduler/test_stage_agreement.py": 2_500,
    NO_COMPILER: 500,
}
PART_LIMIT_S = 5400.0  # the longest part takes an hour on two slow cores beside two others
# All parts share the kernels that one of them has built: there are six targets, and each takes half a minute.
COMMON = {"PENSTOCK_TEST_BUILDS": tempfile.gettempdir(), "PENSTOCK_TEST_DEPTH": "full"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one part."""

    passed: bool
    seconds: float
    summary: str  # the last line that it printed


class Results:
    """What is known of the parts at one commit, in a file that each outcome is added to at once."""

    def __init__(self, folder: Path, commit: str) -> None:
        self._path = folder / f"{commit}.json"
        self._writing = threading.Lock()  # parts that run side by side end at the same time
        known = json.loads(self._path.read_text("utf-8")) if self._path.exists() else {}
        self._outcomes = {part: Outcome(**fields) for part, fields in known.items()}

    def forget(self) -> None:
        self._outcomes.clear()

    def get(self, part: str) -> Outcome | None:
        return self._outcomes.get(part)

    def record(self, part: str, outcome: Outcome) -> None:
        """Keep an outcome, whatever happens to this process afterwards."""
        with self._writing:
            self._outcomes[part] = outcome
            text = json.dumps({name: asdict(known) for name, known in self._outcomes.items()}, indent=1)
            self._path.parent.mkdir(exist_ok=True)
            new = self._path.with_suffix(".new")
            new.write_text(text, "utf-8")
            new.replace(self._path)


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def commit_name() -> str:
    """Return the name of the commit; with changes that are not committed, a name of theirs beside it."""
    changes = git("diff", "HEAD")
    name = git("rev-parse", "--short=12", "HEAD").strip()
    return f"{name}-{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else name


def collect() -> dict[str, int]:
    """Return the number of soak tests of each test file that has any."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "-m", MARKS, "tests"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"The tests cannot be collected:\n{result.stdout}{result.stderr}")
    return dict(Counter(line.split("::")[0] for line in result.stdout.splitlines() if "::" in line))


def shard_of(weights: Mapping[str, int], index: int, count: int) -> list[str]:
    """Return the parts of one shard, heaviest first: each part goes to the shard that has least so far."""
    loads, shards = [0] * count, [list[str]() for _ in range(count)]
    for part in sorted(weights, key=lambda name: (-weights[name], name)):
        lightest = loads.index(min(loads))
        loads[lightest] += weights[part]
        shards[lightest].append(part)
    return shards[index - 1]


def command_of(part: str) -> list[str]:
    if part == MUTANTS:
        return [sys.executable, part]
    # On a busy machine some tests compute for minutes; to show where they are may end the interpreter.
    pytest = [sys.executable, "-m", "pytest", "-o", "faulthandler_timeout=1800"]
    if part == NO_COMPILER:
        return [*pytest, "-m", "not gpu and not doors", *COMPUTING]
    return [*pytest, "-m", MARKS, part]


def variables_of(part: str) -> dict[str, str]:
    """Return what is set in the environment of a part alone."""
    return {"PENSTOCK_CXX": "/nonexistent"} if part == NO_COMPILER else {}


def run_part(part: str) -> tuple[Outcome, str]:
    """Run one part in a process group and a folder of its own; return its outcome and all that it printed."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        process = subprocess.Popen(
            command_of(part),
            cwd=ROOT,
            env=os.environ | COMMON | {"TMPDIR": scratch} | variables_of(part),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output = process.communicate(timeout=PART_LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0] + f"\nended after {PART_LIMIT_S:g} s"
    summary = (output.strip().splitlines() or ["no output"])[-1].strip("= ")
    seconds = round(time.monotonic() - began, 1)
    if process.returncode == 0 and part != MUTANTS and not re.search(r"\d passed", summary):
        return Outcome(passed=False, seconds=seconds, summary=f"{summary}: no test of it ran"), output
    return Outcome(passed=process.returncode == 0, seconds=seconds, summary=summary), output


def run_parts(parts: Iterable[str], results: Results, jobs: int) -> list[str]:
    """Run the parts, some at a time; print a line for each. Return those that failed."""
    failed = []

    def run_and_tell(part: str) -> None:
        outcome, output = run_part(part)
        results.record(part, outcome)
        print(line_of(part, outcome), flush=True)
        if not outcome.passed:
            failed.append(part)
            print(output, file=sys.stderr, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run_and_tell, parts))
    return failed


def line_of(part: str, outcome: Outcome | None) -> str:
    if outcome is None:
        return f"      {part:<64} to do"
    return (
        f"      {part:<64} {'ok' if outcome.passed else 'FAILED'}  ({outcome.seconds:g} s)  {outcome.summary}"
    )


def shard(text: str) -> tuple[int, int]:
    """Return the two numbers of "i/n"."""
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f'"{text}" is not a shard; write i/n, such as 2/3.')
    return int(index), int(count)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shard", type=shard, default=(1, 1), metavar="i/n", help="which part of how many")
    parser.add_argument("--jobs", type=int, default=2, help="test files at a time (2)")
    parser.add_argument("--again", action="store_true", help="run what has passed as well")
    parser.add_argument("--list", action="store_true", help="print the parts and run nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    results = Results(ROOT / ".soak", commit_name())
    if options.again:
        results.forget()
    weights = collect() | WEIGHTS
    parts = shard_of(weights, *options.shard)
    if options.list:
        print("\n".join(line_of(part, results.get(part)) for part in parts))
        return 0
    to_do = [part for part in parts if not ((known := results.get(part)) and known.passed)]
    print(f"      {len(parts)} parts, {len(parts) - len(to_do)} of them have passed before", flush=True)
    failed = run_parts(to_do, results, options.jobs)
    if failed:
        print(f"soak: failed: {', '.join(sorted(failed))}.", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
