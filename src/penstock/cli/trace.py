"""`penstock trace`: what the stages of a running server did in the last seconds.

Called by `cli.program`. It saves the trace that `server.routes.debug` serves, for Perfetto, and prints the
report of bubbles that comes with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.cli.bench.http_stream import Target
from penstock.cli.client_tls import CA_FILE_HELP
from penstock.cli.flags import flag
from penstock.cli.http_client import first_key, get_json
from penstock.cli.terminal import Invocation, one_line
from penstock.errors import ProtocolError, UsageError

TIMEOUT_S = 30.0


def trace(
    *,
    url: Annotated[str, flag("running server", "--url", "--base-url", group="server")] = (
        "http://127.0.0.1:8000"
    ),
    api_key: Annotated[str, flag("prefer the environment name", "--api-key", group="server")] = "",
    ca_file: Annotated[Path | None, flag(CA_FILE_HELP, "--ca-file", group="server")] = None,
    out: Annotated[str, flag("file to write", "--out", "-o", group="trace")] = "penstock-trace.json",
    invocation: Annotated[Invocation, Parameter(parse=False)],
) -> int:
    """Write the trace of a running server to a file. Returns 0 once it is written."""
    body = get_json(Target.parse(url, first_key(api_key), ca_file), "/debug/trace", TIMEOUT_S)
    events, other = body.get("traceEvents"), body.get("otherData")
    if not isinstance(events, list) or not isinstance(other, dict):
        raise ProtocolError(
            f"{url}/debug/trace is not a trace.",
            remedy="Check that the address is that of a Penstock server.",
        )
    try:
        Path(out).write_text(json.dumps(body))
    except OSError as error:
        raise UsageError(
            f"cannot write {out!r}: {error.strerror}.", remedy="Name another file with --out.", param="out"
        ) from error
    report = [one_line(str(line)) for line in other.get("bubbles") or ["no stage has reported yet"]]
    invocation.say(*report, f"{len(events)} events in {one_line(out)}; open it in https://ui.perfetto.dev")
    return 0
