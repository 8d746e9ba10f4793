"""The gates that keep the house in order: sizes, layers, names, imports, and what documents say."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from paths import REPOSITORY

SOURCE = REPOSITORY / "src"
MODULES = sorted((SOURCE / "penstock").rglob("*.py"))
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
DOCUMENTS = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *(path.relative_to(REPOSITORY).as_posix() for path in sorted((REPOSITORY / "docs").rglob("*.md"))),
]

# The distribution that brings a module, where the two names differ.
DISTRIBUTION_OF = {
    "zmq": "pyzmq",
    "prometheus_client": "prometheus-client",
    "huggingface_hub": "huggingface-hub",
}


@cache
def tree_of(path: Path) -> ast.Module:
    """Return what a file says, which many of these tests look at."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@pytest.fixture(scope="module", autouse=True)
def _trees_are_dropped() -> Iterator[None]:
    """Give back the memory, some hundred MiB, at the end."""
    yield
    tree_of.cache_clear()


def shown(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        cwd=REPOSITORY,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# --- sizes ----------------------------------------------------------------------------------------


def size_gate(*directories: Path) -> subprocess.CompletedProcess[str]:
    return run_script(sys.executable, "scripts/size_gate.py", *map(str, directories))


def function_of(lines: int, name: str = "long") -> str:
    return f"def {name}():\n" + "    x = 1\n" * (lines - 1)


def test_size_gate_passes_on_the_source() -> None:
    gate = size_gate()
    assert gate.returncode == 0, gate.stderr
    assert [row.split()[0] for row in gate.stdout.splitlines()[1:]] == ["file", "function", "class"]


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("x = 1\n" * 600, "file of 600 lines"),
        (function_of(81), "function of 81 lines"),
        ("class Big:\n" + "    x = 1\n" * 299, "class of 300 lines"),
        (
            "class Wide:\n    def __init__(self):\n"
            + "".join(f"        self.a{i} = {i}\n" for i in range(16)),
            "sets 16 attributes",
        ),
        ("".join(function_of(10, f"f{i}") for i in range(3)), "the median function has 10 lines"),
        (
            "".join(function_of(2, f"s{i}") for i in range(8)) + function_of(36, "a") + function_of(36, "b"),
            "the 90th percentile of functions is 36 lines",
        ),
    ],
)
def test_size_gate_fails_on_each_cap(tmp_path: Path, source: str, complaint: str) -> None:
    (tmp_path / "module.py").write_text(source, encoding="utf-8")
    gate = size_gate(tmp_path)
    assert gate.returncode == 1
    assert complaint in gate.stderr


def test_size_gate_accepts_the_caps_themselves_and_exempts_kernels(tmp_path: Path) -> None:
    fits = [function_of(80), *(function_of(2, f"f{i}") for i in range(20))]
    (tmp_path / "fits.py").write_text("".join(fits), encoding="utf-8")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "wide.py").write_text(function_of(500), encoding="utf-8")
    gate = size_gate(tmp_path)
    assert gate.returncode == 0, gate.stderr


# --- layers and names -----------------------------------------------------------------------------


# Extras of a single library that a single module imports: they may be missing where tests run.
EXTRAS = {"gguf": "gguf", "ray": "ray", "zeroconf": "discovery"}


def torch_free_modules() -> list[str]:
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    roots = next(c["source_modules"] for c in contracts if c.get("forbidden_modules") == ["torch"])
    names = map(module_name, MODULES)
    return [name for name in names if any(name == root or name.startswith(f"{root}.") for root in roots)]


def test_torch_free_modules_load_without_torch() -> None:
    names = torch_free_modules()
    assert {"penstock.scheduler.scheduler", "penstock.engine.core.core", "penstock.config.engine"} <= set(
        names
    )
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error:\n"
        f"        assert error.name in {sorted(EXTRAS)!r}, error\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    result = run_script(sys.executable, "-c", program)
    assert result.returncode == 0, result.stderr


