"""`penstock pull` and `serve --download`: what is printed, the exit codes, and that nothing else connects."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from fake_hub import FakeHub, fake_hub, own_model_folders
from model_stores import in_hub_cache
from penstock.cli import serve as cli_serve
from penstock.cli.models.progress import BarProgress, LinesProgress, progress_on
from penstock.cli.program import run
from penstock.cli.terminal import Invocation
from penstock.hub.repository import HubFile

NAME = "org/some-model"
PLAIN = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": bytes(5000)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    own_model_folders(monkeypatch, tmp_path)
    with fake_hub() as hub:
        hub.add(NAME, PLAIN)
        yield hub


def penstock(*words: str, **environ: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    invocation = Invocation(stdout=out, stderr=err, stdin=StringIO(), environ=environ)
    return run(words, invocation), out.getvalue(), err.getvalue()


def test_pull_says_what_came_where_it_is_and_how_to_serve_it(hub: FakeHub, tmp_path: Path) -> None:
    commit = hub.branches[NAME]["main"]
    code, out, err = penstock("pull", NAME, "--endpoint", hub.url)
    snapshot = tmp_path / "cache" / "models--org--some-model" / "snapshots" / commit
    assert code == 0
    assert out.splitlines() == [
        f"{NAME} main {commit[:12]}: 3 files, 5.0 kB, 5.0 kB downloaded now",
        f"in {snapshot}",
        f"penstock serve {NAME}",
    ]
    assert err.splitlines() == [
        "config.json is complete, 2 B",
        "tokenizer.json is complete, 2 B",
        "model.safetensors is complete, 5.0 kB",
    ]
    code, out, err = penstock("pull", NAME, "--endpoint", hub.url + "/")
    assert (code, err) == (0, "")
    assert "nothing downloaded now" in out


def test_pull_as_json(hub: FakeHub) -> None:
    code, out, _ = penstock("pull", NAME, "--endpoint", hub.url, "--json")
    told = json.loads(out)
    assert code == 0
    assert {key: told[key] for key in ("name", "revision", "size", "downloaded")} == {
        "name": NAME,
        "revision": "main",
        "size": 5004,
        "downloaded": 5004,
    }
    assert [(file["path"], file["size"]) for file in told["files"]] == [
        (path, len(content)) for path, content in PLAIN.items()
    ]
    assert Path(told["path"]).name == told["commit"]


@pytest.mark.parametrize("name", ["PENSTOCK_HUB_ENDPOINT", "HF_ENDPOINT"])
def test_the_endpoint_can_come_from_the_environment(hub: FakeHub, name: str) -> None:
    assert penstock("pull", NAME, **{name: hub.url})[0] == 0
    assert hub.asked


def test_another_revision_is_served_by_its_path(hub: FakeHub) -> None:
    commit = hub.add(NAME, PLAIN, "v1.1")
    _, out, _ = penstock("pull", NAME, "--revision", "v1.1", "--endpoint", hub.url)
    assert out.splitlines()[-1].startswith("penstock serve /")
    assert out.splitlines()[-1].endswith(commit)


def test_the_token_is_read_from_a_file_and_never_shown(hub: FakeHub, tmp_path: Path) -> None:
    hub.needs_token[NAME] = "hf_secret"
    file = tmp_path / "mine"
    file.write_text("# of my account\nhf_secret\n")
    words = ("pull", NAME, "--endpoint", hub.url, "--token-file", str(file))
    file_of_others = tmp_path / "other"
    file_of_others.write_text("hf_wrong\n")
    code, out, err = penstock(*words[:-1], str(file_of_others), "-v")
    assert code == 5
    assert "is gated" in err
    assert "hf_wrong" not in out + err
    code, out, err = penstock(*words)
    assert code == 0
    assert "hf_secret" not in out + err
    file.write_text("one\ntwo\n")
    code, _, err = penstock(*words)
    assert code == 2
    assert "holds 2 lines" in err
    assert penstock("pull", NAME, "--token", "hf_secret")[0] == 2


@pytest.mark.parametrize(
    ("words", "expected", "told"),
    [
        (["pull"], 2, "Usage: penstock pull ORG/NAME"),
        (["pull", "name"], 2, "not the name of a model on the hub"),
        (["pull", "a/b", "c/d"], 2, "does not take the word 'c/d'"),
        (["pull", "org/absent"], 3, "has no model org/absent"),
        (["pull", f"{NAME}:Q4_0"], 3, "has no GGUF files"),
        (["pull", NAME, "--revision", "v9"], 3, "no branch, tag or commit v9"),
        (["pull", NAME, "--revision", "../x"], 2, "--revision"),
        (["pull", NAME, "--endpoint", "hub"], 2, "is not the address of a hub"),
        (["pull", NAME, "--endpoint", "http://127.0.0.1:1"], 5, "cannot be reached"),
    ],
)
def test_errors_have_an_exit_code_and_say_what_to_do(
    hub: FakeHub, words: list[str], expected: int, told: str
) -> None:
    code, out, err = penstock(*words, PENSTOCK_HUB_ENDPOINT=hub.url)
    assert (code, out) == (expected, "")
    assert told in err
    assert len(err.splitlines()) == 2, "what happened, and what to do"


def test_an_interrupted_pull_says_how_to_go_on(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: LinesProgress, num_bytes: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LinesProgress, "advance", interrupt)
    code, _, err = penstock("pull", NAME, "--endpoint", hub.url)
    assert code == 130
    assert "the same command continues where it stopped" in err


class _Refusing(io.StringIO):
    """A stream that takes nothing."""

    def __init__(self, number: int, is_terminal: bool) -> None:
        super().__init__()
        self._number = number
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize(("number", "expected"), [(errno.ENOSPC, 0), (errno.EPIPE, 1)])
def test_a_display_on_a_full_disk_does_not_end_a_download(
    hub: FakeHub, number: int, expected: int, is_terminal: bool
) -> None:
    out, err = StringIO(), _Refusing(number, is_terminal)
    invocation = Invocation(stdout=out, stderr=err, stdin=StringIO(), environ={})
    assert run(("pull", NAME, "--endpoint", hub.url), invocation) == expected
    assert ("3 files" in out.getvalue()) is (expected == 0)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_plain_elsewhere() -> None:
    times = iter([0.0, 0.0, 0.1, 1.0, 1.0, 2.0, 2.0, 2.0])
    terminal = _Terminal()
    bar = progress_on(terminal, lambda: next(times))
    assert isinstance(bar, BarProgress)
    file = HubFile(path="model.safetensors\x1b[31m", size=4000, blob="0")
    bar.begin(file, 1000)
    bar.advance(1000)  # too early for the eye
    bar.advance(1000)
    bar.advance(-2000)
    bar.end()
    shown = [line.rstrip() for line in terminal.getvalue().split("\r")[1:]]
    assert [line.partition("  ")[2] for line in shown] == [
        "1.0 kB of 4.0 kB",
        "3.0 kB of 4.0 kB, 2.0 kB/s",
        "1.0 kB of 4.0 kB, 1.0 kB/s",
        "1.0 kB of 4.0 kB, 1.0 kB/s",
    ]
    assert "\x1b" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\n")
    plain = StringIO()
    lines = progress_on(plain, lambda: 0.0)
    lines.begin(file, 1000)
    lines.advance(3000)
    lines.end()
    assert plain.getvalue().splitlines() == [
        "model.safetensors\\x1b[31m continues at 1.0 kB of 4.0 kB",
        "model.safetensors\\x1b[31m is complete, 4.0 kB",
    ]


# --- serve ------------------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that a supervisor was started for; none is."""
    models: list[str] = []

    def record(engine: object, *_: object) -> int:
        models.append(engine.model.model)  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr(cli_serve, "run_supervisor", record)
    return models


