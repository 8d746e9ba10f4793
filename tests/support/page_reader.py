"""A reader who types what a page says: commands into a shell, programs into files, in a folder of their own.

What the page takes for granted is there. A server runs, and the names of the pages are those of small models
(`page_models`). In place of `claude`, `codex` and `prometheus` programs of ours read the same settings and
send the server what these would send.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from namespaces import NetworkUnavailableError
from served import Served

PROGRAMS = Path(sys.executable).parent
SUPPORT = Path(__file__).parent
KEY = "a-key"
_LIMIT_S = 300
_STARTING = ("penstock serve", "penstock bench throughput", "penstock bench latency")
_AFTERWARDS = ("penstock serve", "penstock replay", "penstock rm")  # typed when the server has ended
_CLIENTS = ("chat", "complete", "trace", "bench serve")
_TYPED_INTO = {
    "penstock chat": "Who are you?\n/exit\n",
    "penstock complete": "Once upon a time",
    "penstock rm": "y\n",
    "penstock cache clear": "y\n",
}

_CLAUDE = """
import os
from anthropic import Anthropic

names = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
with Anthropic() as client:
    for model in {os.environ[f"ANTHROPIC_{name}"] for name in names}:
        asked = [{"role": "user", "content": "Who are you?"}]
        print(client.messages.create(model=model, max_tokens=8, messages=asked).content[0].text)
"""
_CODEX = """
import tomllib
from pathlib import Path
from openai import OpenAI

config = tomllib.loads((Path.home() / ".codex" / "config.toml").read_text())
provider = config["model_providers"][config["model_provider"]]
assert provider["wire_api"] == "responses"
with OpenAI(base_url=provider["base_url"], api_key="none") as client:
    asked = {"model": config["model"], "input": "Who are you?", "max_output_tokens": 8}
    *_, last = client.responses.create(**asked, stream=True)
    assert last.type in ("response.incomplete", "response.completed")
"""
_PROMETHEUS = """
import sys
import urllib.request
from pathlib import Path
import yaml

config = yaml.safe_load(Path(sys.argv[1]).read_text())
assert set(config) == {"scrape_configs", "rule_files"}
assert all(Path(name).is_file() for name in config["rule_files"])
for job in config["scrape_configs"]:
    for target in [target for each in job["static_configs"] for target in each["targets"]]:
        with urllib.request.urlopen(f"http://{target}/metrics") as answer:
            print(answer.read().decode())
"""
_STAND_INS = {"claude": _CLAUDE, "codex": _CODEX, "prometheus": _PROMETHEUS}


class PageReader:
    """Types the commands of one page, from the top to the bottom.

    Args:
        folder: the working directory and home.
        url: of the server that runs when the reader begins; one that the page starts takes its place.
        variables: of the environment, beside those of this process.
        written: what stands on the page -> what is typed in its place.
        started: lines that have started engines, for any page. They are not typed again, and in place of a
            server that one would start the page asks the one that runs.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        variables: Mapping[str, str],
        written: Mapping[str, str],
        started: set[str],
    ) -> None:
        self.folder = folder
        self._url = self._url_at_first = url
        self._written = written
        self._started = started
        self._num_programs = 0
        self._served: Served | None = None
        self._variables = {
            **os.environ,
            "HOME": str(folder),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
            "PATH": f"{folder / 'bin'}:{PROGRAMS}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            **variables,
        }
        (folder / "bin").mkdir(parents=True)
        for name, text in _STAND_INS.items():
            program = folder / "bin" / name
            program.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
            program.chmod(0o755)

    def type(self, line: str) -> str:
        """Type a line; return what it prints. A server stays up until a line follows that needs its end."""
        line = self.as_typed(line)
        words = [re.sub("^~", str(self.folder), word) for word in shlex.split(line, comments=True)]
        if words[0] == "export":
            self._variables |= dict(word.split("=", 1) for word in words[1:])
            return ""
        if line.startswith(_AFTERWARDS):
            self.close()
        if line.startswith(_STARTING):
            line = shlex.join(words)
            if line in self._started:
                return ""
            self._started.add(line)
        if line.startswith("penstock serve"):
            return self._serve(*words[2:])
        if line.startswith(tuple(f"penstock {client}" for client in _CLIENTS)) and "--url" not in words:
            line += f" --url {self._url}"
        return self._run(["bash", "-c", re.sub(r"^curl ", "curl -sS --fail-with-body ", line)], line)

    def run_program(self, text: str) -> str:
        """Write a program into a file and run it; return what it prints."""
        self._num_programs += 1
        name = f"program{self._num_programs}.py"
        (self.folder / name).write_text(self.as_typed(text), encoding="utf-8")
        return self._run([sys.executable, name], text)

    def write(self, name: str, text: str) -> None:
        """Write what a page shows of a file into that file."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.as_typed(text), encoding="utf-8")

    def read(self, path: str, until: str = "\n") -> str:
        """Return what a route of the server answers, up to the first line with this in it."""
        lines = []
        with urllib.request.urlopen(self._url + path, timeout=60) as answer:
            for line in answer:
                lines.append(line.decode())
                if until in lines[-1]:
                    break
        return "".join(lines)

    def as_typed(self, text: str) -> str:
        """Return a text of the page with what is here in place of what is written there."""
        host = self._url.partition("://")[2]
        here = {".venv/bin/penstock": "penstock", "localhost:8000": host, "server:8000": host}
        urls = {f"{scheme}://127.0.0.1:8000": self._url for scheme in ("http", "https")}
        for written, real in (here | urls | dict(self._written)).items():
            text = text.replace(written, real)
        return text

    def close(self) -> None:
        """End the server that the page has started, if there is one."""
        if self._served is not None:
            served, self._served, self._url = self._served, None, self._url_at_first
            try:
                assert served.stop() == 0, served.output
            finally:
                served.__exit__()

    def _serve(self, *words: str) -> str:
        served = Served(*words, env=self._variables, folder=self.folder)
        try:
            self._served = served.__enter__()
        except BaseException:
            served.__exit__()
            raise
        self._url = served.url
        asked = json.dumps({"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(f"{self._url}/v1/completions", asked, headers)
        unproved = ssl._create_unverified_context()  # the page's own client proves the certificate
        with urllib.request.urlopen(request, timeout=120, context=unproved) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        return served.output

    def _run(self, command: list[str], text: str) -> str:
        typed_into = next((words for begin, words in _TYPED_INTO.items() if text.startswith(begin)), "")
        done = subprocess.run(
            command,
            input=typed_into,
            cwd=self.folder,
            env=self._variables,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        if NetworkUnavailableError.__name__ in done.stderr:
            raise NetworkUnavailableError(done.stderr.splitlines()[-1])
        assert done.returncode == 0, f"{text}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout + done.stderr
