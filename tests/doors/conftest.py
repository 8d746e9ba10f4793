"""Says which tests behind doors were skipped, and fails where one of a row was that must run."""

from skipped_rows import pytest_configure, pytest_fixture_setup, pytest_pyfunc_call

__all__ = ["pytest_configure", "pytest_fixture_setup", "pytest_pyfunc_call"]
