"""Says which tests of this folder were skipped, and fails where one of a row was that must run."""

from __future__ import annotations

from pathlib import Path

import pytest

from skipped_rows import SkipReport, pytest_pyfunc_call, pytest_runtest_setup

__all__ = ["pytest_configure", "pytest_pyfunc_call", "pytest_runtest_setup"]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SkipReport(config.rootpath, Path(__file__).parent), "skipped-rows")
