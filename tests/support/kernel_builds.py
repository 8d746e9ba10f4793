"""Kernel libraries for tests: one build per target, made once and shared by all tests of a run."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  (before any library: it brings the OpenMP runtime)

from penstock.kernels.cpu.compiler import Built, Machine, NotBuilt, build
from penstock.kernels.cpu.library import open_library

# The matrix unit in plain C++ (emulated_tiles.h), for a CPU without one. Builds are found again by their
# flags, of which the header's digest is one.
_EMULATION = Path(__file__).with_name("emulated_tiles.h")
EMULATED_TILES = (
    f"-march=native -D__AMX_TILE__ -D__AMX_BF16__ -D__AMX_INT8__ -include {shlex.quote(str(_EMULATION))}"
    f" -DEMULATION_{hashlib.sha256(_EMULATION.read_bytes()).hexdigest()[:8]}"
)

_V3 = ("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe")

NATIVE = "-march=native"

# What a CPU must have to run code for a target, in the words of /proc/cpuinfo.
_NEEDED = {
    NATIVE: (),
    "-march=native -mno-amx-tile": ("amx_tile",),
    "-march=x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "-march=x86-64-v3": _V3,
    "-march=x86-64-v3 -mavxvnni": (*_V3, "avx_vnni"),  # desktops without AVX-512
    "-march=x86-64": (),
}

SECONDS = 900.0  # a library that checks its memory takes several times as long as a plain one


def cache_directory() -> Path:
    """A folder for this user alone, which outlives a run: builds are found again by their key.

    Not called after the product: tests look for what engines leave under that name.
    """
    shared = os.environ.get("PENSTOCK_TEST_BUILDS") or tempfile.gettempdir()  # tests/conftest.py sets it
    return Path(shared) / f"test-kernels-{os.getuid()}"


# Native is the one or the other, and v3 what most people have.
SOAKED = ("-march=x86-64-v4", "-march=x86-64-v3 -mavxvnni", "-march=x86-64")


def uses_tiles_of_native(flags: str) -> bool:
    """Return whether these flags choose the same tiles and lanes as native ones do here, without AVX-512."""
    return flags == "-march=x86-64-v3" and not {"avx512f", "avx_vnni"} & set(Machine.detect().cpu_flags)


def targets(*, emulated: bool = False) -> list[Any]:
    """The flags that this machine can run, the fastest first, for `pytest.mark.parametrize`.

    Args:
        emulated: the emulated matrix unit is not left to the soak.
    """
    soaked = SOAKED if emulated else (*SOAKED, EMULATED_TILES)
    return [
        pytest.param(
            flags,
            marks=[pytest.mark.soak] if flags in soaked or uses_tiles_of_native(flags) else [],
            id="emulated-tiles" if flags == EMULATED_TILES else flags,
        )
        for flags in every_target()
    ]


def every_target() -> list[str]:
    """The flags that this machine can run."""
    machine = Machine.detect()
    if machine.architecture != "x86_64":
        return [NATIVE]
    own = [flags for flags, needed in _NEEDED.items() if set(needed) <= set(machine.cpu_flags)]
    return own if "amx_tile" in machine.cpu_flags else [*own, EMULATED_TILES]


def build_environment(flags: str) -> dict[str, str]:
    """The environment in which a library with these flags is built, and found again.

    That of native flags is the one of engines, which tests start too: both share one build.
    """
    further = os.environ.get("PENSTOCK_CXXFLAGS", "")  # such as a sanitizer's
    if flags == NATIVE and not further:
        return dict(os.environ)
    folder = str(cache_directory())
    return {**os.environ, "PENSTOCK_CACHE_DIR": folder, "PENSTOCK_CXXFLAGS": f"{flags} {further}".rstrip()}


@functools.cache
def try_build(flags: str) -> Built | NotBuilt:
    """Build the library once: what cannot be built is not tried anew by every test."""
    return build(build_environment(flags), Machine.detect(), seconds=SECONDS)


def build_for(flags: str) -> Built:
    """The library built with these flags after our own. Skips the test where there is no compiler."""
    result = try_build(flags)
    if not isinstance(result, Built) and result.cause == "no compiler":
        pytest.skip(result.reason)
    assert isinstance(result, Built), result.reason
    return result


@functools.cache
def built(flags: str = NATIVE) -> ctypes.CDLL:
    """The loaded library, its functions with the types that their sources declare."""
    return open_library(build_for(flags))
