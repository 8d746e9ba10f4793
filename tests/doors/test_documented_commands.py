"""Every command and program of README.md and of the pages is run, as a reader types it.

Each page is read from the top to the bottom. What nothing here can run is in a table of `page_rules`, with
the test that proves it or the reason why there is nothing to run. A block that is in no table, and is neither
run nor a drawing, fails a test.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from fake_hub import fake_hub
from named_tests import all_tests_in
from page_blocks import PAGES, Block, all_blocks
from page_models import TEXT_MODELS, PageModels
from page_reader import PageReader
from page_rules import (
    BEFORE,
    FILES,
    NOT_PRINTED,
    PRINTED,
    PROGRAMS,
    PROVED,
    TEXTS,
    WRITTEN,
    is_run,
    is_told,
    key_of,
)
from pages import section
from paths import REPOSITORY
from penstock.cli.help import COMMANDS, GROUPS
from penstock.cli.program import _flags_of, run
from penstock.cli.terminal import Invocation
from penstock.trust.join_token import JoinToken
from real_servers import free_ports
from served import Served, wait_until

pytestmark = pytest.mark.doors

BLOCKS = all_blocks()
TESTS = REPOSITORY / "tests"
RUN = (REPOSITORY / "run").read_text(encoding="utf-8")
ADMIN_KEY = "an-admin-key"
LIMIT_S = 120.0

# --- which blocks there are ---------------------------------------------------------------------------


def test_every_block_is_run_or_proved_elsewhere_or_nothing_to_run() -> None:
    assert len(BLOCKS) > 100
    unknown = [str(block) for block in BLOCKS if not (is_run(block) or is_told(block) or block.is_drawing)]
    assert unknown == [], "nothing runs these blocks; add them to a table, with the reason"


def test_every_row_of_the_tables_is_about_one_block() -> None:
    for table in (PROVED, TEXTS, FILES, BEFORE, PRINTED):
        for key in table:
            found = [str(block) for block in BLOCKS if block.page == key[0] and key[1] in block.text]
            assert len(found) == 1, (key, found)
    for page in {*WRITTEN, *PROGRAMS, *NOT_PRINTED}:
        assert (REPOSITORY / f"{page}.md").is_file(), page


@pytest.mark.parametrize("test", sorted(set(PROVED.values())))
def test_what_proves_a_block_is_a_test(test: str) -> None:
    file, _, name = test.partition("::")
    assert name in all_tests_in(TESTS / file)


# --- pages ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> PageModels:
    return PageModels.make(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """The server that runs when somebody opens a page, with the names that pages call its model.

    They are not on its command line, where `penstock rm` would find a model in use.
    """
    names = {"PENSTOCK_SERVED_MODEL_NAME": f"demo,qwen3,{TEXT_MODELS[0]}"}
    with Served("demo", "--pp", "2", "--threads-per-rank", "1", env=names) as served:
        yield served


@pytest.fixture(scope="module")
def started() -> set[str]:
    """The lines that have started engines so far; `server` is such an engine."""
    return {"penstock serve demo --pp 2"}


@pytest.fixture
def reader(
    request: pytest.FixtureRequest, models: PageModels, server: Served, started: set[str], tmp_path: Path
) -> Iterator[PageReader]:
    page = getattr(request, "param", "docs/coming-from")
    models.furnish(tmp_path)
    with fake_hub() as hub:
        models.fill_hub(hub)
        variables = {
            "ADMIN_KEY": ADMIN_KEY,
            "HF_ENDPOINT": hub.url,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "0",
            "OLLAMA_MODELS": str(tmp_path / "ollama"),
            "PENSTOCK_ADMIN_KEY": ADMIN_KEY,
            "PENSTOCK_HUB_ENDPOINT": hub.url,
            "PENSTOCK_PROFILE_DIR": str(tmp_path),
            "PENSTOCK_WARM_SPARE": "0",  # these servers lose no stage: they need not prepare for that
        }
        made = PageReader(tmp_path, server.url, variables, WRITTEN.get(page, {}), started)
        try:
            yield made
        finally:
            made.close()


READ = sorted({block.page for block in BLOCKS if is_run(block)})


@pytest.mark.parametrize(("reader", "page"), [(page, page) for page in READ], indirect=["reader"], ids=READ)
def test_a_page_is_typed_from_the_top_to_the_bottom(reader: PageReader, page: str) -> None:
    programs: list[Block] = []
    for block in [block for block in BLOCKS if block.page == page and is_run(block)]:
        if block.language == "python":
            programs.append(block)
            continue
        run_programs(reader, programs)
        programs = []
        before = key_of(block, BEFORE)
        for line in BEFORE[before] if before else []:
            reader.type(line)
        file = key_of(block, FILES)
        if file:
            reader.write(FILES[file][0], block.text)
        lines = [FILES[file][1]] if file else block.commands
        expect(block, "".join(reader.type(line) for line in lines))
    run_programs(reader, programs)


def run_programs(reader: PageReader, blocks: Sequence[Block]) -> None:
    """Run blocks that follow each other as one program: later ones use the names of earlier ones."""
    if not blocks:
        return
    before, behind = PROGRAMS.get(blocks[0].page, ("", ""))
    printed = reader.run_program("\n".join([before, *(block.text for block in blocks), behind]))
    for block in blocks:
        expect(block, printed)


def expect(block: Block, printed: str) -> None:
    """Hold what is printed against what the page shows and what a table says."""
    if key := key_of(block, PRINTED):
        assert re.search(PRINTED[key], printed), f"{block}:\n{printed[-4000:]}"
    missing = words_of(block.shown) - words_of(printed) - NOT_PRINTED.get(block.page, set())
    assert missing == set(), f"{block} shows what is not printed:\n{printed[-4000:]}"


def words_of(text: str) -> set[str]:
    """Return the words of a text, without names with digits, which differ from run to run."""
    return {word for word in re.findall(r"[\w.-]+", text) if re.fullmatch(r"[A-Za-z_]{3,}", word.strip(".-"))}


# --- what pages show otherwise ----------------------------------------------------------------------


def test_a_clone_starts_with_run(tmp_path: Path) -> None:
    """In a clone whose environment is made already; `test_wheel` makes one, which takes minutes."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("this is not a git checkout")
    (text,) = {block.text for block in BLOCKS if block.text.startswith("git clone")}
    clone, start = text.splitlines()
    typed = clone.replace("<this repository>", shlex.quote(str(REPOSITORY)))
    subprocess.run(["bash", "-c", typed], cwd=tmp_path, check=True, timeout=LIMIT_S, capture_output=True)
    (folder,) = tmp_path.iterdir()
    prepare(folder)
    (port,) = free_ports(1)
    environment = {name: value for name, value in os.environ.items() if name != "PENSTOCK_TORCH"}
    with (tmp_path / "printed").open("w", encoding="utf-8") as printed:
        running = subprocess.Popen(
            [start, "--port", str(port)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
    said = (tmp_path / "printed").read_text
    try:
        wait_until(lambda: "tokens, first after" in said() or running.poll() is not None, LIMIT_S)
    finally:
        running.send_signal(signal.SIGINT)
        code = running.wait(LIMIT_S)
    assert code == 0, said()
    shown = next(block for block in BLOCKS if "[1/4] python" in block.text)
    before, _, _ = shown.text.partition("> ROMEO:")  # behind it is what the model says
    assert words_of(before) - words_of(said()) == set(), said()


def prepare(folder: Path) -> None:
    """Let `./run` find that the environment of a clone is made: it is the one of this process."""
    environment = folder / ".venv"
    (environment / "bin").mkdir(parents=True)
    for name, command in {"python": [sys.executable], "penstock": [sys.executable, "-m", "penstock"]}.items():
        program = environment / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    made_from = f"|{torch_of_run()}|{environment}|".encode() + (folder / "pyproject.toml").read_bytes()
    (environment / ".prepared-").write_text(hashlib.sha256(made_from).hexdigest(), encoding="utf-8")


def torch_of_run() -> str:
    """Return the torch that `./run` installs."""
    (found,) = re.findall(r"PENSTOCK_TORCH:-(torch==[\d.]+)}", RUN)
    return str(found)


def test_what_the_pages_install_there_is() -> None:
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    named = {name for names in re.findall(r"penstock\[([\w,]+)\]", text) for name in names.split(",")}
    assert len(named) > 4
    assert named <= set(extras)
    typed = "\n".join(block.text for block in BLOCKS)
    assert set(re.findall(r"torch==[\d.]+", typed)) == {torch_of_run()}


def test_paths_of_tests_exist() -> None:
    blocks = [block for block in BLOCKS if "bin/pytest" in block.text]
    paths = [word for block in blocks for word in block.text.split() if word.startswith("tests/")]
    assert len(paths) > len(blocks) > 3
    assert all((REPOSITORY / path).exists() for path in paths)


@pytest.mark.parametrize(
    ("beginning", "path"),
    [
        ("def olmo3_spec", "src/penstock/families/known/olmo.py"),
        ('"olmo3": Family(', "tests/support/families.py"),
    ],
)
def test_code_that_a_page_quotes_is_in_the_tree(beginning: str, path: str) -> None:
    (block,) = [block for block in BLOCKS if block.text.startswith(beginning)]
    quoted = ".*?".join(map(re.escape, squeezed(block.text).split("...")))
    assert re.search(quoted, squeezed((REPOSITORY / path).read_text(encoding="utf-8")))


def squeezed(text: str) -> str:
    """Return code without white space and without commas before a bracket, however its lines are broken."""
    return re.sub(r",(?=[)}\]])", "", re.sub(r"\s", "", text))


def test_the_token_of_the_page_is_one() -> None:
    (block,) = [block for block in BLOCKS if block.text.startswith("A-7PVS")]
    assert JoinToken.parse(block.text.strip()).text() == block.text.strip()


@pytest.mark.parametrize(
    ("page", "beginning", "path", "until"),
    [
        ("docs/endpoints", '{"feed_version"', "/debug/pipeline", "}"),
        ("docs/live-page", "event: lanes", "/debug/pipeline/events?lanes=true", '"reports"'),
    ],
)
def test_fields_of_the_feed_are_those_of_the_page(
    reader: PageReader, page: str, beginning: str, path: str, until: str
) -> None:
    (block,) = [block for block in BLOCKS if block.page == page and block.text.startswith(beginning)]
    text = (REPOSITORY / f"{page}.md").read_text(encoding="utf-8")
    answered = set(re.findall(r'"(\w+)":', reader.read(path, until).rpartition("event: ")[2]))
    named = set(re.findall(r'"(\w+)"', block.text))
    assert named - answered <= {"hosts"}, "links have hosts, where there are several"
    assert answered - named <= set(re.findall(r"`(\w+)`", text))


# --- tables and sentences -----------------------------------------------------------------------------


def rows_of(engine: str, is_of_flags: bool) -> list[tuple[str, str]]:
    """Return the rows of the table of an engine's commands or flags: theirs, and ours."""
    lines = [line for line in section("coming-from", engine).splitlines() if line.startswith("| `")]
    cells = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]
    return [(theirs, ours) for theirs, ours in cells if theirs.startswith("`-") == is_of_flags]


@pytest.mark.parametrize("engine", ["vLLM", "llama.cpp", "Ollama"])
def test_commands_in_place_of_another_engines_are_typed(reader: PageReader, engine: str) -> None:
    rows = rows_of(engine, is_of_flags=False)
    assert len(rows) >= 5
    name = ""
    for theirs, ours in rows:
        quoted = re.findall(r"`([^`]+)`", ours)
        assert quoted, theirs
        for line in quoted:
            if line.startswith("from "):
                reader.run_program(line)
            elif not line.startswith(
                "penstock worker"
            ):  # typed between two hosts: `test_several_machines_page`
                reader.type(f"{line} {name}" if line == "penstock serve" else line)
            if line.startswith("penstock pull"):
                name = line.split()[2]


def said_by(*words: str) -> tuple[int, str]:
    """Run a command line in this process; return the exit code and what it says."""
    out = StringIO()
    return run(words, Invocation(stdout=out, stderr=out, stdin=StringIO(), environ={})), out.getvalue()


@pytest.mark.parametrize("engine", ["vLLM", "llama.cpp"])
def test_flags_of_another_engine_are_taken_or_answered_with_ours(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr("penstock.cli.serve.run_supervisor", lambda *arguments: 0)
    known = flags_of("serve")
    rows = rows_of(engine, is_of_flags=True)
    assert len(rows) > 12
    for theirs, ours in rows:
        named = re.findall(r"`(--?[a-z-]+)`", ours)
        assert set(named) <= known, ours
        for flag in re.findall(r"`(--?[\w-]+)`", theirs):
            if flag in known:
                assert flag in named or ours.startswith("the same"), flag
                continue
            code, said = said_by("serve", "demo", flag, "1")
            assert code == 2, flag
            assert f"{flag} is a flag of " in said, said
            assert engine in said.partition("; ")[0], said
            assert f"here it is `{named[0]}`" in said if named else ours.startswith("none"), said


def test_a_layout_has_the_long_name_of_vllm() -> None:
    code, said = said_by("serve", "demo", "--pipeline-parallel-size", "2", "--print-config")
    assert code == 0
    assert "pipeline-parallel-size = 2 " in said


@cache
def flags_of(*command: str) -> frozenset[str]:
    invocation = Invocation(stdout=StringIO(), stderr=StringIO(), stdin=StringIO(), environ={})
    return _flags_of(command, invocation)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_in_sentences_and_tables_are_ours_with_all_their_flags(path: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for quoted in re.findall(r"`(?:\.venv/bin/)?penstock ([^`]+)`", text):
        words = quoted.split()
        if words[0] == "COMMAND" or words[0].startswith("-"):
            continue
        command = tuple(words[: 2 if words[0] in GROUPS else 1])
        if command in {(group,) for group in GROUPS}:
            continue
        assert command in COMMANDS, quoted
        own, _, passed_on = quoted.partition(" -- ")
        for flags, of in ((own, command), (passed_on, ("serve",))):
            named = set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", f" {flags}"))
            assert named <= flags_of(*of) | {"--help"}, quoted


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("complete 'ROMEO:' --max-tokens 8", r"\w"),
        ("trace --out trace.json", "trace"),
        ("bench serve --num-prompts 8 --random-output-len 8", "tokens"),
    ],
)
def test_a_command_talks_to_a_running_server(reader: PageReader, words: str, said: str) -> None:
    assert re.search(said, reader.type(f"penstock {words}"))


def test_the_table_of_commands_names_every_command() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    commands = (REPOSITORY / "docs" / "commands.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        assert re.search(rf"`(penstock )?{' '.join(command)}\b", commands), command
    for command in ("serve", "chat", "complete", "plan", "bench", "cache", "kernels", "trace", "doctor"):
        assert f"`penstock {command}" in readme
