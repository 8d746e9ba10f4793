"""`penstock serve`: from settings to a running supervisor.

Called by `cli`; runs `engine.supervisor.supervisor` in the calling (main) thread, since children die with the
thread that made them. Decides nothing about processes itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Annotated, TextIO

from cyclopts import Parameter
from msgspec import structs

from penstock import __version__
from penstock.cli.limits import LimitSettings
from penstock.cli.reporter import JsonReporter, ServeReporter
from penstock.cli.settings import (
    KEY_ENVS,
    PARTITION_ENV,
    EngineSettings,
    FrontSettings,
    ProgramSettings,
)
from penstock.cli.sources import config_as_toml, shown_settings
from penstock.cli.terminal import Invocation
from penstock.config.engine import EngineConfig
from penstock.config.server import ServerConfig
from penstock.engine.supervisor.reports import Reporter
from penstock.errors import UsageError

Run = Callable[[EngineConfig, ServerConfig, Reporter], int]

_ENGINE, _FRONT, _LIMITS, _PROGRAM = EngineSettings(), FrontSettings(), LimitSettings(), ProgramSettings()


def serve(
    model: str | None = None,
    /,
    *,
    engine: EngineSettings = _ENGINE,
    front: FrontSettings = _FRONT,
    limits: LimitSettings = _LIMITS,
    program: ProgramSettings = _PROGRAM,
    invocation: Annotated[Invocation, Parameter(parse=False)],
) -> int:
    """The command. Returns when the server has ended."""
    settings = with_environment_partition(engine, invocation)
    if program.print_config:
        shown = (settings, front, limits)
        invocation.stdout.write(config_as_toml(shown, model, invocation.origins, __version__))
        return 0
    return start(model, settings, front, limits, invocation, run_supervisor)


def start(
    model: str | None,
    engine: EngineSettings,
    front: FrontSettings,
    limits: LimitSettings,
    invocation: Invocation,
    run: Run,
) -> int:
    """Check the settings, make the reporter and run until the end."""
    if not model:
        raise UsageError(
            "no model is given.", remedy="Use `penstock serve MODEL`; `penstock serve demo` needs no files."
        )
    engine_config = engine.engine_config(model)
    server_config = front.server_config(
        limits.request_limits(), limits.connection_limits(), limits.grammar_limits()
    )
    server_config = structs.replace(server_config, settings=shown_settings((engine, front, limits)))
    if front.log_format == "json":
        return run(engine_config, server_config, JsonReporter(invocation.stdout))
    reporter = ServeReporter(invocation, engine_config, server_config)
    with contextlib.suppress(OSError):  # nothing of it is worth ending for
        reporter.begin()
    return run(engine_config, server_config, reporter)


def run_supervisor(engine: EngineConfig, server: ServerConfig, reporter: Reporter) -> int:
    """Serve in this thread until told to stop."""
    from penstock.engine.supervisor.supervisor import Supervisor
    from penstock.process.child import show_threads_on_request

    for name in (*KEY_ENVS, PARTITION_ENV):  # all are in the configs now; children need none
        os.environ.pop(name, None)
    show_threads_on_request()
    code = Supervisor.for_server(engine, server, reporter).run()
    for stream in (sys.stdout, sys.stderr):
        _forget_unwritten(stream)
    return code


def _forget_unwritten(stream: TextIO) -> None:
    """What a full disk did not take would else be tried again at exit, and change the exit code."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def with_environment_partition(engine: EngineSettings, invocation: Invocation) -> EngineSettings:
    """A partition from the environment is for pipelines; with one stage it does not apply."""
    from_environment = invocation.origins.get("partition", "").startswith("environment")
    if from_environment and engine.pipeline_parallel_size == 1:
        return dataclasses.replace(engine, partition="even")
    return engine
