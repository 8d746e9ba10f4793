"""The help screens: a first screen that fits 24 lines, `--help all`, and `--help GROUP`.

`cli.program` asks for a screen before cyclopts sees the command line. Flags, defaults and environment names
are read from the flags that cyclopts parses, so that they are written only once. Screens are plain text
without colours, so that they can be searched.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from penstock.cli.sources import environment_names, nearest
from penstock.errors import UsageError

if TYPE_CHECKING:
    from cyclopts import Argument, ArgumentCollection

_WIDEST_METAVAR = 16

ROOT_HELP = """\
Usage: penstock COMMAND ...     serves large language models through a pipeline

  penstock serve demo --pp 2    serve the model in the package through two stages

  serve MODEL           start the server: a model directory, the name of a model that is here, or demo
  pull ORG/NAME[:FILE]  download a model from the hub
  ls                    list the models on this machine; rm NAME: remove a model
  worker                let this host serve stages for a head on another host
  plan MODEL            find the best layout on --devices, or measure how to split the layers here
  simulate MODEL        replay a trace of requests on simulated --devices
  chat                  talk to a running server
  complete [PROMPT]     let a running server continue a text
  bench serve           measure a running server, and check that no token is lost
  bench throughput      measure offline: tokens a second; bench latency: one batch; bench sweep: many layouts
  cache ls STORE        list the models with KV blocks in a store
  cache stat STORE      show its size, and whether its records are intact; cache clear: remove KV blocks
  hosts ls              list the hosts that have joined a head; hosts new-token: make a join token
  hosts revoke NAME     revoke the certificate of a host; hosts revoke-tokens: revoke all join tokens
  kernels build         compile the CPU kernels for this machine ahead of time; kernels clear: remove them
  trace                 save a running server's last 10 s; replay FILE: replay its decisions
  doctor [MODEL]        check this machine, and a model directory
  version               print the version

`penstock COMMAND --help` shows a command. -v shows stack traces."""

BENCH_HELP = """\
Usage: penstock bench serve|throughput|latency|sweep ...

  penstock bench serve --num-prompts 100 --request-rate 4

  serve        measure a running server, and check that no token is lost
  throughput   measure tokens a second offline
  latency      measure the time of one batch offline
  sweep        measure a grid of layouts and concurrencies offline

--html FILE writes a report with charts, --json prints its numbers.
`penstock bench serve --help` shows a command."""

KERNELS_HELP = """\
Usage: penstock kernels build|clear

  penstock kernels build

  build        compile the CPU kernels for this machine ahead of time
  clear        remove the compiled kernels

The compiler is g++ on PATH, or what PENSTOCK_CXX names; PENSTOCK_CXXFLAGS adds flags. Libraries are kept in
$PENSTOCK_CACHE_DIR or ~/.cache/penstock. `penstock doctor` says which kernels run and why."""

CACHE_HELP = """\
Usage: penstock cache ls|stat|clear STORE

  penstock cache ls ~/kv

  ls           list the models with KV blocks in a store, and how many
  stat         show the size of the store, its quota, and whether its records are intact
  clear        remove the KV blocks of one model, or all

STORE is the --kv-store of `penstock serve`: a directory or a URL. Servers may use it at the same time."""

HOSTS_HELP = """\
Usage: penstock hosts ls|revoke NAME|revoke-tokens|new-token

  penstock hosts revoke desk

  ls             list the hosts that have a certificate of this head
  revoke         revoke the certificate of a host, and close its connections
  revoke-tokens  revoke all join tokens; hosts that have joined stay
  new-token      make a join token before a head starts, and its cluster if it has none

Run it on the head, as the head's user. The head may be running. Give the --state-dir of `penstock serve`."""

GROUPS: Mapping[str, str] = {
    "bench": BENCH_HELP,
    "cache": CACHE_HELP,
    "hosts": HOSTS_HELP,
    "kernels": KERNELS_HELP,
}
"""The commands that have commands of their own, each with its help."""

_PAGES_IN_A_ROW = 6


