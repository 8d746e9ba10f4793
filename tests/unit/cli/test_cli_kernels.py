"""`penstock kernels`: what is printed, and the exit codes."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from kernel_builds import build_environment, build_for
from penstock.cli import kernels as cli_kernels
from penstock.cli.program import run
from penstock.cli.terminal import Invocation


def kernels(*words: str, **environ: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    invocation = Invocation(stdout=out, stderr=err, stdin=StringIO(), environ=environ)
    return run(["kernels", *words], invocation), out.getvalue(), err.getvalue()


def test_build_shows_compiler_flags_isa_time_and_place() -> None:
    made = build_for("-march=native")
    code, out, err = kernels("build", **build_environment("-march=native"))
    assert (code, err) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert list(rows) == ["compiler", "flags", "isa", "seconds", "path"]
    assert made.compiler.version in rows["compiler"]
    assert made.compiler.target in rows["compiler"]
    assert "-march=native" in rows["flags"]
    assert rows["seconds"] == "0, taken from the cache"
    assert rows["path"] == str(made.path)


def test_build_without_a_compiler_is_exit_1_with_the_remedy() -> None:
    code, out, err = kernels(
        "build", **build_environment("-march=native") | {"PENSTOCK_CXX": "/nonexistent/g++"}
    )
    assert (code, out) == (1, "")
    first, second = err.splitlines()
    assert first.startswith("error: no kernels were built: no C++ compiler found")
    assert "apt install g++" in second


def test_build_that_cannot_be_kept_is_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    unkept = replace(build_for("-march=native"), seconds=2.0, not_kept="/x is no folder")
    monkeypatch.setattr(cli_kernels, "build", lambda *_, **__: unkept)
    code, out, err = kernels("build")
    assert (code, out) == (1, "")
    first, second = err.splitlines()
    assert first == "error: the kernels were built but not kept: /x is no folder."
    assert "PENSTOCK_CACHE_DIR" in second


def test_clear_says_what_it_removed(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    (folder / "penstock-0-1-2.so").write_bytes(bytes(300_000))
    code, out, _ = kernels("clear", PENSTOCK_CACHE_DIR=str(tmp_path))
    assert code == 0
    assert out == f"removed 1 kernel library, 0.3 MB, from {folder}\n"
    assert list(folder.iterdir()) == []


def test_clear_of_a_folder_that_is_not_ours_alone_is_exit_1(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    code, _, err = kernels("clear", PENSTOCK_CACHE_DIR=str(tmp_path))
    assert code == 1
    assert "others can write to" in err


def test_the_group_has_a_help_screen() -> None:
    code, out, _ = kernels()
    assert code == 0
    assert "kernels build" in out
    assert "PENSTOCK_CACHE_DIR" in out
    assert kernels("--help") == (0, out, "")
    assert kernels("make")[0] == 2