# What of one machine a name may stand for: descriptors, process numbers, and how they are made and passed on.
OF_ONE_MACHINE = re.compile(
    r"(^|_)(fds|pid|pidfd)$|_fd$|^(memfd_create|eventfd(_\w+)?|pidfd_\w+|send_fds|recv_fds|SCM_RIGHTS|pipe2?)$"
)
OF_FOLDERS = {"dir_fd", "src_dir_fd", "dst_dir_fd"}  # arguments of `os`, for paths below an open folder
KNOW_THIS_MACHINE = {
    "hosts/local*.py",  # the host of the supervisor
    "process/*.py",  # what every process does first with what it was started with
    "pipeline/links/ring*.py",  # the carriers between processes of one machine
    "pipeline/links/plan_channel.py",
    "pipeline/links/stream*.py",  # a process opens them with what its own host has handed it
    "hosts/stream_ends.py",
    "hosts/link_streams.py",
    "hosts/bell.py",  # rings in the own process
    "hosts/logs/child_outputs.py",  # what processes of the own host print
    "distributed/meeting.py",
    "engine/supervisor/fronts.py",  # the API process and the program that calls are always here
    "engine/supervisor/supervisor.py",  # its `main`, which such a program starts
    "llm/supervisor_process.py",  # such a program
    "server/api_process.py",  # inherits the HTTP socket
    "drafting/drafter_child.py",  # beside the core, which is always here
    "drafting/drafter_process.py",  # inherits its end of a socket pair
    "cli/doctor.py",  # asks whether this kernel has them
    "cli/bench/resident_memory.py",  # counts the memory of what it has started
    "kernels/cpu/compiler_jobs.py",  # compilers are no ranks
    "trust/credentials.py",  # hands keys to processes of its own machine, in memory without a name
    "trust/tls.py",  # OpenSSL reads keys from files only
    "trace/chrome.py",  # a column of Chrome's format
}