@dataclass(frozen=True, slots=True)
class CommandHelp:
    """The help of one command, besides that of its flags.

    Attributes:
        common: the flags on the command's first screen; if it is empty, that screen shows all flags.
    """

    usage: str
    summary: str
    example: str
    common: Sequence[str] = ()


_OFFLINE = ("--pp", "--dtype", "--device", "--num-blocks", "--threads-per-rank")

COMMANDS: Mapping[tuple[str, ...], CommandHelp] = {
    ("serve",): CommandHelp(
        "penstock serve MODEL [flags]",
        "Serve a model over HTTP, with the OpenAI interface.",
        "penstock serve ./Qwen2.5-0.5B --pp 2 --port 8000",
        common=(
            "--pp",
            "--dtype",
            "--device",
            "--max-model-len",
            "--max-num-seqs",
            "--num-blocks",
            "--host",
            "--port",
            "--api-key-file",
            "--served-model-name",
        ),
    ),
    ("worker",): CommandHelp(
        "penstock worker --join ADDRESS:PORT [flags]",
        "Let this host serve stages for a head on another host.",
        "penstock worker --join 10.0.0.1:7700 --join-token-file token",
    ),
    ("plan",): CommandHelp(
        "penstock plan MODEL --devices DEVICES|--pp N [flags]",
        "Show the best layout for --devices and its speed; or measure how to split layers over N stages.",
        "penstock plan ./Llama-3-70B --devices a100-80g:4 --concurrency 32",
        common=(
            "--devices",
            "--concurrency",
            "--json",
            "--pp",
            "--partition-mix",
            "--threads-per-rank",
            "--dtype",
            "--max-model-len",
            "--max-num-seqs",
        ),
    ),
    ("simulate",): CommandHelp(
        "penstock simulate MODEL --devices DEVICES --pp N [flags]",
        "Replay a trace with the engine's own scheduler on devices that this machine need not have.",
        "penstock simulate ./Llama-3-70B --devices a100-80g:4 --pp 4 --trace azure.csv",
        common=(
            "--devices",
            "--pp",
            "--tp",
            "--dp",
            "--trace",
            "--num-requests",
            "--max-concurrency",
            "--request-rate",
            "--timeline",
            "--json",
        ),
    ),
    ("pull",): CommandHelp(
        "penstock pull ORG/NAME[:FILE] [flags]",
        "Download the usable files of a model on the hub; FILE is a GGUF file or a quantisation.",
        "penstock pull Qwen/Qwen2.5-0.5B-Instruct",
    ),
    ("ls",): CommandHelp(
        "penstock ls [flags]",
        "Show the models in the caches of the hub, Ollama and LM Studio, and which of them can run.",
        "penstock ls",
    ),
    ("rm",): CommandHelp(
        "penstock rm ORG/NAME[:FILE]... [flags]",
        "Remove models from the hub's cache.",
        "penstock rm Qwen/Qwen2.5-0.5B-Instruct",
    ),
    ("chat",): CommandHelp(
        "penstock chat [flags]", "Talk to a running server; /exit leaves.", "penstock chat --max-tokens 200"
    ),
    ("complete",): CommandHelp(
        "penstock complete [PROMPT] [flags]",
        "Let a running server continue a text.",
        'penstock complete "ROMEO:" --max-tokens 64',
    ),
    ("bench", "serve"): CommandHelp(
        "penstock bench serve [flags]",
        "Send load to a running server and check that every token comes exactly once.",
        "penstock bench serve --num-prompts 100 --request-rate 4",
        common=(
            "--base-url",
            "--model",
            "--dataset-name",
            "--dataset-path",
            "--num-prompts",
            "--random-input-len",
            "--random-output-len",
            "--request-rate",
            "--max-concurrency",
            "--concurrency",
            "--html",
            "--result-file",
        ),
    ),
    ("bench", "throughput"): CommandHelp(
        "penstock bench throughput MODEL [flags]",
        "Generate for many random prompts offline.",
        "penstock bench throughput demo --pp 2 --num-prompts 64",
        common=("--num-prompts", "--input-len", "--output-len", "--html", "--json", *_OFFLINE),
    ),
    ("bench", "latency"): CommandHelp(
        "penstock bench latency MODEL [flags]",
        "Time one batch offline, again and again.",
        "penstock bench latency demo --pp 2 --batch-size 1",
        common=("--batch-size", "--input-len", "--output-len", "--num-iters", "--html", "--json", *_OFFLINE),
    ),
    ("bench", "sweep"): CommandHelp(
        "penstock bench sweep MODEL [flags]",
        "Measure every layout of a grid at several concurrencies, and compare them in one report.",
        "penstock bench sweep demo --pp 1,2 --depth 0,1,2 --concurrency 1,8,32 --html sweep.html",
        common=(
            "--pp",
            "--tp",
            "--depth",
            "--micro-batches",
            "--concurrency",
            "--input-len",
            "--output-len",
            "--results",
            "--html",
            "--json",
        ),
    ),
    ("cache", "ls"): CommandHelp(
        "penstock cache ls STORE",
        "Show which models have KV blocks in a store, and how many.",
        "penstock cache ls ~/kv",
    ),
    ("cache", "stat"): CommandHelp(
        "penstock cache stat STORE [flags]",
        "Show the size of a store, its quota, and whether its records are intact.",
        "penstock cache stat ~/kv --verify",
    ),
    ("cache", "clear"): CommandHelp(
        "penstock cache clear STORE --namespace DIGITS|--all [flags]",
        "Remove the KV blocks of one model, or all, from a store.",
        "penstock cache clear ~/kv --all",
    ),
    ("hosts", "ls"): CommandHelp(
        "penstock hosts ls [flags]",
        "Show which hosts have a certificate of this head, and how many join tokens are usable.",
        "penstock hosts ls",
    ),
    ("hosts", "revoke"): CommandHelp(
        "penstock hosts revoke NAME [flags]",
        "Revoke the certificate of a host; a running head closes the host's connections.",
        "penstock hosts revoke desk",
    ),
    ("hosts", "revoke-tokens"): CommandHelp(
        "penstock hosts revoke-tokens [flags]",
        "Revoke all join tokens; hosts that have joined stay.",
        "penstock hosts revoke-tokens",
    ),
    ("hosts", "new-token"): CommandHelp(
        "penstock hosts new-token --join-token-file FILE [flags]",
        "Make a join token for a head that starts later, and its cluster's key if it has none.",
        "penstock hosts new-token --state-dir cluster --join-token-file cluster/token",
    ),
    ("kernels", "build"): CommandHelp(
        "penstock kernels build",
        "Compile the CPU kernels for this machine ahead of the first start.",
        "penstock kernels build",
    ),
    ("kernels", "clear"): CommandHelp(
        "penstock kernels clear",
        "Remove the compiled kernels; the next start compiles them again.",
        "penstock kernels clear",
    ),
    ("trace",): CommandHelp(
        "penstock trace [flags]",
        "Save the last 10 s of a running server's stages, and show where their time went.",
        "penstock trace --out trace.json",
    ),
    ("replay",): CommandHelp(
        "penstock replay FILE [flags]",
        "Repeat the decisions that an engine recorded with --record-decisions, and compare.",
        "penstock replay decisions.log --explain 120",
    ),
    ("doctor",): CommandHelp(
        "penstock doctor [MODEL] [flags]",
        "Check this machine, and whether it can serve a model with these flags or --join a head.",
        "penstock doctor ./Qwen2.5-0.5B --pp 2 --tp 2,1",
        common=("--pp", "--tp", "--topology", "--device", "--dtype", "--host", "--port", "--join"),
    ),
    ("version",): CommandHelp("penstock version", "Print the version.", "penstock version"),
}


