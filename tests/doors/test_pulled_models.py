"""Programs that download: a pull that is killed goes on, and a server fetches the model that it serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_hub import FakeHub, fake_hub
from paths import REPOSITORY
from served import Served, wait_until

pytestmark = pytest.mark.doors

DEMO = REPOSITORY / "src" / "penstock" / "assets" / "demo"
LARGE = bytes(range(256)) * (1 << 19)
CUT = 40 << 20
TIMEOUT_S = 120


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        yield hub


def environment(hub: FakeHub, folder: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(folder), "OLLAMA_MODELS": str(folder / "none")}


def test_a_pull_that_is_killed_goes_on_where_it_stopped(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/large", {"large-Q8_0.gguf": LARGE})
    environ = os.environ | environment(hub, tmp_path)
    command = [sys.executable, "-m", "penstock", "pull", "org/large:Q8_0", "--json"]
    blobs = tmp_path / "models--org--large" / "blobs"

    def has_come() -> bool:
        return any(path.stat().st_size > CUT // 2 for path in blobs.glob("*.incomplete"))

    hub.cuts, hub.held = [CUT], threading.Event()
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as first:
        wait_until(has_come, TIMEOUT_S)
        first.kill()
    hub.held.set()
    (partial,) = blobs.iterdir()
    come = partial.stat().st_size
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    told = json.loads(done.stdout)
    assert hub.contents_asked()[-1] == ("large-Q8_0.gguf", f"bytes={come}-")
    assert told["downloaded"] == len(LARGE) - come < len(LARGE)
    assert Path(told["path"]).read_bytes() == LARGE


def test_a_server_fetches_the_model_that_it_serves(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/demo", {path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()})
    arguments = ("org/demo", "--download", "--threads-per-rank", "1")
    for asked_for_files in (True, False):
        hub.asked.clear()
        with Served(*arguments, env=environment(hub, tmp_path)) as server:
            body = json.dumps({"model": "org/demo", "prompt": "ROMEO:", "max_tokens": 4}).encode()
            request = urllib.request.Request(
                f"{server.url}/v1/completions", body, {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
        assert bool(hub.asked) == asked_for_files
