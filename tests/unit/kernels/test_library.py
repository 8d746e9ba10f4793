"""The loaded kernel library: its types, its self-test, and what is said where there is none."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernel_builds import build_environment, build_for, built, targets
from penstock.errors import UsageError
from penstock.kernels.cpu import library
from penstock.kernels.cpu.compiler import Built, Compiler, NotBuilt, read_sources
from penstock.kernels.cpu.library import (
    KERNEL_NAMES,
    LibraryError,
    LoadedKernels,
    load,
    load_built,
    open_library,
    parse_kernels,
    self_test,
    signatures,
)


@pytest.fixture
def fresh() -> Iterator[None]:
    """As in a process that has loaded nothing yet."""
    library._load_once.cache_clear()
    yield
    library._load_once.cache_clear()


def garbage(directory: Path) -> Built:
    path = directory / "library.so"
    path.write_bytes(b"\x7fELF" + bytes(100))
    compiler = Compiler(command=("g++",), version="g++ 1.2.3", target="x86")
    return Built(path=path, compiler=compiler, flags=(), sources={}, seconds=1.0)


# --- which kernels ----------------------------------------------------------------------------------


def test_kernels_are_chosen_by_name() -> None:
    assert parse_kernels("auto").enabled == set(KERNEL_NAMES)
    assert parse_kernels("off").enabled == set()
    assert parse_kernels("-attention,-head").enabled == {"linear", "norm", "experts"}
    assert parse_kernels(" -norm , -norm").enabled == {"linear", "attention", "head", "experts"}


@pytest.mark.parametrize(
    "text", ["", "on", "attention", "-", "-flash", "-head,", "-head -norm", "auto,-head"]
)
def test_an_unknown_choice_names_the_known_ones(text: str) -> None:
    with pytest.raises(UsageError, match="does not switch anything off") as caught:
        parse_kernels(text)
    assert caught.value.param == "kernels"
    assert "-attention" in caught.value.remedy


# --- without a library ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["off", "-linear,-norm,-attention,-head,-experts"])
def test_switched_off_builds_and_loads_nothing(
    text: str, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    monkeypatch.setattr(library, "build", lambda *_: pytest.fail("nothing is to be built"))
    loaded = load(text)
    assert loaded.library is None
    assert loaded.isa == ""
    assert loaded.reason == "switched off"


def test_the_reason_of_a_failed_build_is_handed_on() -> None:
    loaded = load_built(NotBuilt(cause="no compiler", reason="no C++ compiler found"))
    assert loaded.library is None
    assert loaded.reason == "no C++ compiler found"
    assert "apt install g++" in loaded.remedy


def test_garbage_is_not_loaded(tmp_path: Path) -> None:
    loaded = load_built(garbage(tmp_path))
    assert loaded.library is None
    assert "cannot be loaded" in loaded.reason
    assert "g++ 1.2.3" in loaded.reason
    assert "penstock kernels clear" in loaded.remedy


def test_a_library_without_our_functions_is_not_loaded() -> None:
    with pytest.raises(LibraryError, match="penstock_missing"):
        open_library(
            replace(build_for("-march=native"), sources={"x.cpp": b"PENSTOCK_EXPORT void penstock_missing()"})
        )


@pytest.mark.parametrize("isa", [b"", None, b"avx2"])
def test_a_library_that_computes_nothing_fails_its_self_test(isa: bytes | None) -> None:
    idle: Any = SimpleNamespace(
        penstock_isa=lambda: isa, penstock_pack=lambda *_: None, penstock_linear=lambda *_: None
    )
    with pytest.raises(LibraryError, match="self-test"):
        self_test(idle)


def test_a_failed_self_test_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_product", lambda *_: [[0.0]])
    loaded = load_built(build_for("-march=native"))
    assert loaded.library is None
    assert "self-test" in loaded.reason


# --- with one ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", targets())
def test_a_build_for_every_target_passes_the_self_test(flags: str) -> None:
    isa = self_test(built(flags))
    expected = {"-march=x86-64-v4": "avx512", "-march=x86-64-v3": "avx2", "-march=x86-64": "portable"}
    assert isa == expected.get(flags, isa)


def test_signatures_are_those_of_the_sources() -> None:
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    found = signatures(read_sources())
    assert found["penstock_linear"] == (None, [pointer, pointer])
    assert found["penstock_add_rms_norm"] == (None, [pointer, pointer])
    assert found["penstock_isa"] == (ctypes.c_char_p, [])
    assert found["penstock_pack"] == (None, [pointer, pointer, i64, i64, i64, i32, i32])
    exports = sum(
        content.count(b"PENSTOCK_EXPORT ") for name, content in read_sources().items() if name != "abi.h"
    )
    assert len(found) == exports


@pytest.mark.parametrize("declaration", ["Step penstock_x(int32_t a)", "void penstock_x(Step a)"])
def test_a_type_without_a_counterpart_is_refused(declaration: str) -> None:
    with pytest.raises(LibraryError, match="'Step"):
        signatures({"x.cpp": f"PENSTOCK_EXPORT {declaration} {{}}".encode()})


def test_functions_have_their_types() -> None:
    loaded = built()
    assert loaded.penstock_isa.restype is ctypes.c_char_p
    assert loaded.penstock_linear.argtypes == [ctypes.c_void_p, ctypes.c_void_p]
    with pytest.raises(ctypes.ArgumentError):
        loaded.penstock_linear(1.5, None)


def test_a_library_out_of_the_cache_is_removed_once_loaded(tmp_path: Path) -> None:
    kept = build_for("-march=native")
    private = tmp_path / "private"
    private.mkdir()
    copy = private / "library.so"
    copy.write_bytes(kept.path.read_bytes())
    loaded = load_built(replace(kept, path=copy, seconds=2.1, not_kept="no home", private_folder=private))
    assert not private.exists()
    assert loaded.library is not None
    assert self_test(loaded.library) == loaded.isa
    assert loaded.reason == f"built in 2.1 s with {kept.compiler.label}, not kept: no home"
    assert "PENSTOCK_CACHE_DIR" in loaded.remedy


def test_a_process_loads_once_whatever_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    calls: list[int] = []
    all_here = threading.Barrier(8)
    answers: list[LoadedKernels] = []

    def build_slowly(*_: object) -> NotBuilt:
        calls.append(1)
        return NotBuilt(cause="cpu", reason="old")

    def rank() -> None:
        all_here.wait()
        answers.append(load())

    monkeypatch.setattr(library, "build", build_slowly)
    ranks = [threading.Thread(target=rank) for _ in range(8)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert len(calls) == 1
    assert len({id(answer) for answer in answers}) == 1
    assert load("-head") is answers[0]


def test_a_process_without_torch_can_load_too() -> None:
    build_for("-march=native")
    program = (
        "import sys\n"
        "from penstock.kernels.cpu.library import load\n"
        "loaded = load()\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "print(loaded.isa, loaded.reason, sep='|')\n"
    )
    environ = {**build_environment("-march=native"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    isa, reason = done.stdout.strip().split("|")
    assert isa == self_test(built())
    assert reason.startswith("from cache")


def test_torchs_openmp_is_taken_where_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load_unless_system(name: str, **_: object) -> None:
        if name == "libgomp.so.1":
            raise OSError("no such file")
        loaded.append(name)

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(library.ctypes, "CDLL", load_unless_system)
    library._provide_openmp()
    assert "torch" not in sys.modules
    assert [Path(name).name.startswith("libgomp") for name in loaded] == [True] * len(loaded)


def test_torchs_openmp_is_the_one_where_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.ctypes, "CDLL", lambda *_, **__: pytest.fail("nothing is to be loaded"))
    library._provide_openmp()
