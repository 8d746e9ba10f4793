"""The report of what was skipped names each test, and a run without a row that must run fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paths import REPOSITORY
from skipped_rows import SkippedTests, rows_in, rows_of

SUPPORT = REPOSITORY / "tests" / "support"
CONFTEST = REPOSITORY / "tests" / "doors" / "conftest.py"


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("test_r15_a_wrong_token_is_refused", {"r15"}),
        ("test_g1_r15_no_process_is_left[2]", {"g1", "r15"}),
        ("test_a_link_has_r15_in_its_name", set()),
        ("test_the_first", set()),
    ],
)
def test_rows_are_what_a_name_begins_with(name: str, rows: set[str]) -> None:
    assert rows_of(name) == rows


def test_rows_of_a_file_are_those_of_all_its_tests() -> None:
    assert rows_in("def test_g1_a() -> None: ...\nasync def test_r7_b(): ...\ndef other_r15_c(): ...") == {
        "g1",
        "r7",
    }


def test_the_report_names_each_test_with_its_reason() -> None:
    skipped = SkippedTests()
    skipped.add("test_a.py::test_r7_a", "Skipped: no `tc`", {"r7"})
    assert skipped.lines() == ["test_a.py::test_r7_a: no `tc`"]
    assert skipped.required == []


def test_the_report_says_that_a_required_row_is_missing() -> None:
    skipped = SkippedTests()
    skipped.add("test_a.py::test_g1_a", "no namespaces", {"g1"})
    assert skipped.required == ["test_a.py::test_g1_a"]
    assert skipped.lines()[-1] == ("FAILED: tests of rows G1, R15 may not be skipped: test_a.py::test_g1_a")


ELSEWHERE = "import pytest\ndef test_g1_elsewhere(): pytest.skip('not behind a door')\n"


def run_pytest(folder: Path, test: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on one file with the hooks of `tests/doors`, and on one in another folder."""
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {SUPPORT}\n", encoding="utf-8")
    (folder / "test_elsewhere.py").write_text(ELSEWHERE, encoding="utf-8")
    doors = folder / "doors"
    doors.mkdir()
    (doors / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"), encoding="utf-8")
    (doors / "test_it.py").write_text(test, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:schemathesis",
        "-p",
        "no:xdist",
        "-p",
        "no:hypothesispytest",
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110, check=False)


def test_a_run_passes_whose_skipped_tests_may_be_skipped(tmp_path: Path) -> None:
    done = run_pytest(
        tmp_path,
        "import pytest\n"
        "from namespaces import NetworkUnavailableError\n"
        "def lack(): raise NetworkUnavailableError('no bridge')\n"
        "@pytest.fixture(scope='module')\n"
        "def network(): lack()\n"
        "def test_r7_a(): lack()\n"
        "def test_b(network): ...\n"
        "def test_c(network): ...\n",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("test_r7_a", "test_b", "test_c"):
        assert f"doors/test_it.py::{name}: no bridge" in done.stdout


def test_a_run_fails_that_has_skipped_a_required_row(tmp_path: Path) -> None:
    done = run_pytest(
        tmp_path, "import pytest\npytest.skip('none', allow_module_level=True)\ndef test_r15_a(): ...\n"
    )
    assert "doors/test_it.py: none" in done.stdout
    assert "FAILED: tests of rows G1, R15 may not be skipped: doors/test_it.py" in done.stdout
    assert done.returncode == 1, done.stdout + done.stderr
