"""Prints the size of files, functions and classes and fails on a cap.

Owns the numbers of the house style. Called by `./run test`, pre-commit and a test. A length is a span of
source lines, documentation included; a nested function counts on its own as well. `kernels` are exempt.

    python scripts/size_gate.py [DIRECTORY ...]
"""

from __future__ import annotations

import ast
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_FILE = 599
MAX_FUNCTION = 80
MAX_CLASS = 299
MAX_ATTRIBUTES = 15
FUNCTION_MEDIAN_BELOW = 10
FUNCTION_P90 = 35
EXEMPT = "kernels"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One file, function or class."""

    kind: str
    name: str  # path, or path:line name
    lines: int
    attributes: int = 0  # of a class: names set on self in __init__


def span(node: Function | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def attributes_set(node: ast.ClassDef) -> int:
    """Number of names that `__init__` sets on its first parameter."""
    names: set[str] = set()
    for method in node.body:
        if isinstance(method, Function) and method.name == "__init__" and method.args.args:
            own = method.args.args[0].arg
            names |= {
                inner.attr
                for inner in ast.walk(method)
                if isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and isinstance(inner.value, ast.Name)
                and inner.value.id == own
            }
    return len(names)


def measure_file(path: Path, shown: str) -> Iterator[Measure]:
    source = path.read_text(encoding="utf-8")
    yield Measure(kind="file", name=shown, lines=len(source.splitlines()))
    for node in ast.walk(ast.parse(source, shown)):
        if isinstance(node, Function):
            yield Measure(kind="function", name=f"{shown}:{node.lineno} {node.name}", lines=span(node))
        elif isinstance(node, ast.ClassDef):
            name = f"{shown}:{node.lineno} {node.name}"
            yield Measure(kind="class", name=name, lines=span(node), attributes=attributes_set(node))


def measure(directories: list[Path]) -> list[Measure]:
    found: list[Measure] = []
    for directory in directories:
        for path in sorted(directory.rglob("*.py")):
            inside = path.relative_to(directory)
            if EXEMPT not in inside.parts and path.stat().st_size:
                found += measure_file(path, inside.as_posix())
    return found


def percentile(values: list[int], share: float) -> int:
    """Smallest value that at least `share` of the values do not exceed (nearest rank); 0 of nothing."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else 0


def median(values: list[int]) -> float:
    return statistics.median(values) if values else 0


def table(measures: list[Measure]) -> str:
    rows = [f"{'':10}{'count':>7}{'median':>8}{'p90':>6}{'max':>6}  largest"]
    for kind in ("file", "function", "class"):
        mine = [m for m in measures if m.kind == kind]
        lines = [m.lines for m in mine]
        largest = max(mine, key=lambda m: m.lines).name if mine else "-"
        numbers = f"{median(lines):8g}{percentile(lines, 0.9):6}{max(lines, default=0):6}"
        rows.append(f"{kind:10}{len(mine):7}{numbers}  {largest}")
    return "\n".join(rows)


def too_large(measures: list[Measure]) -> Iterator[str]:
    caps = {"file": MAX_FILE, "function": MAX_FUNCTION, "class": MAX_CLASS}
    for found in measures:
        if found.lines > caps[found.kind]:
            yield f"{found.name}: {found.kind} of {found.lines} lines, at most {caps[found.kind]}"
        if found.attributes > MAX_ATTRIBUTES:
            yield f"{found.name}: __init__ sets {found.attributes} attributes, at most {MAX_ATTRIBUTES}"


def too_long_as_a_rule(measures: list[Measure]) -> Iterator[str]:
    lines = [found.lines for found in measures if found.kind == "function"]
    if median(lines) >= FUNCTION_MEDIAN_BELOW:
        yield f"the median function has {median(lines):g} lines, it must have under {FUNCTION_MEDIAN_BELOW}"
    if percentile(lines, 0.9) > FUNCTION_P90:
        yield f"the 90th percentile of functions is {percentile(lines, 0.9)} lines, at most {FUNCTION_P90}"


def main(arguments: list[str]) -> int:
    root = Path(__file__).resolve().parent.parent
    directories = [Path(argument) for argument in arguments] or [root / "src" / "penstock"]
    measures = measure(directories)
    print(table(measures))
    broken = [*too_large(measures), *too_long_as_a_rule(measures)]
    for line in broken:
        print(f"size gate: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
