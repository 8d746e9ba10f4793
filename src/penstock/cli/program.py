"""The `penstock` program: finds the command, reads its settings, runs it, and ends with an exit code.

Called by the console script. Commands have modules of their own, which are imported when they run, so that
`penstock --help` is quick. This module never imports torch. Exit codes:

    0    done
    1    a check failed, or the user declined
    2    usage
    3    model, also one that the hub does not have
    4    memory or disk
    5    peer, port, store or hub
    70   bug
    130  interrupted
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence

from cyclopts import App, ArgumentCollection, CycloptsError

from penstock import __version__
from penstock.cli.help import COMMANDS, GROUPS, ROOT_HELP, help_screen
from penstock.cli.sources import SettingSources, nearest
from penstock.cli.terminal import Invocation, report_error
from penstock.cli.usage_errors import refuse_fractions, usage_error
from penstock.config.refused_settings import refuse_if_known
from penstock.config.setting import environment_names_of
from penstock.errors import DiskSpaceError, UsageError

INTERRUPTED = 130
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_KEY_FLAGS = ("--api-key", "--admin-key")
_KEY_ENVS = frozenset(environment_names_of(_KEY_FLAGS))
_HELP_FLAGS = frozenset({"--help", "-h"})
_SHORT_FLAGS = {
    "-pp": "--pp",
    "-tp": "--tp",
    "-dp": "--dp",
    "-pcp": "--prefill-context-parallel-size",
    "-dcp": "--decode-context-parallel-size",
}
_NAMES_FLAG = "--served-model-name"
_VERBOSE_FLAGS = frozenset({"-v", "--verbose"})


def build_app(invocation: Invocation) -> App:
    """Return the tree of commands; each is named by its import path and imported when it is called."""
    app = App(
        name="penstock",
        config=[SettingSources(invocation), refuse_fractions],
        help_flags=[],
        version_flags=[],
        result_action="return_value",
    )
    bench, cache, kernels = App(name="bench"), App(name="cache"), App(name="kernels")
    hosts = App(name="hosts")
    app.command("penstock.cli.serve:serve", name="serve")
    app.command("penstock.cli.worker:worker", name="worker")
    app.command("penstock.cli.plans.plan:plan", name="plan")
    app.command("penstock.cli.plans.simulate:simulate", name="simulate")
    app.command("penstock.cli.models.pull:pull", name="pull")
    app.command("penstock.cli.models.listing:ls", name="ls")
    app.command("penstock.cli.models.removing:rm", name="rm")
    app.command("penstock.cli.chat:chat", name="chat")
    app.command("penstock.cli.chat:complete", name="complete")
    app.command("penstock.cli.trace:trace", name="trace")
    app.command("penstock.cli.replaying.replay:replay", name="replay")
    app.command("penstock.cli.doctor:doctor", name="doctor")
    app.command("penstock.cli.doctor:version", name="version")
    bench.command("penstock.cli.bench.online:bench_serve", name="serve")
    bench.command("penstock.cli.bench.offline:bench_throughput", name="throughput")
    bench.command("penstock.cli.bench.offline:bench_latency", name="latency")
    bench.command("penstock.cli.bench.sweep:bench_sweep", name="sweep")
    cache.command("penstock.cli.cache:cache_ls", name="ls")
    cache.command("penstock.cli.cache:cache_stat", name="stat")
    cache.command("penstock.cli.cache:cache_clear", name="clear")
    hosts.command("penstock.cli.hosts:hosts_ls", name="ls")
    hosts.command("penstock.cli.hosts:hosts_revoke", name="revoke")
    hosts.command("penstock.cli.hosts:hosts_revoke_tokens", name="revoke-tokens")
    hosts.command("penstock.cli.hosts:hosts_new_token", name="new-token")
    kernels.command("penstock.cli.kernels:kernels_build", name="build")
    kernels.command("penstock.cli.kernels:kernels_clear", name="clear")
    app.command(bench)
    app.command(cache)
    app.command(hosts)
    app.command(kernels)
    return app


def main() -> int:
    """Run the console script."""
    hide_keys(sys.argv[1:], os.environ)
    return run(sys.argv[1:], Invocation.of_process())


def hide_keys(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Take a key out of what `/proc` shows of this process: its arguments and its first environment.

    Setting the title overwrites both; `os.environ` has copies of its own.
    """
    in_arguments = any(word.split("=")[0].replace("_", "-") in _KEY_FLAGS for word in argv)
    if in_arguments or not _KEY_ENVS.isdisjoint(environ):
        import setproctitle

        setproctitle.setproctitle(" ".join(["penstock", *(argv[:1] if in_arguments else argv)]))