def names_in(tree: ast.Module) -> Iterator[str]:
    """All names that a module uses or gives, but for those in texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.alias | ast.FunctionDef | ast.ClassDef):
            yield node.name


def test_only_the_local_host_and_its_carriers_know_descriptors_and_process_numbers() -> None:
    """Whatever else names one could not stay as it is when a rank runs on another machine."""
    package = SOURCE / "penstock"
    allowed = {path for pattern in KNOW_THIS_MACHINE for path in package.glob(pattern)}
    naming = {
        path: {name for name in names_in(tree_of(path)) if OF_ONE_MACHINE.search(name)} - OF_FOLDERS
        for path in MODULES
    }
    assert {shown(path): names for path, names in naming.items() if names and path not in allowed} == {}
    needless = [
        pattern for pattern in KNOW_THIS_MACHINE if not any(naming[path] for path in package.glob(pattern))
    ]
    assert needless == []


def test_package_files_import_nothing() -> None:
    inits = [path for path in MODULES if path.name == "__init__.py" and path.parent != SOURCE / "penstock"]
    assert inits
    assert [shown(path) for path in inits if path.read_text(encoding="utf-8").strip()] == []


def test_import_of_the_package_is_lazy() -> None:
    program = "import sys, penstock; assert not {'torch', 'msgspec', 'numpy'} & set(sys.modules)"
    result = run_script(sys.executable, "-c", program)
    assert result.returncode == 0, result.stderr


def test_every_module_says_what_it_owns() -> None:
    silent = [shown(path) for path in MODULES if path.stat().st_size and not ast.get_docstring(tree_of(path))]
    assert silent == []


def test_no_file_or_class_is_named_for_a_heap() -> None:
    heap = re.compile(r"(Manager|Helper|Handler|Mixin|Utils?)$")
    files = [shown(path) for path in MODULES if path.stem in {"utils", "util", "helpers", "common", "misc"}]
    classes = [
        f"{shown(path)}:{node.lineno} {node.name}"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and heap.search(node.name)
    ]
    assert files + classes == []


# --- what bytes from outside may never reach ------------------------------------------------------


PICKLERS = {"pickle", "_pickle", "marshal", "shelve", "cloudpickle", "dill", "joblib", "jsonpickle"}
RUNS_CODE = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
# Each of these pickles what crosses a file, a socket or a process, whoever's method it is.
PICKLING_METHODS = {
    *("send_pyobj", "recv_pyobj", "ProcessPoolExecutor"),
    *("send_object_list", "recv_object_list", "broadcast_object_list", "scatter_object_list"),
    *("all_gather_object", "gather_object"),
}


def dangerous_calls(path: Path) -> Iterator[str]:
    """Calls that run code or unpickle: on our wires and in our loaders there are none."""
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        plain = called in RUNS_CODE | {"torch.load", "torch.save", "torch.jit.load"}
        method = called.rpartition(".")[2] in PICKLING_METHODS
        if plain or method or any(map(allows_code, node.keywords)) or called.split(".")[0] in PICKLERS:
            yield f"{shown(path)}:{node.lineno} {called}"


def allows_code(keyword: ast.keyword) -> bool:
    wanted = {"shell", "allow_pickle", "trust_remote_code"}
    return keyword.arg in wanted and ast.unparse(keyword.value) != "False"


def test_rule_1_no_pickle_no_eval_no_shell_in_the_source() -> None:
    """CVE-2024-50050, CVE-2025-32444, CVE-2026-26210 and their like."""
    assert [call for path in MODULES for call in dangerous_calls(path)] == []


def test_rule_1_nothing_that_pickles_is_imported() -> None:
    banned = PICKLERS | {"multiprocessing"}  # its queues, pipes and managers pickle
    found = [
        (shown(path), name)
        for path in MODULES
        for name in imported_names(tree_of(path))
        if name.split(".")[0] in banned or name == "torch.multiprocessing"
    ]
    assert found == []


def test_rule_6_code_that_a_model_brings_can_not_be_asked_for() -> None:
    """CVE-2026-22807: there is no such flag, argument or field."""
    assert [shown(path) for path in MODULES if "trust_remote_code" in path.read_text("utf-8")] == []


def test_dangerous_calls_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "REPOSITORY", tmp_path)
    path = tmp_path / "bad.py"
    path.write_text(
        "eval('1')\ntorch.load(f)\npickle.loads(b)\nrun(c, shell=True)\nsocket.recv_pyobj()\n"
        "np.load(f, allow_pickle=True)\nmodel.eval()\nre.compile(p)\nnp.load(f, allow_pickle=False)\n",
        encoding="utf-8",
    )
    assert [call.split()[0] for call in dangerous_calls(path)] == [
        "bad.py:1",
        "bad.py:2",
        "bad.py:3",
        "bad.py:4",
        "bad.py:5",
        "bad.py:6",
    ]


def test_no_module_waits_by_a_call_that_knows_the_first_1024_descriptors_only() -> None:
    """`penstock.process.readiness` has one that knows all."""
    waiting = [
        f"{shown(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "select.select"
    ]
    assert waiting == []


# --- dependencies ---------------------------------------------------------------------------------


def declared(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=! ;]", requirement)[0] for requirement in requirements}


def third_party_imports() -> set[str]:
    names = {name.split(".")[0] for path in MODULES for name in imported_names(tree_of(path))}
    modules = names - sys.stdlib_module_names - {"penstock"}
    return {DISTRIBUTION_OF.get(name, name) for name in modules}


def test_source_imports_only_what_is_declared() -> None:
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    names = ("hf", "hosts", "stores", *EXTRAS.values())
    known = declared(project["dependencies"] + [package for name in names for package in extras[name]])
    assert third_party_imports() - known == set()


def test_every_core_dependency_is_used_by_the_source() -> None:
    assert declared(PYPROJECT["project"]["dependencies"]) - third_party_imports() == set()


def test_strict_types_cover_every_torch_free_package() -> None:
    strict = next(o["module"] for o in PYPROJECT["tool"]["mypy"]["overrides"] if o.get("strict"))
    covered = {pattern.removesuffix(".*") for pattern in strict}
    packages = (
        "scheduler",
        "kvcache",
        "kvstore",
        "engine",
        "server",
        "tokenizer",
        "cli",
        "llm",
        "process",
        "hosts",
        "trust",
    )
    leaves = ("batch", "request", "config", "errors")
    assert {f"penstock.{name}" for name in (*packages, "process", *leaves)} <= covered


# --- ./run and the documents ----------------------------------------------------------------------


def test_run_refuses_an_unknown_command_with_one_sentence() -> None:
    result = run_script("./run", "frobnicate")
    assert result.returncode == 2
    assert result.stderr == (
        "run: there is no command 'frobnicate'; "
        "use ./run, ./run setup, ./run test, ./run test-doors or ./run soak.\n"
    )


def test_run_without_a_python_ends_with_one_sentence() -> None:
    result = run_script("./run", "setup", PENSTOCK_PYTHON="false")
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch(r"run: Penstock needs Python 3\.11 or newer [^\n]*\n", result.stderr)


def test_run_names_no_index_and_installs_torch_first() -> None:
    script = (REPOSITORY / "run").read_text(encoding="utf-8")
    assert not re.search(r"index-url|find-links|https?://(?!\$host)", script)
    assert script.index("        install_torch\n") < script.index('pip_install -e "')
    assert "torch==2.13.0" in script


def test_ci_runs_the_same_checks() -> None:
    script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"^\./run (\S+)", script, re.MULTILINE) == ["test", "test-doors"]


def test_every_test_behind_a_door_is_marked_and_no_other_command_runs_it() -> None:
    files = sorted((REPOSITORY / "tests" / "doors").glob("test_*.py"))
    assert files
    for path in files:
        assert "pytestmark = pytest.mark.doors" in path.read_text(encoding="utf-8"), shown(path)
    script = (REPOSITORY / "run").read_text(encoding="utf-8")
    assert 'FAST="not soak and not gpu and not doors"' in script
    soak = (REPOSITORY / "scripts" / "soak.py").read_text(encoding="utf-8")
    assert 'and not doors"' in soak


def test_no_two_files_of_tests_have_the_same_name() -> None:
    """Tests are no package: pytest would refuse the second file, and only where both are collected."""
    names = [path.name for path in (REPOSITORY / "tests").rglob("test_*.py")]
    assert len(set(names)) == len(names)


def test_files_of_tests_can_be_read_where_shared_data_is_absent() -> None:
    """A test skips itself there; asked for while a file is read, the data would end the whole run."""
    asked = []
    for path in (REPOSITORY / "tests").rglob("*.py"):
        for statement in ast.parse(path.read_text(encoding="utf-8"), str(path)).body:
            inner = statement.decorator_list if isinstance(statement, ast.FunctionDef) else [statement]
            calls = [node for part in inner for node in ast.walk(part) if isinstance(node, ast.Call)]
            if not isinstance(statement, ast.ClassDef):
                asked += [shown(path) for call in calls if ast.unparse(call.func) == "shared_data"]
    assert asked == []


def test_changelog_knows_this_version() -> None:
    from penstock import __version__

    assert PYPROJECT["project"]["version"] == __version__
    assert f"## {__version__}" in (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")


def test_architecture_tour_is_what_the_docstrings_say() -> None:
    result = run_script(sys.executable, "scripts/file_tour.py", "--check")
    assert result.returncode == 0, "run `python scripts/file_tour.py`"


def test_flags_page_and_arguments_of_llm_are_what_the_configs_declare() -> None:
    result = run_script(sys.executable, "scripts/settings_text.py", "--check")
    assert result.returncode == 0, f"run `python scripts/settings_text.py`\n{result.stderr}"


def test_file_tour_names_every_room() -> None:
    import file_tour

    assert {file_tour.room_of(path) for path in file_tour.modules()} == set(file_tour.ROOMS)


def test_no_room_has_more_than_25_modules() -> None:
    rooms = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    known = SOURCE / "penstock" / "families" / "known"  # one file for each family, however many there are
    assert [shown(room) for room, modules in rooms.items() if modules > 25 and room != known] == []


def test_entry_points_are_modules_that_run() -> None:
    from penstock.process import entry_points

    names = {value for name, value in vars(entry_points).items() if name.isupper()}
    assert names
    for name in names:
        path = SOURCE.joinpath(*name.split(".")).with_suffix(".py")
        assert 'if __name__ == "__main__":' in path.read_text(encoding="utf-8"), name
    strings = [
        (shown(path), node.value)
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert {place for place, _ in strings} == {"src/penstock/process/entry_points.py"}


def anchors(text: str) -> set[str]:
    """The anchors that GitHub and mkdocs give the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    path = REPOSITORY / document
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", path.read_text(encoding="utf-8"))
    targets = [(path.parent / link if link else path, anchor) for link, anchor in links]
    assert [shown(target) for target, _ in targets if not target.exists()] == []
    assert [
        f"{shown(target)}#{anchor}"
        for target, anchor in targets
        if anchor and anchor not in anchors(target.read_text(encoding="utf-8"))
    ] == []


def test_figures_of_a_topic_are_newest_first_and_the_front_page_leads_to_each_topic() -> None:
    front = (REPOSITORY / "docs" / "perf-log.md").read_text(encoding="utf-8")
    seen = []
    for path in sorted((REPOSITORY / "docs" / "figures").glob("*.md")):
        assert f"(figures/{path.name})" in front, shown(path)
        headings = re.findall(r"^## (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        dates = [heading[:10] for heading in headings]
        assert dates == sorted(dates, reverse=True), shown(path)
        seen += headings
    assert len(seen) > 50
    assert [heading for heading, count in Counter(seen).items() if count > 1] == []


def test_every_page_of_the_docs_is_in_the_navigation_of_the_site() -> None:
    """The site itself is built by tests/doors/test_docs_site.py."""
    navigation = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    docs = REPOSITORY / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert set(re.findall(r"(?<=[ :])[\w/-]+\.md$", navigation, re.MULTILINE)) == pages


def test_readme_shows_what_a_newcomer_needs() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for needed in (
        "./run",
        "--pp 2",
        "curl",
        "from penstock import LLM, SamplingParams",
        "Qwen2.5-0.5B-Instruct",
    ):
        assert needed in readme
