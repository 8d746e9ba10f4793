"""The kernel tests once more over a library that checks every read and write (AddressSanitizer).

The tests run in a child process, for the sanitizer's runtime must be in it before anything else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kernel_builds import build_for, every_target, try_build, uses_tiles_of_native
from penstock.kernels.cpu.compiler import Built, find_compiler

pytestmark = pytest.mark.soak

HERE = Path(__file__).parent
FILES = [
    f"test_cpu_{name}.py" for name in ("linear", "quantized", "attention", "kv_records", "head", "experts")
]
# Two sets of tiles and lanes, or one: whatever this machine has, and AVX2.
TARGETS = [
    flags
    for flags in every_target()
    if flags in ("-march=native", "-march=x86-64-v3") and not uses_tiles_of_native(flags)
]
SECONDS = 1800  # the child compiles, too: 9 minutes alone, and longer beside other parts of the soak

# One row of memory, and a step of two.
OVERRUN = """
import ctypes
import torch
from kernel_builds import built
from penstock.kernels.cpu.abi import FLOAT32, NormArgs, Step

x, residual, weight, y = (torch.zeros(1, 16) for _ in range(4))
args = NormArgs(
    x=x.data_ptr(), residual=residual.data_ptr(), weight=weight.data_ptr(), y=y.data_ptr(), size=16,
    dtype=FLOAT32,
)
built().penstock_add_rms_norm(ctypes.byref(args), ctypes.byref(Step(num_tokens=2)))
"""


def runtime(name: str) -> str:
    """Path of one of the compiler's libraries, with links resolved; skips where it has none."""
    command = [*find_compiler(os.environ).command, f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    if not os.path.isabs(path):
        pytest.skip(f"the compiler comes without {name}")
    return os.path.realpath(path)


@pytest.fixture(scope="module", params=TARGETS)
def environ(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a child whose `kernel_builds.built()` is the checked library for a target, built here."""
    build_for("-march=native")  # skips without a compiler
    preloaded = " ".join(map(runtime, ("libasan.so", "libstdc++.so.6")))
    directory = str(tmp_path_factory.mktemp("checked"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tempfile, "tempdir", directory)
        patched.setenv(
            "PENSTOCK_CXXFLAGS", f"-fsanitize=address -g {request.param}"
        )  # the last -march counts
        assert isinstance(try_build.__wrapped__("-march=native"), Built)
        return {
            **os.environ,
            "TMPDIR": directory,
            "LD_PRELOAD": preloaded,
            "ASAN_OPTIONS": "detect_leaks=0:symbolize=0",  # names of functions in torch take half a minute
            "PYTHONPATH": os.pathsep.join(sys.path),
        }


def run_python(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)


def test_an_overrun_is_noticed(environ: dict[str, str]) -> None:
    done = run_python(environ, "-c", OVERRUN)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "/penstock-" in done.stderr  # the library is in the trace


def test_no_kernel_reads_or_writes_beside_its_memory(environ: dict[str, str]) -> None:
    files = [str(HERE / name) for name in FILES]
    done = run_python(
        environ, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-k", "not x86", "--durations=5", *files
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert "passed" in done.stdout
