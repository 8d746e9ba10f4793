"""Builds the kernel library for this very machine: compiler, flags, one process per source, cache.

Called by `library` on first use and by `penstock kernels build`. `build` never raises for what a machine can
be like: no compiler, one that fails or hangs, a folder that cannot be written to; it says so in a `NotBuilt`,
or builds in a private directory. Does not load what it built (`library`) and never imports torch.

    PENSTOCK_CXX        the compiler to use; else CXX, else g++, c++ or clang++ on PATH
    PENSTOCK_CXXFLAGS   further flags, after our own
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from penstock.kernels.cpu.build_cache import BuildCache, FolderUnusableError, cache_folder
from penstock.kernels.cpu.compiler_jobs import Job, JobFailedError, answer_of, run_jobs
from penstock.kernels.cpu.targets import NATIVE, Target

SOURCES = Path(__file__).parent / "csrc"
BUILD_SECONDS = 180.0  # enough for two slow cores that have other work; one fast core takes 12
PROBE_SECONDS = 10.0
_ARITHMETIC_DIGITS = 8
COMPILER_NAMES = ("g++", "c++", "clang++")  # g++ first: its OpenMP runtime is the one that torch has
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
)
# What the kernels need of a CPU to be worth having, in the words of /proc/cpuinfo.
NEEDED_CPU_FLAGS = {"x86_64": ("avx2", "fma"), "aarch64": ("asimd",)}

Cause = Literal["no compiler", "compiler", "cpu", "folder", "sources"]
_REMEDIES: dict[Cause, str] = {
    "no compiler": "Install g++ (on Debian: apt install g++), then run penstock kernels build.",
    "compiler": "Name another compiler in PENSTOCK_CXX, then run penstock kernels build.",
    "cpu": "Use a CPU with AVX2 or NEON, or name a target: PENSTOCK_CXXFLAGS=-march=x86-64.",
    "folder": "Set PENSTOCK_CACHE_DIR to a folder that you own, then run penstock kernels build.",
    "sources": "Install penstock again.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine to compile for.

    Attributes:
        architecture: architecture of the CPU, as `uname -m` gives it.
        cpu_flags: flags of the CPU, sorted.
        num_cores: number of cores that this process may use.
        cpu_model: maker, family and model of the CPU, for which a compiler tunes, as /proc/cpuinfo numbers
            them.
    """

    architecture: str
    cpu_flags: tuple[str, ...]
    num_cores: int
    cpu_model: str = ""

    @classmethod
    def detect(cls, cpuinfo: Path = Path("/proc/cpuinfo")) -> Machine:
        try:
            text = cpuinfo.read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        cores = len(os.sched_getaffinity(0))
        return cls(
            architecture=platform.machine(),
            cpu_flags=cpu_flags(text),
            num_cores=cores,
            cpu_model=cpu_model(text),
        )


