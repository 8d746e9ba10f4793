"""The tests of a file, by name, and which of them `./run test` runs."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

Test = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def statements_of(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8"), str(file)).body


@cache
def all_tests_in(file: Path) -> dict[str, Test]:
    """Return the tests at the top of a file."""
    functions = [node for node in statements_of(file) if isinstance(node, Test)]
    return {node.name: node for node in functions if node.name.startswith("test_")}


@cache
def fast_tests_in(file: Path) -> dict[str, Test]:
    """Return those that the fast tests do not leave out."""
    if any(is_slow(ast.unparse(node)) for node in statements_of(file) if isinstance(node, ast.Assign)):
        return {}
    return {
        name: test
        for name, test in all_tests_in(file).items()
        if not any(is_slow(ast.unparse(mark)) for mark in test.decorator_list)
    }


def is_slow(mark: str) -> bool:
    """Of `pytestmark`, or of a function; not a mark that some parameters have."""
    return "parametrize" not in mark and any(f"mark.{kind}" in mark for kind in ("soak", "gpu", "doors"))
