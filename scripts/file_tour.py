"""Writes the tour of the files in docs/architecture.md from the first sentence of each module's docstring.

    python scripts/file_tour.py            writes it
    python scripts/file_tour.py --check    exits with 1 where the page is not what it would write

The tour stands between two comments of the page. The order and the headings of the rooms are here. A room
that is not named here comes last, under its own name, so that no module is left out.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "penstock"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- file tour: written by scripts/file_tour.py -->\n", "<!-- end of the file tour -->"

ROOMS = {
    "": "the modules that are in no folder: messages, errors and other things that many packages share",
    "config": "what can be set",
    "process": "what the processes of Penstock share: their start, orders, signals, sockets and memory",
    "trust": "who belongs to a cluster of hosts, and how a connection proves it",
    "cli": "the command line",
    "cli/plans": "`penstock plan` and `penstock simulate`",
    "cli/bench": "the benchmarks of `penstock bench`",
    "cli/replaying": "`penstock replay`",
    "cli/models": "the models of this machine: downloaded, listed, removed",
    "hub": "the Hugging Face Hub, from which models are downloaded on request",
    "local_models": "models on this machine, found by their names",
    "server": "HTTP: the app and its process",
    "server/http": "what every connection passes",
    "server/openai": "what may be asked, and in which shape",
    "server/anthropic": "requests and answers in the shapes of Anthropic's API",
    "server/answers": "from tokens to bytes",
    "server/routes": "the routes",
    "llm": "the engine as a Python object",
    "simulator": "the engine over stages that do not exist",
    "replay": "a recorded engine's decisions, made again and compared",
    "reports": "what benchmarks measured, as one page that needs no network",
    "engine": "the wire between the core and its clients",
    "engine/supervisor": "the process that starts, watches and ends the others",
    "engine/core": "the core's process, around the scheduler",
    "engine/client": "the core's clients",
    "decisions": "what an engine decides and what it knew, recorded in a file",
    "hosts": "the machines that ranks run on",
    "hosts/weights": "how a worker gets the weights of its ranks",
    "hosts/launchers": "programs that start Penstock on many hosts, such as SLURM and Ray",
    "hosts/network": "the network paths between hosts: found, measured and chosen",
    "hosts/logs": "how the head shows what is printed on other hosts",
    "drafting": "a small model that guesses, in a process of its own",
    "layouts": "which layout a model should have on devices that one may not have yet",
    "planner": "`--partition auto`: which layers each stage should hold",
    "executor": "ranks, seen from the core",
    "scheduler": "which requests run in which plan",
    "kvcache": "which KV blocks belong to which request",
    "speculation": "what guesses tokens, and how many guesses are worth sending",
    "rank": "a rank's process, from weights to the end of its loop",
    "pipeline": "the stage loop and all that is pipeline-parallel",
    "pipeline/links": "what carries tensors and messages between processes",
    "pipeline/bulk": "what carries payloads that can wait until hidden states have passed",
    "runner": "one rank's step",
    "sample": "sampling, on the last stage",
    "models": "how a model computes",
    "weights": "from checkpoint files to parameters",
    "layers": "the parts of a model",
    "attention": "attention over paged keys and values",
    "gguf": "files of llama.cpp's format: what is in them, and where",
    "families": "what a model is, in numbers (torch-free)",
    "families/known": "one file for each family of models",
    "kernels": "what all kernels share",
    "kernels/cpu": "our kernels for CPUs",
    "distributed": "what the ranks of one stage do together",
    "grammar": "which texts a request may get",
    "tokenizer": "text to tokens and back",
    "tokenizer/sources": "vocabularies in other forms than `tokenizer.json`",
    "trace": "where the time goes",
    "workloads": "loads of requests, made or read from traces",
    "kvstore": "the storage tier of the KV cache",
}


def modules() -> Iterator[Path]:
    """Yield every module that is not an empty package file, by path."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "__init__.py" or path.parent == PACKAGE:
            yield path


def first_sentence(path: Path) -> str:
    """Return the first sentence of the module's docstring, on one line, without the dot at its end."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n\n")[0]
    line = " ".join(paragraph.split())
    return re.split(r"(?<=[.:;]) (?=[A-Z])", line)[0].rstrip(".:;").replace("|", "\\|")


def room_of(path: Path) -> str:
    folder = path.relative_to(PACKAGE).parent.as_posix()
    return "" if folder == "." else folder


def tour() -> str:
    """Return the whole tour as Markdown: a heading and a table for each room."""
    rows: dict[str, list[str]] = {room: [] for room in ROOMS}
    for path in modules():
        rows.setdefault(room_of(path), []).append(f"| `{path.stem}` | {first_sentence(path)} |")
    parts = []
    for room, lines in rows.items():
        heading = f"**{room or 'penstock'}**" + (f": {ROOMS[room]}" if room in ROOMS else "")
        parts.append("\n".join([heading, "", "| file | what it is |", "|---|---|", *lines, ""]))
    return "\n".join(parts)


def with_tour(page: str) -> str:
    """Return the page with the tour as the source has it now."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{tour()}\n{END}{rest.split(END)[1]}"


def main(arguments: list[str]) -> int:
    page = PAGE.read_text("utf-8")
    wanted = with_tour(page)
    if "--check" in arguments:
        return int(page != wanted)
    PAGE.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
