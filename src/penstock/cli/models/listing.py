"""`penstock ls`: the models of this machine, and which of them would run.

Called by `cli.program`. It opens no connection and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

from cyclopts import Parameter

from penstock.cli.flags import flag
from penstock.cli.models.sizes import size_text
from penstock.cli.models.verdicts import Verdict, verdict_of
from penstock.cli.terminal import Invocation, one_line
from penstock.errors import PenstockError
from penstock.local_models.hub_cache import hub_cache_directory
from penstock.local_models.inventory import Entry, entries
from penstock.process.host_memory import host_available_bytes

_SHOWN_DIGITS = 12
_REASON_WIDTH = 60


def ls(
    *,
    as_json: Annotated[bool, flag("print the list as JSON", "--json", group="ls")] = False,
    invocation: Annotated[Invocation, Parameter(parse=False)],
) -> int:
    """List the models of the hub's cache, of Ollama and of LM Studio. Returns 0."""
    found: list[Entry] = []
    for each in entries():
        if isinstance(each, PenstockError):
            invocation.warn(f"{one_line(each.message)} {one_line(each.remedy)}")
        else:
            found.append(each)
    free_bytes = host_available_bytes()
    verdicts = [verdict_of(entry, free_bytes) for entry in found]
    if as_json:
        values = [_as_values(entry, verdict) for entry, verdict in zip(found, verdicts, strict=True)]
        invocation.say(json.dumps(values, ensure_ascii=False))
    elif found:
        _show([_row(entry, verdict) for entry, verdict in zip(found, verdicts, strict=True)], invocation)
    else:
        invocation.say(f"no models in {hub_cache_directory()}, in Ollama's store or in LM Studio's folder")
    return 0


def _show(rows: Sequence[tuple[str, ...]], invocation: Invocation) -> None:
    table = [("name", "revision", "size", "kind", "last used", "runs"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]) - 1)]
    for row in table:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=False)]
        invocation.say("  ".join([*cells, row[-1]]))


def _row(entry: Entry, verdict: Verdict) -> tuple[str, ...]:
    kind = entry.kind if entry.place == "hub cache" else f"{entry.kind}, {entry.place}"
    revision = " ".join(filter(None, [entry.revision, entry.commit[:_SHOWN_DIGITS]])) or "-"
    used = datetime.fromtimestamp(entry.last_used, UTC).strftime("%Y-%m-%d")
    runs = f"{verdict.runs}: {_shortened(verdict.reason)}" if verdict.reason else verdict.architecture
    return one_line(entry.name), one_line(revision), size_text(entry.size), kind, used, one_line(runs)


def _shortened(reason: str) -> str:
    first = reason.partition("; ")[0].rstrip(".")
    return first if len(first) <= _REASON_WIDTH else f"{first[: _REASON_WIDTH - 1]}…"


def _as_values(entry: Entry, verdict: Verdict) -> dict[str, object]:
    return {
        "name": entry.name,
        "place": entry.place,
        "revision": entry.revision,
        "commit": entry.commit,
        "kind": entry.kind,
        "path": str(entry.path),
        "size": entry.size,
        "last_used": datetime.fromtimestamp(entry.last_used, UTC).isoformat(timespec="seconds"),
        "architecture": verdict.architecture,
        "runs": verdict.runs,
        "reason": verdict.reason,
    }