def help_screen(command: tuple[str, ...], arguments: ArgumentCollection, topic: str) -> str:
    """Return the help of a command. `topic`: "" for the first screen, "all", or a group of flags.

    Raises `UsageError` for a topic that does not exist.
    """
    about = COMMANDS[command]
    flags = [argument for argument in arguments if argument.parse and argument.name.startswith("--")]
    groups = list(dict.fromkeys(_group(flag) for flag in flags))
    if topic == "all" or (not topic and not about.common):
        return "\n".join([*_head(about), *_all_lines(flags, groups), *_foot(about, flags, groups, topic)])
    if not topic:
        chosen = [_named(flags, name) for name in about.common]
        return "\n".join([*_head(about), *_table(chosen), *_foot(about, flags, groups, topic)])
    if topic not in groups:
        known = ", ".join(["all", *groups])
        raise UsageError(
            f"there is no help page {topic!r}.", remedy=f"{nearest(topic, groups)} Pages: {known}.".strip()
        )
    return "\n".join([f"{about.usage}: {topic}", "", *_table([f for f in flags if _group(f) == topic])])


def _head(about: CommandHelp) -> list[str]:
    return [f"Usage: {about.usage}", about.summary, "", f"  {about.example}", ""]


def _foot(about: CommandHelp, flags: Sequence[Argument], groups: Sequence[str], topic: str) -> list[str]:
    lines = ["", "Environment variables are on the right; a flag overrides them. -v: stack traces."]
    rest = len(flags) - len(about.common)
    if about.common and not topic:
        pages = [f"`--help {group}`" for group in groups]
        lines.append(f"`--help all` shows the other {rest} flags; parts:")
        rows = [", ".join(pages[i : i + _PAGES_IN_A_ROW]) for i in range(0, len(pages), _PAGES_IN_A_ROW)]
        lines += [f"{row}," for row in rows[:-1]] + [f"{rows[-1]}."]
    return lines


