"""Writes the texts that follow from the settings which `penstock.config` declares.

    python scripts/settings_text.py            writes them
    python scripts/settings_text.py --check    exits with 1 where a text is not what it would write

The texts are `docs/flags.md`, and in `llm/llm.py` the parameters of `LLM` with the part of its docstring that
explains them: static text, which editors and type checkers read.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.config.declared import ENGINE, SERVER, Config, Declared, declared, declared_by, flags_of_fields
from penstock.config.foreign_flags import FOREIGN_FLAGS
from penstock.config.hosts import HostsConfig

ROOT = Path(__file__).resolve().parent.parent
FLAGS_PAGE = ROOT / "docs" / "flags.md"
LLM_SOURCE = ROOT / "src" / "penstock" / "llm" / "llm.py"

ARGUMENTS = (*ENGINE, HostsConfig)  # whose settings `LLM` has arguments for
GROUPS = {
    "model": "The model",
    "pipeline": "The pipeline",
    "kv": "The KV cache",
    "scheduler": "The scheduler",
    "hosts": "Several hosts",
    "server": "The server",
    "limits": "Limits",
}
INTRODUCTION = """\
# Flags

Every setting of `penstock serve`. `penstock plan`, `penstock doctor`, `penstock bench throughput` and
`penstock bench latency` take the flags of the first four tables too.

