"""Where tests find real data that the repository does not carry."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
_SHARED = Path(os.environ.get("PENSTOCK_SHARED", REPOSITORY.parent / "shared")) / "data"


def shared_data(*parts: str) -> Path:
    """Path of a shared data file; skips the test, saying why, where it is absent."""
    path = _SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"shared data file {'/'.join(parts)} is not here (set PENSTOCK_SHARED)")
    return path
