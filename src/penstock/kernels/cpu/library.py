"""The kernel library of this process: loaded once, typed, and tested by a product whose result is known.

Called by all that runs kernels, and by `penstock doctor`. `load` gives a `LoadedKernels` in any case; without
a library it says why. Torch-free itself. But kernels run on the threads of torch's OpenMP runtime, libgomp: a
process that uses torch imports it before it calls `load`, so that there is one such runtime and
`torch.set_num_threads` counts for both. Does not compile (`compiler`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import platform
import re
import struct
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import UsageError
from penstock.kernels.cpu.abi import BFLOAT16, FLOAT32, LinearArgs, Step
from penstock.kernels.cpu.compiler import Built, Machine, NotBuilt, build
from penstock.kernels.cpu.targets import AUTO, name_of, target_named

KERNEL_NAMES = ("linear", "norm", "attention", "head", "experts")

_EXPORT = re.compile(r"\bPENSTOCK_EXPORT\s+([\w ]+?[\s*]+)(penstock_\w+)\s*\(([^)]*)\)")
_TYPES: dict[str, Any] = {
    "void": None,
    "bool": ctypes.c_bool,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_PANEL = 32
_BAD_LIBRARY_REMEDY = "Run penstock kernels clear, or name another compiler in PENSTOCK_CXX."
_loading = threading.Lock()


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernels that may run; those left out are done by torch."""

    enabled: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedKernels:
    """The kernels of this process, or why there are none.

    Attributes:
        isa: instruction sets that the kernels use, such as `avx512-bf16 avx512-vnni`; "" without a library.
        numeric_class: name of these sets and digest of all else that decides the bits of results, such as
            `avx512-bf16 1f0a2b3c`; libraries of one class give the same bits. "" without a library.
        reason: how the library came, such as `built in 2.1 s with g++ 12.2.0`, or why there is none.
        path: place from which it was loaded; it may be gone by now.
        remedy: what to do about a missing library, or one that cannot be kept; "" exactly when all is well.
    """

    library: ctypes.CDLL | None = None
    isa: str = ""
    numeric_class: str = ""
    reason: str
    path: Path | None = None
    remedy: str = ""


class LibraryError(Exception):
    """A built library cannot be loaded, or computes something else than it should."""


def parse_kernels(text: str) -> KernelChoice:
    """Return all kernels for `auto`, none for `off`, all but some for a text such as `-attention,-head`.

    Raises:
        UsageError: it is another text.
    """
    if text in ("auto", "off"):
        return KernelChoice(frozenset(KERNEL_NAMES if text == "auto" else ()))
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.startswith("-") or word[1:] not in KERNEL_NAMES:
            raise UsageError(
                f"kernels is {text!r}: {word!r} does not switch anything off.",
                remedy=f"Use auto, off, or any of {', '.join(f'-{name}' for name in KERNEL_NAMES)}.",
                param="kernels",
            )
    return KernelChoice(frozenset(KERNEL_NAMES) - {word[1:] for word in words})


def load(kernels: str = "auto", numeric_class: str = AUTO) -> LoadedKernels:
    """Return the library for this machine, built if it has to be; every later call and thread gets the same.

    Args:
        kernels: see `parse_kernels`; only with every kernel off is nothing loaded. Raises `UsageError`.
        numeric_class: one of `config.engine.NUMERIC_CLASSES`; a library that computes in another one is not
            loaded.
    """
    if not parse_kernels(kernels).enabled:
        return LoadedKernels(reason="switched off", remedy="Use --kernels auto.")
    with _loading:
        return _load_once(numeric_class)


@functools.cache
def _load_once(numeric_class: str) -> LoadedKernels:
    target = target_named(numeric_class)
    loaded = load_built(build(os.environ, Machine.detect(), target))
    if loaded.library is None or target.isa in ("", loaded.isa):
        return loaded
    return LoadedKernels(
        reason=f"built for {numeric_class}, they compute in {loaded.numeric_class.split()[0]}",
        remedy="Unset PENSTOCK_CXXFLAGS, or name another --numeric-class.",
    )


def load_built(result: Built | NotBuilt) -> LoadedKernels:
    """Load what the compiler gave; a library outside the cache is removed at once, and stays in memory."""
    if isinstance(result, NotBuilt):
        return LoadedKernels(reason=result.reason, remedy=result.remedy)
    try:
        library = open_library(result)
        isa = self_test(library)
    except LibraryError as error:
        return LoadedKernels(
            reason=f"{error} ({result.compiler.label})", path=result.path, remedy=_BAD_LIBRARY_REMEDY
        )
    finally:
        result.discard()
    return LoadedKernels(
        library=library,
        isa=isa,
        numeric_class=f"{name_of(isa, platform.machine())} {result.arithmetic}".rstrip(),
        reason=result.reason,
        path=result.path,
        remedy=result.remedy,
    )