def test_serve_downloads_a_model_that_is_not_here_when_asked_to(hub: FakeHub, served: list[str]) -> None:
    environ = {"HF_ENDPOINT": hub.url}
    code, _, err = penstock("serve", NAME, "--download", **environ)
    assert (code, served) == (0, [NAME])
    assert "model.safetensors is complete" in err
    hub.asked.clear()
    assert penstock("serve", NAME, "--download", **environ)[0] == 0
    assert hub.asked == []


@pytest.mark.parametrize(
    "words", [["--speculative-model", NAME], ["--speculative-config", json.dumps({"model": NAME})]]
)
def test_serve_downloads_a_draft_model_too(hub: FakeHub, served: list[str], words: list[str]) -> None:
    code, _, err = penstock("serve", "demo", *words, "--download", HF_ENDPOINT=hub.url)
    assert (code, served) == (0, ["demo"])
    assert "model.safetensors is complete" in err


@pytest.mark.parametrize(
    "words", [["serve", NAME], ["serve", "demo", "--download"], ["serve", ".", "--download"]]
)
def test_serve_asks_the_hub_for_nothing_else(hub: FakeHub, served: list[str], words: list[str]) -> None:
    assert penstock(*words, HF_ENDPOINT=hub.url)[0] == 0
    assert served == [words[1]]
    assert hub.asked == []


def test_serve_does_not_ask_the_hub_which_of_several_files_is_meant(
    hub: FakeHub, served: list[str], tmp_path: Path
) -> None:
    in_hub_cache(tmp_path / "cache", NAME, {"a-Q4_0.gguf": b"x", "a-Q8_0.gguf": b"x"})
    assert penstock("serve", NAME, "--download", HF_ENDPOINT=hub.url)[0] == 0
    assert (served, hub.asked) == ([NAME], [])


def test_serve_ends_where_the_download_fails(hub: FakeHub, served: list[str]) -> None:
    code, _, err = penstock("serve", "org/absent", "--download", HF_ENDPOINT=hub.url)
    assert (code, served) == (3, [])
    assert "has no model org/absent" in err


def test_rule_7_nothing_but_pull_and_download_opens_a_connection(tmp_path: Path) -> None:
    """Neither a model that is here nor one that is not lets a command speak to a hub, or load its library."""
    program = (
        "import socket, sys\n"
        "def refuse(*_): raise AssertionError('a connection')\n"
        "socket.socket.connect = socket.socket.connect_ex = refuse\n"
        "from penstock.cli.program import run\n"
        "from penstock.cli.terminal import Invocation\n"
        "for words in (['ls'], ['ls', '--json'], ['serve', 'org/absent', '--port', '0'],\n"
        "              ['rm', 'org/absent', '--yes']):\n"
        "    print(words[0], run(words, Invocation.of_process()))\n"
        "libraries = {'huggingface_hub', 'httpx', 'httpx2', 'penstock.hub.client'}\n"
        "print('loaded:', sorted(libraries & set(sys.modules)))\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        home = {"HOME": str(tmp_path), "OLLAMA_MODELS": str(tmp_path), "PATH": "/usr/bin:/bin"}
        home |= {"HF_ENDPOINT": f"http://127.0.0.1:{trap.getsockname()[1]}", "PYTHONPATH": ":".join(sys.path)}
        result = subprocess.run(
            [sys.executable, "-c", program],
            env=home,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        with pytest.raises(BlockingIOError):
            trap.accept()
    assert "a connection" not in result.stderr
    ends = [line for line in result.stdout.splitlines() if line.startswith(("ls ", "serve ", "rm "))]
    assert ends == ["ls 0", "ls 0", "serve 3", "rm 3"], result.stderr
    assert "loaded: []" in result.stdout
