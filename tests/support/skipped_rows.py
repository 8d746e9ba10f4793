"""A part of pytest's report: which tests were skipped and why, and that rows which must run were not.

`tests/doors/conftest.py` takes the hooks over. Rows are read from the names of tests, such as
`test_r15_g1_a_wrong_token_is_refused`; of a whole file that was skipped, from the names in its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from namespaces import NetworkUnavailableError

REQUIRED = frozenset({"r15", "g1"})
_ROW = re.compile(r"[a-z]\d+")


def rows_of(name: str) -> set[str]:
    """Return the rows that the name of a test begins with, such as "r15"."""
    rows = set()
    for word in name.removeprefix("test_").split("_"):
        if not _ROW.fullmatch(word):
            break
        rows.add(word)
    return rows


def rows_in(text: str) -> set[str]:
    """Return the rows of all tests of a file."""
    return {row for name in re.findall(r"def (test_\w+)", text) for row in rows_of(name)}


class SkippedTests:
    """The tests that were skipped so far, each with its reason and rows."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._rows: dict[str, set[str]] = {}

    def add(self, name: str, reason: str, rows: set[str]) -> None:
        """Note a test or file that was skipped."""
        self._reasons[name] = reason.removeprefix("Skipped: ")
        self._rows[name] = rows

    @property
    def required(self) -> list[str]:
        """The names of those that must not be skipped."""
        return [name for name, rows in self._rows.items() if rows & REQUIRED]

    def lines(self) -> list[str]:
        """Return the report, a line for each test and one that says whether that is a failure."""
        lines = [f"{name}: {reason}" for name, reason in self._reasons.items()]
        if missing := self.required:
            rows = ", ".join(sorted(row.upper() for row in REQUIRED))
            lines.append(f"FAILED: tests of rows {rows} may not be skipped: {', '.join(missing)}")
        return lines


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


class SkipReport:
    """The hooks that fill `SkippedTests` and print it.

    Args:
        root: where the paths in names of tests begin.
        folder: whose tests count; pytest tells of all others too.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._folder = folder
        self._skipped = SkippedTests()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that was skipped; one that is expected to fail is not."""
        if report.skipped and self._counts(report.nodeid) and not hasattr(report, "wasxfail"):
            function = report.nodeid.rpartition("::")[2]
            self._skipped.add(report.nodeid, _reason(report), rows_of(function))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that was skipped as a whole."""
        path = self._root / report.nodeid
        if report.skipped and self._counts(report.nodeid) and path.is_file():
            self._skipped.add(report.nodeid, _reason(report), rows_in(path.read_text(encoding="utf-8")))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail a run that would pass, where a test was skipped that must not be."""
        if self._skipped.required and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what was skipped."""
        if lines := self._skipped.lines():
            terminalreporter.section("skipped")
            for line in lines:
                terminalreporter.write_line(line)

    def _counts(self, name: str) -> bool:
        return (self._root / name.partition("::")[0]).is_relative_to(self._folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    return (yield from _skip_where_unavailable())


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    return (yield from _skip_where_unavailable())


def _skip_where_unavailable() -> Iterator[None]:
    try:
        return (yield)
    except NetworkUnavailableError as error:
        pytest.skip(str(error))
