"""The instruction sets that the kernels can be limited to, so that unlike hosts compute the same bits.

A build for this very machine (`AUTO`) uses all that its CPU has. A build for a target uses what every CPU of
that target has, and is tuned for none: two hosts with the same compiler then have the same library. The names
are those of `config.engine.NUMERIC_CLASSES`. Called by `compiler`, `library` and `hosts.resources`.
"""

from __future__ import annotations

from dataclasses import dataclass

AUTO = "auto"

_AVX2 = ("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_V4 = "-march=x86-64-v4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The CPU for which a library can be built.

    Attributes:
        architecture: architecture of the CPU, as `uname -m` gives it; "": that of this machine.
        flags: flags of the compiler, which replace those for this very machine.
        needs: flags of the CPU that runs it, in the words of /proc/cpuinfo.
        isa: instruction sets that the library then reports (`csrc/run.cpp`); "": those depend on the machine.
    """

    name: str
    architecture: str = ""
    flags: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    isa: str = ""


NATIVE = Target(name=AUTO)
TARGETS = (  # of each architecture, the least first
    Target(name="portable", architecture="x86_64", flags=("-march=x86-64",), isa="portable"),
    Target(name="avx2", architecture="x86_64", flags=("-march=x86-64-v3",), needs=_AVX2, isa="avx2"),
    Target(name="avx512", architecture="x86_64", flags=(_V4,), needs=_AVX512, isa="avx512"),
    Target(
        name="avx512-vnni",
        architecture="x86_64",
        flags=(_V4, "-mavx512vnni"),
        needs=(*_AVX512, "avx512_vnni"),
        isa="avx512 avx512-vnni",
    ),
    Target(
        name="avx512-bf16",
        architecture="x86_64",
        flags=(_V4, "-mavx512vnni", "-mavx512bf16"),
        needs=(*_AVX512, "avx512_vnni", "avx512_bf16"),
        isa="avx512-bf16 avx512-vnni",
    ),
    Target(
        name="amx-bf16",
        architecture="x86_64",
        flags=(_V4, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        needs=(*_AVX512, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"),
        isa="amx-bf16 avx512-bf16 avx512-vnni",
    ),
    Target(name="neon", architecture="aarch64", flags=("-march=armv8-a",), needs=("asimd",), isa="portable"),
)
_BY_NAME = {target.name: target for target in (NATIVE, *TARGETS)}


def target_named(name: str) -> Target:
    """Return the target of a numeric class that `config.engine` knows, or that of this machine for `AUTO`."""
    return _BY_NAME[name]


def targets_of(architecture: str, cpu_flags: tuple[str, ...]) -> list[str]:
    """Return the names of the targets that a CPU can run, the least first."""
    return [
        target.name
        for target in TARGETS
        if target.architecture == architecture and set(target.needs) <= set(cpu_flags)
    ]


def name_of(isa: str, architecture: str) -> str:
    """Return the name of the instruction sets that a library says it uses."""
    named = (each.name for each in TARGETS if (each.architecture, each.isa) == (architecture, isa))
    return next(named, isa.replace(" ", "+"))
