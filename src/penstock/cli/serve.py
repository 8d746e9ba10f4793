"""`penstock serve`: from settings to a running supervisor.

Called by `cli.program`. The supervisor (`engine.supervisor.supervisor`) runs in the calling, main thread,
since child processes end with the thread that started them. The supervisor, not this module, decides about
processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from io import StringIO
from typing import Annotated, Any, TextIO

from cyclopts import Parameter
from msgspec import structs

from penstock import __version__
from penstock.cli.flags import with_settings
from penstock.cli.reporter import JsonReporter, ServeReporter
from penstock.cli.settings import ProgramConfig, configured_server
from penstock.cli.shown_settings import config_as_toml, shown_to_clients
from penstock.cli.terminal import Invocation
from penstock.config.declared import ENGINE, SERVER, configured_engine, declared
from penstock.config.engine import EngineConfig
from penstock.config.server import ServerConfig
from penstock.engine.supervisor.reports import Notice, Reporter
from penstock.errors import UsageError
from penstock.process.output_thread import DROPPED, OutputThread, dropped_text

Run = Callable[[EngineConfig, ServerConfig, Reporter], int]


@with_settings(*ENGINE, *SERVER, ProgramConfig)
def serve(
    model: str | None = None,
    /,
    *,
    invocation: Annotated[Invocation, Parameter(parse=False)],
    **given: Any,
) -> int:
    """Run the command. Returns when the server has ended."""
    if given.get("print_config"):
        invocation.stdout.write(config_as_toml(given, model, invocation.origins, __version__))
        return 0
    if model and given.get("download"):
        from penstock.cli.models.pull import download_if_absent

        draft = configured_engine(given, model).speculation.speculative_model
        for name in filter(None, (model, draft)):
            download_if_absent(name, invocation)
    return start(model, given, invocation, run_supervisor)


def start(model: str | None, given: Mapping[str, Any], invocation: Invocation, run: Run) -> int:
    """Check the settings, make the reporter and run until the end."""
    if not model:
        raise UsageError(
            "no model is given.", remedy="Use `penstock serve MODEL`; `penstock serve demo` needs no files."
        )
    engine = configured_engine(given, model)
    server = structs.replace(configured_server(given), settings=shown_to_clients(given))
    is_json = server.log_format == "json"
    dropped_line = _dropped_as_json if is_json else dropped_text
    with closing(OutputThread(invocation.stdout, invocation.stderr, dropped_line)) as output:
        beside = invocation.beside(output)
        reporter: Reporter = ServeReporter(beside, engine, server)
        return run(engine, server, JsonReporter(beside.stdout) if is_json else reporter)


def _dropped_as_json(count: int) -> str:
    line = StringIO()
    JsonReporter(line).report(Notice(text=f"{DROPPED.capitalize()}: {count}."))
    return line.getvalue()


def run_supervisor(engine: EngineConfig, server: ServerConfig, reporter: Reporter) -> int:
    """Serve in this thread until told to stop."""
    from penstock.engine.supervisor.service_reporter import ServiceReporter
    from penstock.engine.supervisor.supervisor import Supervisor
    from penstock.process.child import show_threads_on_request
    from penstock.process.service_manager import service_notifier

    for each in declared(ServerConfig):
        if each.setting.is_secret:  # the config has it now; child processes must not find it
            for name in each.environment_names:
                os.environ.pop(name, None)
    show_threads_on_request()
    reporter = ServiceReporter(reporter, service_notifier(os.environ))
    code = Supervisor.for_server(engine, server, reporter).run()
    for stream in (sys.stdout, sys.stderr):
        _forget_unwritten(stream)
    return code


def _forget_unwritten(stream: TextIO) -> None:
    """Flush a stream, or drop what a full disk does not take.

    Python would try again at exit, and change the exit code.
    """
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