def _all_lines(flags: Sequence[Argument], groups: Sequence[str]) -> Iterator[str]:
    for group in groups:
        if len(groups) > 1:
            yield f"{group}:"
        yield from _table([flag for flag in flags if _group(flag) == group])


def _table(flags: Sequence[Argument]) -> list[str]:
    """Return a line for each flag: name, value, meaning, default, and environment variable."""
    left = [f"  {_short_name(flag)} {_metavar(flag.hint)}".rstrip() for flag in flags]
    middle = [f"{_meaning(flag)} {_default(flag)}".rstrip() for flag in flags]
    wide, wider = max(map(len, left)), max(map(len, middle))
    return [
        f"{name:<{wide}}  {text:<{wider}}  {environment_names(flag)[0]}"
        for name, text, flag in zip(left, middle, flags, strict=True)
    ]


def _short_name(argument: Argument) -> str:
    return min((name for name in argument.names if name.startswith("--")), key=len)


def _named(flags: Sequence[Argument], name: str) -> Argument:
    return next(flag for flag in flags if name in flag.names)


def _group(argument: Argument) -> str:
    group = argument.parameter.group
    first = group[0] if isinstance(group, (tuple, list)) and group else group
    return str(getattr(first, "name", first) or "flags")


def _default(argument: Argument) -> str:
    value = argument.field_info.default
    if value is True:
        return f"[on; {argument.negatives[0]}]" if argument.negatives else "[on]"
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Path)):
        return ""
    return f"[{value:g}]" if isinstance(value, float) else f"[{value}]"


def _meaning(argument: Argument) -> str:
    """Return the help text; in its place the choices, if they are too long for the column of values."""
    choices = ", ".join(get_args(argument.hint)) if get_origin(argument.hint) is Literal else ""
    return choices if _metavar(argument.hint) == "NAME" else str(argument.parameter.help)


def _metavar(hint: Any) -> str:
    if get_origin(hint) is Literal:
        choices = "|".join(get_args(hint))
        return choices if len(choices) <= _WIDEST_METAVAR else "NAME"
    if get_origin(hint) in (Union, types.UnionType):
        return _metavar(next(part for part in get_args(hint) if part is not type(None)))
    return {bool: "", int: "N", float: "X", Path: "PATH"}.get(hint, "TEXT")
