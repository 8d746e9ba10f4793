"""Instruction sets by their names: which CPU has which, and what a library for one of them is called."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernel_builds import build_for
from penstock.config.engine import NUMERIC_CLASSES
from penstock.kernels.cpu import library
from penstock.kernels.cpu.compiler import Machine
from penstock.kernels.cpu.library import load, load_built
from penstock.kernels.cpu.targets import AUTO, NATIVE, TARGETS, name_of, target_named, targets_of

SKYLAKE = "avx2 fma bmi1 bmi2 f16c movbe avx512f avx512bw avx512cd avx512dq avx512vl sse2"
NATIVE_HERE = Machine.detect()


def test_g1_the_names_are_those_of_the_setting() -> None:
    assert tuple(target.name for target in TARGETS) == NUMERIC_CLASSES
    assert [target_named(target.name) for target in TARGETS] == list(TARGETS)
    assert target_named(AUTO) is NATIVE


@pytest.mark.parametrize(
    ("architecture", "cpu_flags", "names"),
    [
        ("x86_64", "sse2", ["portable"]),
        ("x86_64", SKYLAKE.partition(" avx512f")[0], ["portable", "avx2"]),
        ("x86_64", SKYLAKE, ["portable", "avx2", "avx512"]),
        ("x86_64", f"{SKYLAKE} avx512_vnni", ["portable", "avx2", "avx512", "avx512-vnni"]),
        ("x86_64", SKYLAKE.replace("avx512vl", "avx512_bf16"), ["portable", "avx2"]),
        ("aarch64", "fp asimd", ["neon"]),
        ("riscv64", "v", []),
    ],
)
def test_g1_a_cpu_has_the_classes_that_its_flags_allow(
    architecture: str, cpu_flags: str, names: list[str]
) -> None:
    assert targets_of(architecture, tuple(cpu_flags.split())) == names


def test_g1_what_a_library_says_of_itself_has_a_name() -> None:
    assert name_of("avx512-bf16 avx512-vnni", "x86_64") == "avx512-bf16"
    assert name_of("portable", "x86_64") == "portable"
    assert name_of("portable", "aarch64") == "neon"
    assert name_of("avx512-bf16", "x86_64") == "avx512-bf16"  # as flags of the user's own may give it


@pytest.fixture
def fresh() -> Iterator[None]:
    """As in a process that has loaded nothing yet."""
    library._load_once.cache_clear()
    yield
    library._load_once.cache_clear()


@pytest.mark.skipif(
    "avx2" not in targets_of(NATIVE_HERE.architecture, NATIVE_HERE.cpu_flags), reason="no AVX2"
)
def test_g1_a_library_for_a_target_computes_in_its_class(
    monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    built = build_for("-march=x86-64-v3")
    loaded = load_built(built)
    assert loaded.numeric_class == f"avx2 {built.arithmetic}"
    assert len(built.arithmetic) == 8
    monkeypatch.setattr(library, "build", lambda environ, machine, target: built)
    assert load("auto", "avx2").numeric_class == loaded.numeric_class
    refused = load("auto", "portable")
    assert refused.library is None
    assert refused.reason == "built for portable, they compute in avx2"
    assert "PENSTOCK_CXXFLAGS" in refused.remedy
