"""What all tests share: the same examples in every run, and a temporary folder for each worker."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

from disturbed import DemoServers, Server
from told_connections import tell_connections

settings.register_profile("penstock", derandomize=True, deadline=None, database=None)
settings.load_profile("penstock")


def pytest_configure() -> None:
    """Let workers share built kernels, let interrupts reach tests, which workers ignore, and let warnings of
    connections say whose they are.

    Threads of OpenMP that wait for work sleep at once. Otherwise each of them keeps a core busy for some
    milliseconds after every operation of torch, and the cores have other tests to run. OpenMP reads the
    variable when torch is imported, which is later than this.
    """
    os.environ.setdefault("PENSTOCK_TEST_BUILDS", tempfile.gettempdir())
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    tell_connections()


def pytest_collection() -> None:
    """Let the garbage collector rest while tests are collected: all that is made then is kept."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Let it work again, and pass over the collected tests: a look at them takes a tenth of a second."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def demo_servers() -> Iterator[DemoServers]:
    servers = DemoServers()
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def demo_server(demo_servers: DemoServers) -> Server:
    """The demo model over two stages, asked by many modules; what a test has killed has come back."""
    return demo_servers.running()


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder() -> Iterator[None]:
    """Give each worker a TMPDIR of its own: engines are held to leave nothing there."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    before, folder = os.environ.get("TMPDIR"), tempfile.mkdtemp(prefix="tests-")
    os.environ["TMPDIR"], tempfile.tempdir = folder, folder
    yield
    tempfile.tempdir = None
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before
    shutil.rmtree(folder, ignore_errors=True)