def run(argv: Sequence[str], invocation: Invocation) -> int:
    """Run one command line; every error becomes a message and an exit code."""
    words = _plain_spelling(argv)
    invocation.verbose = any(word in _VERBOSE_FLAGS for word in words)
    words = [word for word in words if word not in _VERBOSE_FLAGS]
    try:
        return _dispatch(words, invocation)
    except KeyboardInterrupt:
        return INTERRUPTED
    except CycloptsError as error:
        command = _command_of(words)
        return report_error(usage_error(error, command, words, _flags_of(command, invocation)), invocation)
    except BrokenPipeError:
        return 1
    except Exception as error:
        return report_error(_of_full_disk(error) or error, invocation)


def _of_full_disk(error: Exception) -> DiskSpaceError | None:
    """Return the error of a disk without room, wherever it was met; None: it is another."""
    if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
        return None
    where = f" for {error.filename}" if error.filename else ", perhaps the one that the output goes to"
    return DiskSpaceError(
        f"a disk is full{where}: {error.strerror}.", remedy="Free space, or write to another disk."
    )


def _plain_spelling(argv: Sequence[str]) -> list[str]:
    """Return the words with some spellings of vLLM replaced by ours; values stay as they are.

    These spellings are `-pp 2`, underscores in the names of flags, and several values behind one
    `--served-model-name`.
    """
    words: list[str] = []
    for position, word in enumerate(argv):
        if word == "--":
            return [*words, *argv[position:]]
        name, equals, value = word.partition("=")
        name = _SHORT_FLAGS.get(name, name)
        if name.startswith("--"):
            name = name.replace("_", "-")
        words.append(name + equals + value)
    return _one_name_each(words)


def _one_name_each(words: Sequence[str]) -> list[str]:
    """Return the words with `--served-model-name` before each of its values.

    This is done only if the model comes first, as in `serve MODEL`. Otherwise the last word may be the model
    and not a name.
    """
    if list(words[:1]) != ["serve"] or words[1:2] == [] or words[1].startswith("-"):
        return list(words)
    spread: list[str] = []
    is_named = False  # whether the next words are names
    for word in words:
        if word.startswith("-"):
            is_named = word.partition("=")[0] == _NAMES_FLAG
        elif is_named and spread[-1] != _NAMES_FLAG:
            spread.append(_NAMES_FLAG)
        spread.append(word)
    return spread


def _dispatch(words: list[str], invocation: Invocation) -> int:
    command = _command_of(words)
    if not words or words[0] in _HELP_FLAGS or words == ["help"]:
        invocation.say(ROOT_HELP)
        return 0
    if words[0] in ("--version", "-V"):
        invocation.say(f"penstock {__version__}")
        return 0
    help_index = next((index for index, word in enumerate(words) if word in _HELP_FLAGS), None)
    if help_index is not None or (len(words) == 1 and words[0] in GROUPS):
        return _show_help(command, words, help_index, invocation)
    if command not in COMMANDS:
        raise _unknown_command(" ".join(command))
    for word in words:
        if word.startswith("--"):
            refuse_if_known(word.partition("=")[0].lstrip("-").replace("-", "_"))
    app = build_app(invocation)
    function, bound, ignored = app.parse_args(words, print_error=False, exit_on_error=False)
    assert set(ignored) == {"invocation"}
    result = function(*bound.args, **bound.kwargs, invocation=invocation)
    return int(result)


def _flags_of(command: tuple[str, ...], invocation: Invocation) -> frozenset[str]:
    """Return every name of every flag of a command."""
    arguments = _arguments_of(command, invocation)
    return frozenset(name for argument in arguments for name in argument.names if name.startswith("-"))


def _arguments_of(command: tuple[str, ...], invocation: Invocation) -> ArgumentCollection:
    app = build_app(invocation)
    for name in command:
        app = app[name]
    return app.assemble_argument_collection()


def _command_of(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(words[: 2 if words and words[0] in GROUPS else 1])


def _show_help(
    command: tuple[str, ...], words: list[str], help_index: int | None, invocation: Invocation
) -> int:
    if command[0] in GROUPS and command not in COMMANDS:
        invocation.say(GROUPS[command[0]])
        return 0
    if command not in COMMANDS:
        raise _unknown_command(" ".join(command))
    following = words[help_index + 1 :] if help_index is not None else []
    topic = following[0] if following and not following[0].startswith("-") else ""
    invocation.say(help_screen(command, _arguments_of(command, invocation), topic))
    return 0


def _unknown_command(word: str) -> UsageError:
    known = [" ".join(command) for command in COMMANDS]
    remedy = f"{nearest(word, known)} Commands: {', '.join(known)}.".strip()
    return UsageError(f"there is no command {word!r}.", remedy=remedy)