A setting comes from its flag, else from the environment, else from the TOML file that `--config` names, else
it has its default. Its key in that file is the flag's first name without the dashes. `penstock serve MODEL
--print-config` prints, as such a file, what is in force and where it came from.

This page is written by `scripts/settings_text.py` from what `penstock.config` declares.
"""

FOREIGN_INTRODUCTION = """\
## Flags of other engines

`-tp`, `-pp`, `-dp` and underscores in names are understood as they are. What vLLM, SGLang or llama.cpp call
otherwise, or what is not here, is answered from this table; the command line then ends with code 2.
"""

# What `LLM` has in place of a setting of the command line, or beside what is declared.
ARGUMENT_TYPES = {"list[int]": "Sequence[int]", "Path": "str | os.PathLike[str]"}
ARGUMENT_DEFAULTS = {"inter_token_target_ms": "NO_INTER_TOKEN_TARGET_MS"}
ARGUMENT_NOTES = {
    "tensor_parallel_size": "Or a list: [2, 1].",
    "inter_token_target_ms": "None by default.",
}
BACKEND = "distributed_executor_backend"
BACKEND_PARAMETER = f'{BACKEND}: str | MakeExecutor = "mp"'
BACKEND_EXPLANATION = "`mp`, `ray`, `inprocess`, MODULE:CLASS, or what makes an `Executor`."


def explanations(config: Config) -> dict[str, str]:
    """Return what the docstring of a config says of each of its attributes, each on one line.

    Users read it: which module is concerned is left out.
    """
    text = inspect.getdoc(config) or ""
    (listed,) = re.findall(r"^Attributes:\n((?: {4}.*\n?)+)", text, re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    return {name: re.sub(r" \(`[a-z]+\.[a-z_]+`\)", "", " ".join(entry.split())) for name, entry in entries}


# --- docs/flags.md --------------------------------------------------------------------------------


def flags_page() -> str:
    """Return the whole page: a table for each group of flags."""
    explained = {name: text for config in (*ENGINE, *SERVER) for name, text in explanations(config).items()}
    settings = declared(*ENGINE, *SERVER)
    parts = [INTRODUCTION]
    for group, title in GROUPS.items():
        rows = [row(each, explained[each.name]) for each in settings if each.setting.group == group]
        head = ["| flag | default | meaning | environment |", "|---|---|---|---|"]
        parts.append("\n".join([f"## {title}", "", *head, *rows, ""]))
    return "\n".join([*parts, foreign_table()])


def foreign_table() -> str:
    """Return the section about the flags of other engines."""
    rows = []
    for name, foreign in sorted(FOREIGN_FLAGS.items(), key=lambda item: item[0].lstrip("-")):
        here = ": ".join(filter(None, [f"`{foreign.ours}`" if foreign.ours else "", foreign.remark]))
        rows.append(f"| `{name}` | {', '.join(foreign.engines)} | {here} |")
    return "\n".join([FOREIGN_INTRODUCTION, "| flag | of | here |", "|---|---|---|", *rows, ""])


def row(setting: Declared, explanation: str) -> str:
    flags = ", ".join(f"`{flag}`" for flag in setting.flags)
    names = ", ".join(f"`{name}`" for name in setting.environment_names)
    cells = (flags, default_of(setting), in_flags(explanation).replace("|", "\\|"), names)
    return "| " + " | ".join(cells) + " |"


def in_flags(explanation: str) -> str:
    """Return an explanation with other settings named by their flags."""
    flags = flags_of_fields()
    return re.sub(r"`(\w+)`", lambda found: f"`{flags.get(found[1], found[1])}`", explanation)


def default_of(setting: Declared) -> str:
    """Return the default as a reader writes it."""
    value = setting.default
    if value is None or value == []:
        return "None"
    if isinstance(value, bool):
        return f"on; `{setting.setting.off}`" if value else "off"
    if isinstance(value, int | float):
        return in_binary_units(value) if "bytes" in setting.name else written(setting)
    return f"`{value}`"


def written(setting: Declared) -> str:
    return f"{setting.default:g}" if setting.setting.group == "server" else f"{setting.default:,.15g}"


def in_binary_units(value: Any) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value and value % size == 0:
            return f"{value // size} {unit}"
    return f"{value:,}"


# --- the arguments of LLM -------------------------------------------------------------------------


def sources_of(config: Config) -> dict[str, tuple[str, str]]:
    """Return the type and the default of each setting of a config as its source has them."""
    source = textwrap.dedent(inspect.getsource(config))
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            noted = node.annotation
            while isinstance(noted, ast.Subscript) and ast.unparse(noted.value) == "ClassVar":
                noted = noted.slice
            if isinstance(noted, ast.Subscript) and isinstance(noted.slice, ast.Tuple):
                kind = ast.get_source_segment(source, noted.slice.elts[0])
                default = ast.get_source_segment(source, node.value)
                found[node.target.id] = (kind or "", default or "")
    return found


def parameters() -> Iterator[str]:
    """Yield each keyword parameter of `LLM` as its source has it."""
    for config in ARGUMENTS:
        written = sources_of(config)
        for setting in declared_by(config):
            if setting.setting.is_argument:
                kind, default = written[setting.name]
                for ours, python in ARGUMENT_TYPES.items():
                    kind = kind.replace(ours, python)
                yield f"{setting.name}: {kind} = {ARGUMENT_DEFAULTS.get(setting.name, default)}"
    yield BACKEND_PARAMETER


def explained_arguments() -> Iterator[str]:
    """Yield the lines of the docstring of `LLM` that explain its arguments."""
    texts = {name: text for config in ARGUMENTS for name, text in explanations(config).items()}
    texts[BACKEND] = BACKEND_EXPLANATION
    for name in ("model", *(parameter.partition(":")[0] for parameter in parameters())):
        text = " ".join([f"{name}: {texts[name]}", *filter(None, [ARGUMENT_NOTES.get(name)])])
        yield from textwrap.wrap(
            text,
            110,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )


def with_arguments(source: str) -> str:
    """Return the source of `LLM` with the arguments that are declared now."""
    head, begin, rest = source.partition('class LLM:\n    """')
    before, args, rest = rest.partition("    Args:\n")
    _, raises, rest = rest.partition("\n    Raises:\n")
    between, star, rest = rest.partition("        model: str,\n        *,\n")
    _, unknown, rest = rest.partition("        **unknown: Any,\n")
    lines = "".join(f"        {parameter},\n" for parameter in parameters())
    explained = "".join(f"{line}\n" for line in explained_arguments())
    return "".join([head, begin, before, args, explained, raises, between, star, lines, unknown, rest])


def main(arguments: list[str]) -> int:
    llm = LLM_SOURCE.read_text("utf-8")
    texts = {FLAGS_PAGE: flags_page(), LLM_SOURCE: with_arguments(llm)}
    if "--check" in arguments:
        return int(any(not path.exists() or path.read_text("utf-8") != text for path, text in texts.items()))
    for path, text in texts.items():
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
