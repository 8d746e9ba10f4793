from __future__ import annotations

from collections.abc import Iterator

import pytest

from live_server import LiveServer


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    """A server with a fake engine that all tests of a module share; they leave it as it was."""
    with LiveServer() as server:
        yield server
