"""The commands that the README and the pages show do what is said of them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from paths import REPOSITORY
from served import Served

pytestmark = pytest.mark.doors

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PROGRAMS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served("demo", "--pp", "2", "--threads-per-rank", "1") as served:
        yield served


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_the_first_curl_of_the_readme_streams_an_answer(server: Served) -> None:
    (command,) = [block for block in blocks(README, "") if block.startswith("curl ")]
    words = shlex.split(command.replace("\\\n", " ").replace("http://127.0.0.1:8000", server.url))
    said = subprocess.run([*words, "-sS"], capture_output=True, text=True, timeout=120, check=True).stdout
    events = [line.removeprefix("data: ") for line in said.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[0])["object"] == "chat.completion.chunk"


def test_the_python_client_of_the_readme_prints_an_answer(
    server: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (program,) = [block for block in blocks(README, "python") if "stream = client" in block]
    real = openai.OpenAI

    def client(**options: Any) -> openai.OpenAI:
        assert options["base_url"] == "http://127.0.0.1:8000/v1"
        return real(**options | {"base_url": f"{server.url}/v1"})

    monkeypatch.setattr(openai, "OpenAI", client)
    exec(program.replace("Qwen/Qwen2.5-0.5B-Instruct", "demo"), {})
    assert capsys.readouterr().out.strip()


def test_the_engine_of_the_readme_runs_as_a_program(tmp_path: Path) -> None:
    (text,) = [block for block in blocks(README, "python") if "from penstock import LLM" in block]
    program = tmp_path / "program.py"
    program.write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^(length|stop) ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("complete 'ROMEO:' --max-tokens 8", r"\w"),
        ("trace --out {folder}/trace.json", "trace"),
        ("bench serve --num-prompts 8 --random-output-len 8", "tokens"),
    ],
)
def test_a_command_talks_to_a_running_server(server: Served, tmp_path: Path, words: str, said: str) -> None:
    command = [str(PROGRAMS / "penstock"), *shlex.split(words.format(folder=tmp_path)), "--url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(said, done.stdout + done.stderr)


def test_the_table_of_commands_names_every_command() -> None:
    shown = subprocess.run(
        [str(PROGRAMS / "penstock"), "--help"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    for command in ("serve", "chat", "complete", "plan", "bench", "cache", "kernels", "trace", "doctor"):
        assert f"`penstock {command}" in README
        assert re.search(rf"\b{command}\b", shown)
