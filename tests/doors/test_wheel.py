"""The wheel, installed into an empty environment outside the checkout, serves the demo model by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from paths import REPOSITORY
from penstock.server.routes.page import PAGE_FILES
from served import Served

pytestmark = pytest.mark.doors

INSTALL_LIMIT_S = 900


def run(*command: str | Path, folder: Path) -> str:
    """Run a command in a folder that has nothing of ours, and return what it printed."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=INSTALL_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, REPOSITORY, folder=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel and what it asks for, and nothing else."""
    folder = tmp_path_factory.mktemp("empty")
    run(sys.executable, "-m", "venv", folder / "env", folder=folder)
    python = folder / "env" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run(*pip, f"torch=={version('torch').split('+')[0]}", folder=folder)  # first and alone, as `./run` does
    run(*pip, wheel, folder=folder)
    return python


def test_the_wheel_carries_the_package_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"penstock", f"penstock-{version('penstock')}.dist-info"}
    files = ("assets/demo/model.safetensors", "kernels/cpu/csrc/abi.h", "process/entry_points.py")
    for needed in (*files, *(f"assets/page/{each.name}" for each in PAGE_FILES)):
        assert f"penstock/{needed}" in names


def test_the_program_says_what_it_is(python: Path, tmp_path: Path) -> None:
    said = run(python.parent / "penstock", "version", folder=tmp_path)
    assert said.startswith(f"penstock {version('penstock')} ")
    assert "penstock serve" in run(python.parent / "penstock", "--help", folder=tmp_path)


def test_the_demo_model_is_served_from_an_empty_environment(python: Path) -> None:
    with Served("demo", "--pp", "2", "--threads-per-rank", "1", python=str(python)) as server:
        answer = server.post("/v1/completions", model="demo", prompt="ROMEO:", max_tokens=8, temperature=0)
        assert answer["usage"]["completion_tokens"] == 8
        assert server.stop() == 0


def test_a_program_uses_the_engine_from_an_empty_environment(python: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from penstock import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    with LLM('demo', pipeline_parallel_size=2, threads_per_rank=1) as llm:\n"
        "        (result,) = llm.generate('ROMEO:', SamplingParams(temperature=0.0, max_tokens=4))\n"
        "        print(len(result.outputs[0].token_ids))\n",
        encoding="utf-8",
    )
    assert run(python, program, folder=tmp_path).split()[-1] == "4"