def cpu_flags(cpuinfo: str) -> tuple[str, ...]:
    """Return the sorted flags of the first CPU of /proc/cpuinfo: `flags` on x86, `Features` on Arm."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return tuple(sorted(set(match[1].split()))) if match else ()


def cpu_model(cpuinfo: str) -> str:
    """Return maker, family and model of the first CPU of /proc/cpuinfo, as it numbers them."""
    names = "vendor_id|cpu family|model|CPU implementer|CPU part"
    first, _, _ = cpuinfo.partition("\n\n")
    return " ".join(re.findall(rf"^(?:{names})\s*:\s*(\S+)\s*$", first, re.MULTILINE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """A compiler that answered.

    Attributes:
        command: its path and words that go before every argument, as in CXX="ccache g++".
        version: first line of `--version`.
        target: the machine that it compiles for, as `-dumpmachine` says it.
    """

    command: tuple[str, ...]
    version: str
    target: str

    @property
    def label(self) -> str:
        """The name and number for a line of a report, such as `g++ 12.2.0`."""
        number = re.search(r"\d+(\.\d+)+", re.sub(r"\([^)]*\)", "", self.version))
        name = Path(self.command[-1]).name
        return f"{name} {number[0]}" if number else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A library ready to be loaded.

    Attributes:
        sources: name -> bytes of the files that it was built from.
        arithmetic: digest of all that decides the bits of its results. Two libraries with equal digests that
            use the same instruction sets give the same bits.
        seconds: how long the build took; 0 if it was in the cache.
        not_kept: why it could not be put into the cache, or "".
        private_folder: folder to remove once the library is loaded; None: the library is in the cache.
    """

    path: Path
    compiler: Compiler
    flags: tuple[str, ...]
    sources: Mapping[str, bytes] = field(repr=False)
    arithmetic: str = ""
    seconds: float = 0.0
    not_kept: str = ""
    private_folder: Path | None = None

    @property
    def reason(self) -> str:
        """The way in which the library came, such as `built in 2.1 s with g++ 12.2.0`."""
        if not self.seconds:
            return f"from cache ({self.compiler.label})"
        kept = f", not kept: {self.not_kept}" if self.not_kept else ""
        return f"built in {self.seconds:.1f} s with {self.compiler.label}{kept}"

    @property
    def remedy(self) -> str:
        """The remedy for a library that has to be built anew each time, else ""."""
        return _REMEDIES["folder"] if self.not_kept else ""

    def discard(self) -> None:
        """Remove a library that is not in the cache. One that is loaded stays in memory."""
        if self.private_folder is not None:
            shutil.rmtree(self.private_folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotBuilt:
    """The reason why there is no library."""

    cause: Cause
    reason: str

    @property
    def remedy(self) -> str:
        """The remedy, as a sentence."""
        return _REMEDIES[self.cause]


class _RefusedError(Exception):
    def __init__(self, cause: Cause, reason: str) -> None:
        super().__init__(reason)
        self.cause: Cause = cause


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """The inputs on which one build depends. `key` names it; `seconds` bounds it.

    `sources` are held as bytes: what is compiled is what the key says, even if a file changes meanwhile.
    """

    compiler: Compiler
    flags: tuple[str, ...]
    sources: Mapping[str, bytes]
    key: str
    arithmetic: str
    num_cores: int
    environ: Mapping[str, str]
    seconds: float


def build(
    environ: Mapping[str, str],
    machine: Machine,
    target: Target = NATIVE,
    *,
    sources: Path = SOURCES,
    seconds: float = BUILD_SECONDS,
) -> Built | NotBuilt:
    """Return the library for this machine, from the cache or compiled now.

    Args:
        environ: the environment: which compiler, flags and folder (see above), and PATH for the compiler.
        target: the instructions of the machine's CPU that it may use.
        sources: the directory whose *.cpp, with its *.h, make up the library.
        seconds: time after which a compilation is given up, and the wait for that of another process too.
    """
    try:
        order = _order(environ, machine, target, sources, seconds)
        try:
            return _from_cache(order)
        except FolderUnusableError as error:
            return _in_private(order, not_kept=str(error))
    except _RefusedError as refused:
        return NotBuilt(cause=refused.cause, reason=str(refused))


def build_key(environ: Mapping[str, str], machine: Machine) -> str:
    """Return the key of the library that `build` would give; "": it would give none. Compiles nothing."""
    try:
        return _order(environ, machine, NATIVE, SOURCES, BUILD_SECONDS).key
    except _RefusedError:
        return ""


def _order(
    environ: Mapping[str, str], machine: Machine, target: Target, folder: Path, seconds: float
) -> _Order:
    extra = [*target.flags, *_extra_flags(environ)]
    _check_cpu(machine, extra)
    compiler = find_compiler(environ)
    flags = (*FLAGS, *extra)
    sources = read_sources(folder)
    return _Order(
        compiler=compiler,
        flags=flags,
        sources=sources,
        key=_key(sources, compiler, flags, machine),
        arithmetic=_arithmetic(sources, compiler, flags, machine),
        num_cores=machine.num_cores,
        environ=environ,
        seconds=seconds,
    )


def _extra_flags(environ: Mapping[str, str]) -> list[str]:
    text = environ.get("PENSTOCK_CXXFLAGS", "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise _RefusedError("compiler", f"PENSTOCK_CXXFLAGS is {text!r}: {error}") from error


def _check_cpu(machine: Machine, extra: Sequence[str]) -> None:
    """Raise `_RefusedError` for a CPU on which the kernels would be slow, unless a target is named."""
    if any(flag.startswith(("-march=", "-mcpu=")) for flag in extra):
        return
    needed = NEEDED_CPU_FLAGS.get(machine.architecture)
    if needed is None:
        raise _RefusedError("cpu", f"there are no kernels for {machine.architecture}")
    missing = [flag for flag in needed if flag not in machine.cpu_flags]
    if missing:
        raise _RefusedError("cpu", f"this CPU has no {' and no '.join(missing)}")


def find_compiler(environ: Mapping[str, str]) -> Compiler:
    """Return the first compiler that is installed.

    Raises `_RefusedError` if there is none, or if it does not report version and target.
    """
    command = _command(environ)
    try:
        version, target = (
            answer_of([*command, question], seconds=PROBE_SECONDS, environ=environ).strip()
            for question in ("--version", "-dumpmachine")
        )
    except JobFailedError as error:
        raise _RefusedError("compiler", str(error)) from error
    if not version or not target:
        raise _RefusedError("compiler", f"{command[0]} does not report its version")
    return Compiler(command=command, version=version.splitlines()[0], target=target)


def _command(environ: Mapping[str, str]) -> tuple[str, ...]:
    own = environ.get("PENSTOCK_CXX", "")
    wanted = (own,) if own else (environ.get("CXX", ""), *COMPILER_NAMES)
    for text in filter(None, wanted):
        try:
            name, *words = shlex.split(text)
        except ValueError:
            continue
        path = shutil.which(name, path=environ.get("PATH", os.defpath))
        if path:
            return (path, *words)
    tried = (
        f"PENSTOCK_CXX names {own}, which does not exist" if own else f"none of {', '.join(COMPILER_NAMES)}"
    )
    raise _RefusedError("no compiler", f"no C++ compiler found ({tried})")


def read_sources(folder: Path = SOURCES) -> dict[str, bytes]:
    """Return name -> bytes of all *.cpp and *.h. Raises `_RefusedError` if there are none to compile."""
    try:
        sources = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if _is_source(path)}
    except OSError as error:
        raise _RefusedError("sources", f"the kernel sources cannot be read: {error}") from error
    if not _units(sources):
        raise _RefusedError("sources", f"{folder} does not hold the kernel sources")
    return sources


def _is_source(path: Path) -> bool:
    return path.suffix in (".cpp", ".h")


def _key(sources: Mapping[str, bytes], compiler: Compiler, flags: Sequence[str], machine: Machine) -> str:
    """Return the sha256 over everything that shapes the library: sources, compiler, flags and CPU."""
    digest = hashlib.sha256()
    texts = (*compiler.command, compiler.version, compiler.target, *flags)
    for text in (*texts, machine.architecture, " ".join(machine.cpu_flags)):
        _add(digest, text.encode())
    for name, content in sources.items():
        _add(digest, name.encode())
        _add(digest, content)
    return digest.hexdigest()


def _arithmetic(
    sources: Mapping[str, bytes], compiler: Compiler, flags: Sequence[str], machine: Machine
) -> str:
    """Return the digest of all that decides the bits of a library's results (`Built.arithmetic`).

    The compiler counts, and the CPU that it tunes for: they decide which products and sums become single
    instructions, which round once. The C library counts, since it computes the sines.
    """
    digest = hashlib.sha256()
    tuned_for = machine.cpu_model if _is_for_this_cpu(flags) else ""
    for text in (compiler.version, compiler.target, *flags, _c_library(), tuned_for):
        _add(digest, text.encode())
    for content in sources.values():
        _add(digest, content)
    return digest.hexdigest()[:_ARITHMETIC_DIGITS]


def _is_for_this_cpu(flags: Sequence[str]) -> bool:
    """Return whether the last flag that names a CPU, or one to tune for, names the one at hand."""
    named = [flag for flag in flags if flag.startswith(("-march=", "-mcpu=", "-mtune="))]
    return bool(named) and named[-1].endswith("=native")


def _c_library() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""  # another C library


def _add(digest: hashlib._Hash, part: bytes) -> None:
    """Add a part with its length, so that no two lists of parts make the same bytes."""
    digest.update(len(part).to_bytes(8, "little") + part)


def _from_cache(order: _Order) -> Built:
    """Return the library from the cache, or build it there. Raises `FolderUnusableError`, `_RefusedError`."""
    cache = BuildCache.open(cache_folder(order.environ))
    path = cache.find(order.key)
    if path is not None:
        return _built(order, path)
    with cache.locked(order.seconds):
        path = cache.find(order.key)  # built by another process meanwhile
        if path is not None:
            return _built(order, path)
        with cache.workshop() as directory:
            library, seconds = _compile(order, directory)
            return replace(_built(order, cache.adopt(order.key, library)), seconds=seconds)


def _built(order: _Order, path: Path) -> Built:
    return Built(
        path=path,
        compiler=order.compiler,
        flags=order.flags,
        sources=order.sources,
        arithmetic=order.arithmetic,
    )


def _in_private(order: _Order, not_kept: str) -> Built:
    """Build in a directory of our own that lasts until the library is loaded. Raises `_RefusedError`."""
    try:
        directory = Path(tempfile.mkdtemp(prefix="penstock-kernels-"))
    except OSError as error:
        raise _RefusedError("folder", f"no folder to build in: {not_kept}; {error}") from error
    try:
        path, seconds = _compile(order, directory)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return replace(_built(order, path), seconds=seconds, not_kept=not_kept, private_folder=directory)


def _compile(order: _Order, directory: Path) -> tuple[Path, float]:
    """Compile objects side by side, then link; return library and seconds. Raises `_RefusedError`."""
    began = time.monotonic()
    library = directory / "library.so"
    environ = {**order.environ, "TMPDIR": str(directory)}
    try:
        for name, content in order.sources.items():
            (directory / name).write_bytes(content)
        compiles = [_compiling(order, name, directory) for name in _units(order.sources)]
        run_jobs(compiles, at_once=order.num_cores, seconds=order.seconds, environ=environ)
        run_jobs([_linking(order, library)], at_once=1, seconds=order.seconds, environ=environ)
        if not library.is_file() or not library.stat().st_size:
            raise JobFailedError("it succeeded but wrote no library")
    except (JobFailedError, OSError) as error:
        raise _RefusedError("compiler", f"{order.compiler.label}: {error}") from error
    return library, time.monotonic() - began


def _units(sources: Mapping[str, bytes]) -> list[str]:
    """Return the sources that are compiled one by one, the longest first: then no core waits at the end."""
    units = [name for name in sources if name.endswith(".cpp")]
    return sorted(units, key=lambda name: -len(sources[name]))


def _compiling(order: _Order, name: str, directory: Path) -> Job:
    source = directory / name
    output = ["-c", str(source), "-o", f"{source}.o"]
    return Job(name=name, command=[*order.compiler.command, *order.flags, *output], log=Path(f"{source}.log"))


def _linking(order: _Order, library: Path) -> Job:
    objects = [f"{library.parent / name}.o" for name in sorted(_units(order.sources))]
    command = [*order.compiler.command, *order.flags, "-shared", *objects, "-o", str(library)]
    return Job(name="linking", command=command, log=Path(f"{library}.log"))
