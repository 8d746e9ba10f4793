"""The build of the kernel library: compilers that are missing, fail, hang or lie, and the cache of results.

Most tests use a compiler that is a shell script: it notes its arguments and writes a word into its output.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.kernels.cpu import build_cache, compiler
from penstock.kernels.cpu.build_cache import BuildCache, FolderUnusableError, cache_folder
from penstock.kernels.cpu.compiler import (
    SOURCES,
    Built,
    Compiler,
    Machine,
    NotBuilt,
    build,
    cpu_flags,
    cpu_model,
)
from penstock.kernels.cpu.compiler_jobs import Job, JobFailedError, answer_of, last_lines, run_jobs
from penstock.kernels.cpu.targets import NATIVE, Target, target_named

ZEN = Machine(architecture="x86_64", cpu_flags=("avx2", "fma", "sse2"), num_cores=2)
WRITES_OUTPUT = 'for last; do :; done; echo library > "$last"'  # -o PATH comes last
EMPTY_OUTPUT = 'for last; do :; done; : > "$last"'


class FakeCompiler:
    """A compiler on a PATH of its own, with a cache folder and two sources to compile."""

    def __init__(self, directory: Path, name: str = "g++") -> None:
        self.directory = directory
        self.log = directory / "calls"
        self.cache = directory / "cache"
        self.sources = directory / "sources"
        self.path = directory / "bin" / name
        self.path.parent.mkdir(parents=True)
        self.sources.mkdir()
        for source in ("one.cpp", "two.cpp", "shared.h"):
            (self.sources / source).write_text(f"// {source}\n")
        self.says()

    def says(
        self, body: str = WRITES_OUTPUT, version: str = "echo 'g++ (Fake 9) 1.2.3'", target: str = "echo x86"
    ) -> None:
        """What the script does for each kind of call, as shell commands."""
        self.path.write_text(
            f'#!/bin/sh\ncase "$*" in\n*--version) {version}; exit ;;\n'
            f"*-dumpmachine) {target}; exit ;;\nesac\n"
            f'echo "$@" >> {self.log}\n{body}\n'
        )
        self.path.chmod(0o755)

    def environ(self, **more: str) -> dict[str, str]:
        return {"PATH": str(self.path.parent), "PENSTOCK_CACHE_DIR": str(self.cache), **more}

    def build(
        self, machine: Machine = ZEN, seconds: float = 60.0, target: Target = NATIVE, **environ: str
    ) -> Built | NotBuilt:
        return build(self.environ(**environ), machine, target, sources=self.sources, seconds=seconds)

    def built(self, machine: Machine = ZEN, target: Target = NATIVE, **environ: str) -> Built:
        result = self.build(machine, target=target, **environ)
        assert isinstance(result, Built), result
        return result

    def refused(self, machine: Machine = ZEN, seconds: float = 60.0, **environ: str) -> NotBuilt:
        result = self.build(machine, seconds, **environ)
        assert isinstance(result, NotBuilt), result
        assert result.remedy.endswith(".")
        return result

    @property
    def num_calls(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def fake(tmp_path: Path) -> FakeCompiler:
    return FakeCompiler(tmp_path)


# --- which compiler, which CPU ----------------------------------------------------------------------


def test_no_compiler_on_the_path_is_said_with_the_remedy(fake: FakeCompiler) -> None:
    fake.path.unlink()
    result = fake.refused()
    assert result.cause == "no compiler"
    assert "no C++ compiler found" in result.reason
    assert "apt install g++" in result.remedy


def test_a_compiler_that_was_asked_for_and_is_missing_is_not_replaced(fake: FakeCompiler) -> None:
    result = fake.refused(PENSTOCK_CXX="/nonexistent/g++")
    assert result.cause == "no compiler"
    assert "PENSTOCK_CXX names /nonexistent/g++" in result.reason


def test_order_of_compilers(fake: FakeCompiler) -> None:
    def command(**environ: str) -> tuple[str, ...]:
        return compiler.find_compiler(fake.environ(**environ)).command

    folder = fake.path.parent
    for name in ("c++", "clang++", "mine"):
        (folder / name).symlink_to(fake.path)
    assert command(PENSTOCK_CXX="mine", CXX="clang++") == (str(folder / "mine"),)
    assert command(CXX="clang++ -m64") == (str(folder / "clang++"), "-m64")
    assert command(CXX="not-here") == (str(folder / "g++"),)
    assert command(CXX="'unbalanced") == (str(folder / "g++"),)
    fake.path.rename(folder / "other")
    (folder / "c++").unlink()
    (folder / "c++").symlink_to(folder / "other")
    assert command() == (str(folder / "c++"),)


@pytest.mark.parametrize(
    ("version", "label"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0", "g++ 12.2.0"),
        ("g++ (GCC) 13.2.1 20231011 (Red Hat 13.2.1-4)", "g++ 13.2.1"),
        ("Debian clang version 14.0.6", "g++ 14.0.6"),
        ("something else", "g++"),
    ],
)
def test_label_is_name_and_number(version: str, label: str) -> None:
    assert Compiler(command=("/usr/bin/ccache", "g++"), version=version, target="x").label == label


@pytest.mark.parametrize("says", [{"version": "exit 3"}, {"version": "true"}, {"target": "true"}])
def test_a_program_that_does_not_say_what_it_is_is_no_compiler(
    fake: FakeCompiler, says: dict[str, str]
) -> None:
    fake.says(**says)
    assert fake.refused().cause == "compiler"
    assert fake.num_calls == 0


def test_a_file_that_cannot_be_run_is_a_reason(fake: FakeCompiler) -> None:
    fake.path.write_bytes(b"\x7fELF but not really")
    result = fake.refused()
    assert result.cause == "compiler"
    assert "cannot be started" in result.reason


def test_cpu_flags_of_both_architectures() -> None:
    assert cpu_flags("processor: 0\nflags\t\t: sse2 fma avx2\n\nprocessor: 1\nflags\t: x\n") == (
        "avx2",
        "fma",
        "sse2",
    )
    assert cpu_flags("BogoMIPS : 50\nFeatures\t: fp asimd\n") == ("asimd", "fp")
    assert cpu_flags("") == ()


def test_machine_is_read_from_the_given_file(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags : b a b\n")
    assert Machine.detect(tmp_path / "cpuinfo").cpu_flags == ("a", "b")
    assert Machine.detect(tmp_path / "missing").cpu_flags == ()
    assert Machine.detect().num_cores >= 1


@pytest.mark.parametrize(
    ("machine", "told"),
    [
        (Machine(architecture="x86_64", cpu_flags=("sse2", "fma"), num_cores=1), "no avx2"),
        (Machine(architecture="x86_64", cpu_flags=(), num_cores=1), "no avx2 and no fma"),
        (Machine(architecture="aarch64", cpu_flags=("fp",), num_cores=1), "no asimd"),
        (Machine(architecture="riscv64", cpu_flags=("v",), num_cores=1), "riscv64"),
    ],
)
def test_an_old_or_unknown_cpu_is_refused_unless_a_target_is_named(
    fake: FakeCompiler, machine: Machine, told: str
) -> None:
    result = fake.refused(machine)
    assert result.cause == "cpu"
    assert told in result.reason
    assert fake.num_calls == 0
    assert fake.built(machine, PENSTOCK_CXXFLAGS="-march=x86-64").path.exists()


def test_sources_that_are_missing_are_a_reason(fake: FakeCompiler, tmp_path: Path) -> None:
    for folder in (tmp_path / "empty", tmp_path / "missing"):
        if folder.name == "empty":
            folder.mkdir()
        result = build(fake.environ(), ZEN, sources=folder)
        assert isinstance(result, NotBuilt)
        assert result.cause == "sources"


def test_the_package_carries_its_sources() -> None:
    names = set(compiler.read_sources())
    assert {"abi.h", "linear.cpp", "run.cpp"} <= names
    assert SOURCES.parent == Path(compiler.__file__).parent


# --- compiling --------------------------------------------------------------------------------------


def test_every_source_is_compiled_and_linked_with_our_flags_and_then_the_users(fake: FakeCompiler) -> None:
    result = fake.built(PENSTOCK_CXXFLAGS="-march=x86-64-v3 '-DX=a b'")
    calls = fake.log.read_text().splitlines()
    assert len(calls) == 3
    assert all("-march=native" in call and call.index("native") < call.index("v3") for call in calls)
    assert {call.split(" -c ")[1].split()[0].rsplit("/")[-1] for call in calls[:2]} == {"one.cpp", "two.cpp"}
    assert "-shared" in calls[2]
    assert result.flags[-2:] == ("-march=x86-64-v3", "-DX=a b")
    assert result.path.read_text() == "library\n"
    assert result.path.parent == fake.cache / "kernels"
    assert result.reason.startswith("built in ")
    assert result.reason.endswith(" s with g++ 1.2.3")
    assert result.remedy == ""


def test_a_failing_compiler_is_quoted_and_leaves_nothing_behind(fake: FakeCompiler) -> None:
    fake.says("echo first >&2; echo; echo 'one.cpp:1: error: no such thing' >&2; exit 1")
    result = fake.refused()
    assert result.cause == "compiler"
    assert "exit status 1" in result.reason
    assert "first | one.cpp:1: error: no such thing" in result.reason
    assert "\n" not in result.reason
    assert [path.name for path in (fake.cache / "kernels").iterdir()] == ["lock"]


def test_a_failing_link_is_named(fake: FakeCompiler) -> None:
    fake.says(f'case "$*" in *-shared*) echo cannot find -lgomp; exit 1 ;; esac; {WRITES_OUTPUT}')
    assert "linking failed (exit status 1): cannot find -lgomp" in fake.refused().reason


def test_a_killed_compiler_is_a_reason(fake: FakeCompiler) -> None:
    fake.says("kill -9 $$")
    assert "ended by signal 9" in fake.refused().reason


@pytest.mark.parametrize("body", ["true", EMPTY_OUTPUT])
def test_a_compiler_that_writes_nothing_is_a_reason(fake: FakeCompiler, body: str) -> None:
    fake.says(body)
    assert "wrote no library" in fake.refused().reason


def test_a_hanging_compiler_is_given_up(fake: FakeCompiler) -> None:
    fake.says("exec /bin/sleep 600")
    result = fake.refused(seconds=0.0)
    assert result.cause == "compiler"
    assert "not done after 0 s" in result.reason


def test_flags_with_an_open_quote_are_a_reason(fake: FakeCompiler) -> None:
    assert "PENSTOCK_CXXFLAGS" in fake.refused(PENSTOCK_CXXFLAGS="'-O1").reason


def test_a_failure_ends_the_other_jobs_with_all_that_they_started(tmp_path: Path) -> None:
    alive, up = tmp_path / "alive", tmp_path / "up"
    for fifo in (alive, up):
        os.mkfifo(fifo)
    end = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
    hangs = ["/bin/sh", "-c", f"exec 3>{alive}; /bin/sleep 600 & echo > {up}; wait"]
    fails = ["/bin/sh", "-c", f"read line < {up}; exit 3"]
    jobs = [Job(name=str(n), command=c, log=tmp_path / f"{n}.log") for n, c in enumerate([hangs, fails])]
    with pytest.raises(JobFailedError, match=r"1 failed \(exit status 3\): it printed nothing"):
        run_jobs(jobs, at_once=2, seconds=60, environ={})
    os.set_blocking(end, True)
    assert os.read(end, 1) == b""  # no writer is left
    os.close(end)


def test_jobs_wait_for_a_free_core(tmp_path: Path) -> None:
    """Each job makes a directory and removes it: two at once would meet."""
    script = f"mkdir {tmp_path}/busy && rmdir {tmp_path}/busy"
    jobs = [Job(name=str(n), command=["/bin/sh", "-c", script], log=tmp_path / f"{n}.log") for n in range(5)]
    run_jobs(jobs, at_once=1, seconds=60, environ={"PATH": os.environ["PATH"]})


def test_an_answer_that_does_not_come_is_given_up() -> None:
    with pytest.raises(JobFailedError, match="no answer within 0 s"):
        answer_of(["/bin/sleep", "600"], seconds=0, environ={})


def test_what_is_preloaded_into_us_is_not_passed_on() -> None:
    script = ["/bin/sh", "-c", 'echo "${LD_PRELOAD-none} $LC_ALL"']
    assert answer_of(script, seconds=60, environ={"LD_PRELOAD": "/x.so", "LC_ALL": "de_DE"}) == "none C\n"


def test_last_lines_are_short_whatever_was_printed() -> None:
    assert last_lines(b"") == "it printed nothing"
    assert last_lines(b"a\n\nb\nc\nd\n") == "b | c | d"
    assert len(last_lines(b"\xff" * 10_000)) == 400


# --- the cache --------------------------------------------------------------------------------------


def test_a_second_build_comes_from_the_cache(fake: FakeCompiler) -> None:
    first = fake.built()
    calls = fake.num_calls
    second = fake.built()
    assert second.path == first.path
    assert second.seconds == 0
    assert second.reason == "from cache (g++ 1.2.3)"
    assert fake.num_calls == calls
    assert sorted(path.name for path in first.path.parent.iterdir()) == ["lock", first.path.name]


def test_all_that_shapes_a_library_is_in_its_key(fake: FakeCompiler) -> None:
    def path(machine: Machine = ZEN, **environ: str) -> Path:
        return fake.built(machine, **environ).path

    newer = Machine(architecture="x86_64", cpu_flags=(*ZEN.cpu_flags, "avx512f"), num_cores=2)
    other = Machine(architecture="aarch64", cpu_flags=("asimd", *ZEN.cpu_flags), num_cores=2)
    paths = [path(), path(newer), path(other), path(PENSTOCK_CXXFLAGS="-O1"), path(PENSTOCK_CXXFLAGS="-O2")]
    fake.says(version="echo 'g++ 1.2.4'")
    paths.append(path())
    fake.says(target="echo arm")
    paths.append(path())
    fake.says()
    (fake.sources / "shared.h").write_text("// changed\n")
    paths.append(path())
    (fake.sources / "shared.h").rename(fake.sources / "renamed.h")
    paths.append(path())
    assert len(set(paths)) == len(paths)
    more_cores = Machine(architecture=ZEN.architecture, cpu_flags=ZEN.cpu_flags, num_cores=64)
    assert path(more_cores) == paths[-1]


def test_g1_libraries_of_one_arithmetic_come_of_equal_sources_compilers_and_flags(fake: FakeCompiler) -> None:
    """Compilers join products and sums as they see fit, for the CPU that they tune for."""
    other = Machine(architecture="x86_64", cpu_flags=(*ZEN.cpu_flags, "gfni"), num_cores=8, cpu_model="Zen 5")
    avx2 = target_named("avx2")

    def arithmetic(machine: Machine = ZEN, target: Target = NATIVE, **environ: str) -> str:
        return fake.built(machine, target, **environ).arithmetic

    named = [arithmetic(), arithmetic(other), arithmetic(target=avx2), arithmetic(PENSTOCK_CXXFLAGS="-O1")]
    assert arithmetic() == named[0], "from the cache"
    assert arithmetic(other, avx2) == named[2], "tuned for neither"
    fake.says(version="echo 'g++ 1.2.4'")
    named.append(arithmetic())
    (fake.sources / "shared.h").write_text("// changed\n")
    named.append(arithmetic())
    assert len(set(named)) == len(named)


def test_g1_a_build_for_a_target_needs_no_more_of_the_cpu_than_that(fake: FakeCompiler) -> None:
    old = Machine(architecture="x86_64", cpu_flags=("sse2",), num_cores=1)
    assert fake.built(old, target_named("portable")).flags[-1] == "-march=x86-64"


def test_the_model_of_a_cpu_is_read_from_its_first_core() -> None:
    core = "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Fast\nstepping\t: 8\n\n"
    assert cpu_model(core * 2) == "GenuineIntel 6 143"
    assert cpu_model("CPU implementer\t: 0x41\nCPU part\t: 0xd0c\n") == "0x41 0xd0c"
    assert cpu_model("") == ""


@pytest.mark.parametrize("damage", [b"", b"libr", b"LIBRARY\n", b"library\nmore"])
def test_a_damaged_library_is_noticed_and_built_again(fake: FakeCompiler, damage: bytes) -> None:
    path = fake.built().path
    path.write_bytes(damage)
    again = fake.built()
    assert again.seconds > 0
    assert again.path.read_text() == "library\n"


def test_a_library_that_others_can_write_to_is_built_again(fake: FakeCompiler) -> None:
    path = fake.built().path
    path.chmod(0o666)
    assert fake.built().seconds > 0
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_link_in_place_of_a_library_is_not_followed(fake: FakeCompiler, tmp_path: Path) -> None:
    path = fake.built().path
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert fake.built().seconds > 0
    assert not path.is_symlink()


def test_sources_that_change_during_a_build_do_not_spoil_the_cache(fake: FakeCompiler) -> None:
    """This compiler edits the original of its source, and passes on the first line of what it was given."""
    fake.sources.joinpath("one.cpp").unlink()
    fake.says(
        f"echo changed > {fake.sources}/two.cpp; for last; do :; done\n"
        'read -r line < "${last%/*}/two.cpp"; echo "$line" > "$last"'
    )
    assert fake.built().path.read_text() == "// two.cpp\n"


def test_the_folder_and_its_parents_are_made_for_this_user_alone(fake: FakeCompiler) -> None:
    before = os.umask(0)
    try:
        path = fake.built().path
    finally:
        os.umask(before)
    assert [folder.stat().st_mode & 0o777 for folder in list(path.parents)[:2]] == [0o700, 0o700]


@pytest.mark.parametrize("which", ["kernels", "parent"])
def test_a_folder_that_others_can_write_to_is_not_used(fake: FakeCompiler, which: str) -> None:
    path = fake.built().path
    place = fake.cache / "kernels" if which == "kernels" else fake.cache
    place.chmod(0o770)
    result = fake.built()
    assert result.path != path
    assert f"others can write to {place} (mode 770)" in result.reason
    assert "PENSTOCK_CACHE_DIR" in result.remedy
    result.discard()


def test_a_sticky_parent_is_as_good_as_a_private_one(fake: FakeCompiler) -> None:
    path = fake.built().path
    fake.cache.chmod(0o1777)
    assert fake.built().path == path
    path.parent.chmod(0o1777)
    assert fake.built().not_kept
    path.parent.chmod(0o700)


def test_a_folder_of_another_user_is_not_used(fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fake.built().path.parent
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(build_cache.os, "geteuid", lambda: 12345)
    result = fake.built()
    assert "belongs to another user" in result.not_kept
    result.discard()


def test_without_a_cache_folder_the_library_is_built_in_private_and_not_kept(
    fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake.cache.write_text("a file where the folder should be")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(compiler.tempfile, "tempdir", str(tmp_path / "tmp"))
    result = fake.built()
    assert "not kept" in result.reason
    assert f"{fake.cache} is not a folder" in result.reason
    private = result.path.parent
    assert private == result.private_folder
    assert private.parent == tmp_path / "tmp"
    assert private.stat().st_mode & 0o777 == 0o700
    result.discard()
    assert not private.exists()


@pytest.mark.parametrize("call", ["mkdtemp", "open", "replace"])
def test_a_read_only_folder_is_read_and_not_written(
    fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As on a read-only file system; root may write anywhere else, so the calls are made to fail."""
    kept = fake.built().path
    module = build_cache.tempfile if call == "mkdtemp" else build_cache.os
    real = getattr(module, call)

    def refuse(*args: object, **kwargs: object) -> object:
        if any(str(kept.parent) in str(value) for value in (*args, *kwargs.values())):
            raise OSError(30, "Read-only file system")
        return real(*args, **kwargs)

    monkeypatch.setattr(module, call, refuse)
    assert fake.built().path == kept
    result = fake.built(PENSTOCK_CXXFLAGS="-O1")
    assert "Read-only file system" in result.not_kept
    assert result.path.exists()
    result.discard()


