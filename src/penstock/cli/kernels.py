"""`penstock kernels build` and `penstock kernels clear`: the compiled CPU kernels of this machine.

Called by `cli.program`. `build` also loads the library into this process and tests it on a known product.
That needs no torch, and torch is not imported. `--kernels` decides which kernels a model uses.
"""

from __future__ import annotations

import shlex
from typing import Annotated

from cyclopts import Parameter

from penstock.cli.terminal import Invocation, one_line, report_error
from penstock.errors import PenstockError
from penstock.kernels.cpu.build_cache import BuildCache, FolderUnusableError, cache_folder
from penstock.kernels.cpu.compiler import Built, Machine, build
from penstock.kernels.cpu.library import LoadedKernels, load_built

AHEAD_SECONDS = 900.0  # most time for the compiler: no start waits for it, so a slow machine may take long


def kernels_build(*, invocation: Annotated[Invocation, Parameter(parse=False)]) -> int:
    """Run the command. Returns 0 with a tested library in the cache, else 1."""
    result = build(invocation.environ, Machine.detect(), seconds=AHEAD_SECONDS)
    loaded = load_built(result)
    if loaded.library is None or not isinstance(result, Built):
        return _report(f"no kernels were built: {loaded.reason}.", loaded.remedy, invocation)
    if result.not_kept:
        return _report(f"the kernels were built but not kept: {result.not_kept}.", result.remedy, invocation)
    _show(result, loaded, invocation)
    return 0


def kernels_clear(*, invocation: Annotated[Invocation, Parameter(parse=False)]) -> int:
    """Run the command. Returns 0 with no library left in the cache, else 1."""
    try:
        folder = cache_folder(invocation.environ)
        count, size = BuildCache.open(folder).clear()
    except FolderUnusableError as error:
        return _report(f"nothing was removed: {error}.", "Remove the folder yourself.", invocation)
    libraries = "library" if count == 1 else "libraries"
    invocation.say(f"removed {count} kernel {libraries}, {size / 1e6:.1f} MB, from {one_line(str(folder))}")
    return 0


def _show(built: Built, loaded: LoadedKernels, invocation: Invocation) -> None:
    compiler = built.compiler
    rows = {
        "compiler": f"{compiler.version}, {shlex.join(compiler.command)}, for {compiler.target}",
        "flags": shlex.join(built.flags),
        "isa": loaded.isa,
        "seconds": f"{built.seconds:.1f}" if built.seconds else "0, taken from the cache",
        "path": str(built.path),
    }
    invocation.say(*(f"{name:<9} {one_line(text)}" for name, text in rows.items()))


def _report(message: str, remedy: str, invocation: Invocation) -> int:
    """Print what failed and what to do, in the form of every error. Return 1: this is not a bug of ours."""
    report_error(PenstockError(message, remedy=remedy), invocation)
    return 1
