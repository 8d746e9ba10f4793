"""What an actor of Ray does: it runs a worker, which ends with it (row I2)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.hosts.launchers import ray_worker
from penstock.hosts.launchers.own_directory import own_directory
from penstock.hosts.launchers.ray_worker import RayWorker, WorkerOrder
from penstock.process import entry_points
from penstock.trust.token_prompt import JOIN_TOKEN

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def order(token_file: str, *words: str) -> WorkerOrder:
    """Return the order for a worker whose head nobody has started."""
    return WorkerOrder(f"127.0.0.1:{closed_port()}", token_file, words)


def test_i2_the_end_of_a_worker_comes_with_its_code_and_its_last_words(tmp_path: Path) -> None:
    worker = RayWorker("engine-1", 2, order(str(tmp_path / "no-token"), "--away-limit", "5"), lambda: None)
    assert worker.host_name().endswith("-2")
    for _ in range(2):  # the second one starts when it is waited for
        code, said = worker.run()
        assert code != 0
        assert "does not exist" in said
        assert "no-token" in said


def test_i2_a_worker_starts_with_its_actor_before_anybody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[str] = []
    monkeypatch.setattr(ray_worker, "tied_command", lambda *words: given.extend(words) or ["true"])
    worker = RayWorker("engine-1", 1, order("/no/file"), lambda: None)
    assert given[:2] == ["penstock", "worker"]
    given.clear()
    assert worker.run() == (0, "")
    assert not given
    assert worker.run() == (0, "")
    assert given


def test_i2_what_keeps_a_worker_from_starting_is_said_to_who_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_worker, "tied_command", lambda *_: ["/no/such/python"])
    worker = RayWorker("engine-1", 1, order("/no/file"), lambda: None)
    with pytest.raises(FileNotFoundError, match="/no/such/python"):
        worker.run()


def test_i2_a_token_in_the_environment_goes_before_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOIN_TOKEN, "P1-THIS-IS-NO-TOKEN")
    code, said = RayWorker("engine-1", 1, order("/no/file"), lambda: None).run()
    assert code != 0
    assert "the join token is mistyped" in said


def test_i2_an_actor_that_nobody_wants_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_worker, "UNUSED_S", 0.0)
    given_back = threading.Event()
    RayWorker("engine-1", 1, order("/no/file"), given_back.set).run()
    assert given_back.wait(WAIT_S)


def test_i2_a_worker_deletes_what_killed_ones_of_other_engines_have_left(tmp_path: Path) -> None:
    killed, living = own_directory("killed"), own_directory("living")
    killed.release()
    worker = RayWorker("engine-1", 1, order(str(tmp_path / "no-token")), lambda: None)
    worker.run()
    assert not killed.path.exists()
    assert living.path.exists()
    assert {path.name for path in living.path.parent.iterdir()} == {"living", "engine-1"}
    living.delete()


PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", sys.argv[1], str(os.getpid()), "tied_child", "word"])
print(child.pid, flush=True)
time.sleep(600)
"""
CHILD = """
import sys, time
print("up", *sys.argv[1:], flush=True)
time.sleep(600)
"""


def test_i2_a_tied_process_runs_a_module_and_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "tied_child.py").write_text(CHILD)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, entry_points.TIED_PROCESS],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        said = [parent.stdout.readline().split() for _ in range(2)]
        child = next(int(words[0]) for words in said if len(words) == 1)
        assert ["up", "word"] in said
        watched = os.pidfd_open(child)
        parent.send_signal(signal.SIGKILL)
        parent.wait(WAIT_S)
        assert parent.stdout.read() == "", "the child has closed it too"
        os.close(watched)