def open_library(built: Built) -> ctypes.CDLL:
    """Load a library and give its functions the types of their sources. Raises `LibraryError`."""
    try:
        _provide_openmp()
        library = ctypes.CDLL(str(built.path))
        for name, (result_type, argument_types) in signatures(built.sources).items():
            function = getattr(library, name)
            function.restype, function.argtypes = result_type, argument_types
    except (OSError, AttributeError) as error:
        raise LibraryError(f"the library cannot be loaded: {error}") from error
    return library


def _provide_openmp() -> None:
    """Load torch's OpenMP runtime where the system has none, unless torch is in the process."""
    if "torch" in sys.modules:
        return
    with contextlib.suppress(OSError):
        ctypes.CDLL("libgomp.so.1")
        return
    torch = importlib.util.find_spec("torch")  # finds the package and does not import it
    for directory in torch.submodule_search_locations or () if torch else ():
        for runtime in Path(directory, "lib").glob("libgomp*.so*"):
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)


def signatures(sources: Mapping[str, bytes]) -> dict[str, tuple[Any, list[Any]]]:
    """Return name -> result and argument types of every function that the sources export.

    So the types cannot differ from those compiled. Raises `LibraryError` for a type without a counterpart.
    """
    types: dict[str, tuple[Any, list[Any]]] = {}
    for content in sources.values():
        for result, name, arguments in _EXPORT.findall(content.decode()):
            listed = [part for part in arguments.split(",") if part.strip() not in ("", "void")]
            result_type = ctypes.c_char_p if _words(result) == ["char", "*"] else _type(_words(result))
            types[name] = (result_type, [_type(_words(part)) for part in listed])
    return types


def _words(declaration: str) -> list[str]:
    return [word for word in re.findall(r"\w+|\*", declaration) if word != "const"]


def _type(words: list[str]) -> Any:
    if "*" in words:
        return ctypes.c_void_p
    if not words or words[0] not in _TYPES:
        raise LibraryError(f"no ctypes counterpart of {' '.join(words)!r}")
    return _TYPES[words[0]]


def self_test(library: ctypes.CDLL) -> str:
    """Compare a known product in each dtype; return the instruction sets that the library was built for.

    All numbers are small whole ones, so the product is exact. Raises `LibraryError`.
    """
    isa = library.penstock_isa()
    x = [[1.0, 2.0, 3.0, 4.0, 5.0], [-1.0, 0.0, 2.0, 0.0, 7.0]]
    rows = [[float((3 * i + k) % 7 - 3) for k in range(5)] for i in range(_PANEL + 1)]
    expected = [[sum(a * b for a, b in zip(token, row, strict=True)) for row in rows] for token in x]
    if not isa or any(_product(library, x, rows, dtype) != expected for dtype in (FLOAT32, BFLOAT16)):
        raise LibraryError("the library fails its self-test: a known product is wrong")
    return str(isa.decode())


def _product(
    library: ctypes.CDLL, x: list[list[float]], rows: list[list[float]], dtype: int
) -> list[list[float]]:
    num_tokens, in_size, out_size = len(x), len(rows[0]), len(rows)
    padded_out = (out_size + _PANEL - 1) // _PANEL * _PANEL
    padded_in = in_size + in_size % 2
    number = ctypes.c_float if dtype == FLOAT32 else ctypes.c_uint16
    weight, outputs = (number * (padded_out * padded_in))(), (number * (num_tokens * out_size))()
    inputs, packed = _numbers(x, dtype), _numbers(rows, dtype)
    library.penstock_pack(packed, weight, 0, out_size, in_size, 0, dtype)
    args = LinearArgs(
        x=ctypes.addressof(inputs),
        x_stride=in_size,
        weight=ctypes.addressof(weight),
        y=ctypes.addressof(outputs),
        y_stride=out_size,
        in_size=in_size,
        out_size=out_size,
        dtype=dtype,
    )
    step = Step(num_tokens=num_tokens)
    library.penstock_linear(ctypes.addressof(args), ctypes.addressof(step))
    products = _floats(bytes(outputs), dtype)
    return [products[at : at + out_size] for at in range(0, len(products), out_size)]


def _numbers(rows: list[list[float]], dtype: int) -> ctypes.Array[ctypes.c_char]:
    """Return the numbers of all rows as bytes.

    A bfloat16 number is the upper half of a float, whose lower half is 0 for small whole numbers.
    """
    flat = [value for row in rows for value in row]
    content = struct.pack(f"<{len(flat)}f", *flat)
    if dtype == BFLOAT16:
        content = b"".join(content[at + 2 : at + 4] for at in range(0, len(content), 4))
    return ctypes.create_string_buffer(content, len(content))


def _floats(content: bytes, dtype: int) -> list[float]:
    if dtype == BFLOAT16:
        content = b"".join(b"\0\0" + content[at : at + 2] for at in range(0, len(content), 2))
    return list(struct.unpack(f"<{len(content) // 4}f", content))