def test_nowhere_to_build_is_a_reason(fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.cache.write_text("a file where the folder should be")
    monkeypatch.setattr(compiler.tempfile, "tempdir", str(fake.cache))
    result = fake.refused()
    assert result.cause == "folder"
    assert "no folder to build in" in result.reason


def test_a_failure_in_private_leaves_nothing_behind(
    fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(compiler.tempfile, "tempdir", str(tmp_path / "tmp"))
    fake.says("exit 1")
    assert fake.refused(PENSTOCK_CACHE_DIR="/dev/null/cache").cause == "compiler"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_where_the_folder_is() -> None:
    assert cache_folder({"PENSTOCK_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a/kernels")
    assert cache_folder({"PENSTOCK_CACHE_DIR": "a"}) == Path("a/kernels").absolute()
    assert cache_folder({"XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/b/penstock/kernels")
    assert cache_folder({"XDG_CACHE_HOME": "b", "HOME": "/c"}) == Path("/c/.cache/penstock/kernels")
    with pytest.raises(FolderUnusableError, match="HOME"):
        cache_folder({})


def test_clear_removes_builds_and_nothing_else(fake: FakeCompiler) -> None:
    folder = fake.built().path.parent
    (folder / "building-left-over").mkdir()
    (folder / "not ours").write_text("x")
    cache = BuildCache.open(folder)
    assert cache.clear() == (1, len("library\n"))
    assert [path.name for path in folder.iterdir()] == ["not ours"]
    assert cache.clear() == (0, 0)


# --- several at once --------------------------------------------------------------------------------


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The folder's lock, held by someone else."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_who_comes_second_waits_and_takes_what_the_first_built(
    fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first compiler stands still until the second caller is seen to wait for the lock."""
    go = fake.directory / "go"
    os.mkfifo(go)
    started = fake.directory / "started"
    os.mkfifo(started)
    fake.sources.joinpath("two.cpp").unlink()
    fake.says(f'case "$*" in *-shared*) ;; *) echo > {started}; read line < {go} ;; esac; {WRITES_OUTPUT}')
    results: list[Built] = []
    first = threading.Thread(target=lambda: results.append(fake.built()))

    def let_go_and_wait(_: float) -> None:
        if first.is_alive():
            go.write_text("\n")
            first.join()

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=let_go_and_wait)
    monkeypatch.setattr(build_cache, "time", clock)  # of the lock alone: subprocess sleeps as well
    first.start()
    started.read_text()
    second = fake.built()
    first.join()
    assert second.seconds == 0
    assert results[0].seconds > 0
    assert results[0].path == second.path
    assert fake.num_calls == 2  # one source, one link


def test_several_processes_at_once_compile_once(fake: FakeCompiler) -> None:
    program = (
        "import os, pathlib, sys\n"
        "from penstock.kernels.cpu.compiler import Machine, build\n"
        "machine = Machine(architecture='x86_64', cpu_flags=('avx2', 'fma'), num_cores=2)\n"
        "print(build(os.environ, machine, sources=pathlib.Path(sys.argv[1])).path)\n"
    )
    environ = fake.environ(PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, "-c", program, str(fake.sources)]
    ranks = [
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = [rank.communicate(timeout=60) for rank in ranks]
    assert [error for _, error in answers] == [""] * 3
    assert len({path for path, _ in answers}) == 1
    assert fake.num_calls == 3


def test_the_wait_for_the_lock_is_bounded(fake: FakeCompiler) -> None:
    folder = fake.built().path.parent
    entered = False
    with held(folder), BuildCache.open(folder).locked(0.0):
        entered = True
    assert entered


def test_a_file_system_without_locks_is_no_obstacle(
    fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(build_cache.fcntl, "flock", no_locks)
    assert fake.built().seconds > 0
