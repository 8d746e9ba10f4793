"""Breaks the core mechanisms one at a time, and checks that their tests notice.

Each mutant of `mutants.toml` is a change of a few words that a person could make by mistake, and names the
fast tests that must fail for it. The package with the change stands, in a folder of its own, before the
installed one on the path of a pytest process and of all its children; the checkout is never touched. First
the named tests have to pass without any change. What was found of a mutant is kept under `.mutants` for the
present state of source and tests, so that a run that was interrupted goes on.

    python scripts/mutants.py [--only NAME,NAME] [--shard 1/4] [--list] [--again] [--skip-clean]

A mutant is killed when a named test fails. It has survived when all pass, was broken when pytest could not
run them, and timed out when they did not end: then the exit status is 1. Called by `./run soak`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
DATA = REPOSITORY / "scripts" / "mutants.toml"
SOURCE = REPOSITORY / "src"
PACKAGE = "penstock"
KEPT = REPOSITORY / ".mutants"
LIMIT_S = 120.0  # of the tests of one mutant
CLEAN_LIMIT_S = 900.0  # of all named tests without a change
KILLED, SURVIVED, BROKEN, TIMED_OUT = "killed", "SURVIVED", "BROKEN", "TIMED OUT"
PYTEST = (
    *("-m", "pytest", "-x", "-q", "-m", "not soak and not gpu"),
    *("-p", "no:cacheprovider", "--hypothesis-seed=0"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change, and who must notice.

    Attributes:
        breaks: what goes wrong, in a sentence.
        file: path from the root of the repository.
        find: text that is there exactly once.
        replace: what stands in its place.
        tests: ids of pytest.
    """

    name: str
    breaks: str
    file: str
    find: str
    replace: str
    tests: list[str]

    def changed(self, source: str) -> str:
        """The source with the change."""
        count = source.count(self.find)
        if count != 1:
            raise ValueError(f"mutant {self.name}: its text is {count} times in {self.file}, not once")
        return source.replace(self.find, self.replace)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of a mutant.

    Attributes:
        by: the test that has failed, or why none could.
        output: of pytest, where that is worth reading.
    """

    verdict: str
    seconds: float
    by: str = ""
    output: str = ""


def load(path: Path = DATA) -> list[Mutant]:
    """All mutants, in the order of the file."""
    tables: dict[str, dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Mutant(name=name, **fields) for name, fields in tables.items()]


# --- which of them --------------------------------------------------------------------------------


def chosen(mutants: Sequence[Mutant], only: str, shard: str) -> list[Mutant]:
    """Those that were asked for; raises `ValueError` for what is none."""
    names = {name for name in only.split(",") if name}
    unknown = names - {mutant.name for mutant in mutants}
    if unknown:
        raise ValueError(f"there is no mutant {', '.join(sorted(unknown))}; --list shows all")
    part = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", shard)
    if part is None or int(part[1]) > int(part[2]):
        raise ValueError(f"--shard is {shard!r}; write 1/4 for the first of four parts")
    asked = [mutant for mutant in mutants if not names or mutant.name in names]
    return asked[int(part[1]) - 1 :: int(part[2])]


# --- what is kept ---------------------------------------------------------------------------------


def state_of_tree() -> str:
    """Names what the findings depend on: the package and all tests."""
    state = hashlib.sha256()
    for directory in (SOURCE, REPOSITORY / "tests"):
        for path in sorted(directory.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                state.update(f"{path.relative_to(REPOSITORY)}\0".encode())
                state.update(hashlib.sha256(path.read_bytes()).digest())
    return state.hexdigest()[:16]


class Findings:
    """What was found before, for one state of the tree: a file for each mutant, so that shards may run side
    by side."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, mutant: Mutant) -> Finding | None:
        try:
            kept = json.loads(self._path(mutant).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return Finding(**kept["finding"]) if kept["mutant"] == asdict(mutant) else None

    def keep(self, mutant: Mutant, finding: Finding) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"mutant": asdict(mutant), "finding": asdict(finding)})
        unfinished = self._path(mutant).with_suffix(f".{os.getpid()}")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(self._path(mutant))

    def forget(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def _path(self, mutant: Mutant) -> Path:
        return self._directory / f"{mutant.name}.json"


# --- runs -----------------------------------------------------------------------------------------


@contextmanager
def overlay(mutant: Mutant | None) -> Iterator[Path]:
    """A directory with the package, changed as the mutant says."""
    with tempfile.TemporaryDirectory(prefix="penstock-mutant-") as name:
        directory = Path(name)
        # Compiled modules too, as old as the sources.
        shutil.copytree(SOURCE / PACKAGE, directory / PACKAGE, copy_function=link_or_copy)
        if mutant is not None:
            path = directory / Path(mutant.file).relative_to(SOURCE.name)
            changed = mutant.changed(path.read_text(encoding="utf-8"))
            path.unlink()  # its bytes may be those of the checkout
            path.write_text(changed, encoding="utf-8")
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
                compiled.unlink()
        yield directory


def link_or_copy(source: str, target: str) -> None:
    """Give the file a second name, which is faster than a copy; copy it where that cannot be done."""
    try:
        os.link(source, target)
    except OSError:  # between file systems
        shutil.copy2(source, target)


def environment(directory: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """In which the package of that directory is imported, by children too, and nothing is remembered."""
    path = os.pathsep.join(filter(None, (str(directory), environ.get("PYTHONPATH"))))
    return {**environ, "PYTHONPATH": path, "HYPOTHESIS_STORAGE_DIRECTORY": str(directory / "examples")}


def run_tests(directory: Path, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """(exit status, output) of pytest over that package; None: it did not end in time."""
    with subprocess.Popen(
        [sys.executable, *PYTEST, *tests],
        cwd=REPOSITORY,
        env=environment(directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output


def judged(status: int | None, output: str, seconds: float) -> Finding:
    """What pytest's end says of a mutant."""
    tail = output[-4000:]
    if status is None:
        return Finding(verdict=TIMED_OUT, seconds=seconds, by="the tests did not end", output=tail)
    if status == 1:
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return Finding(verdict=KILLED, seconds=seconds, by=failed[1] if failed else "")
    if status == 0:
        return Finding(verdict=SURVIVED, seconds=seconds, by="all its tests pass")
    return Finding(verdict=BROKEN, seconds=seconds, by=f"pytest ended with {status}", output=tail)


def try_out(mutant: Mutant) -> Finding:
    began = time.monotonic()
    with overlay(mutant) as directory:
        status, output = run_tests(directory, mutant.tests, LIMIT_S)
    return judged(status, output, time.monotonic() - began)


def passes_unchanged(mutants: Sequence[Mutant]) -> bool:
    """Whether all their tests pass over a copy without a change, which is the package that they import."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    began = time.monotonic()
    with overlay(None) as directory:
        command = [sys.executable, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)"]
        found = subprocess.run(
            command, env=environment(directory), cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout
        if not Path(found.strip()).is_relative_to(directory):
            print(f"mutants: another package stands before the changed one: {found.strip()}", file=sys.stderr)
            return False
        status, output = run_tests(directory, tests, CLEAN_LIMIT_S)
    print(f"{time.monotonic() - began:7.1f} s  {len(tests)} tests without a change: exit status {status}")
    if status != 0:
        print(output, file=sys.stderr)
    return status == 0


def show(mutant: Mutant, finding: Finding, *, is_old: bool) -> None:
    before = "  (before)" if is_old else ""
    print(f"{finding.seconds:7.1f} s  {finding.verdict:9}  {mutant.name}  {finding.by}{before}", flush=True)
    if finding.output:
        print(finding.output, file=sys.stderr, flush=True)


def run_all(mutants: Sequence[Mutant], findings: Findings, *, is_clean: bool) -> int:
    """The exit status."""
    known = {mutant.name: findings.find(mutant) for mutant in mutants}
    new = [mutant for mutant in mutants if known[mutant.name] is None]
    if new and not is_clean and not passes_unchanged(new):
        return 1
    alive, began = [], time.monotonic()
    for mutant in mutants:
        old = known[mutant.name]
        finding = old or try_out(mutant)
        if old is None:
            findings.keep(mutant, finding)
        show(mutant, finding, is_old=old is not None)
        if finding.verdict != KILLED:
            alive.append(mutant)
    took_s = time.monotonic() - began
    print(f"{took_s:7.1f} s  {len(mutants) - len(alive)} of {len(mutants)} mutants killed")
    for mutant in alive:
        print(f"mutants: {mutant.name} lives: {mutant.breaks}", file=sys.stderr)
    return 1 if alive else 0


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Break the core mechanisms; their tests must notice.")
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="these mutants")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="part I of N")
    parser.add_argument("--list", action="store_true", help="show them and end")
    parser.add_argument("--again", action="store_true", help="forget what was found before")
    parser.add_argument("--skip-clean", action="store_true", help="trust that the tests pass unchanged")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    try:
        mutants = chosen(load(), options.only, options.shard)
    except ValueError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name:32} {mutant.breaks}")
        return 0
    findings = Findings(KEPT / state_of_tree())
    if options.again:
        findings.forget()
    return run_all(mutants, findings, is_clean=options.skip_clean)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # pytest and the copy go as well
    sys.exit(main(sys.argv[1:]))
