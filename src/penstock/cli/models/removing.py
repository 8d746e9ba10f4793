"""`penstock rm`: removes models from the hub's cache.

Called by `cli.program`. It asks first, except with `--yes`, and says how much was freed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from penstock.cli.flags import flag
from penstock.cli.models.sizes import size_text
from penstock.cli.terminal import Invocation, one_line
from penstock.errors import UsageError
from penstock.local_models.model_name import ModelName
from penstock.local_models.removal import Removal, plan_removal


def rm(
    *names: str,
    yes: Annotated[bool, flag("do not ask", "--yes", "-y", group="rm")] = False,
    as_json: Annotated[bool, flag("print the result as JSON", "--json", group="rm")] = False,
    invocation: Annotated[Invocation, Parameter(parse=False)],
) -> int:
    """Remove models. Returns 0 when they are gone, 1 when the user declined."""
    if not names:
        raise UsageError("no model is given.", remedy="Name a model as `penstock ls` shows it.", param="name")
    if as_json and not yes:
        raise UsageError("--json cannot ask for confirmation.", remedy="Give --yes as well.", param="json")
    removals = [plan_removal(ModelName.of_hub(name)) for name in dict.fromkeys(names)]
    if not yes and not _agreed(removals, invocation):
        invocation.say("nothing was removed")
        return 1
    freed = [removal.freed_bytes for removal in removals]
    for removal in removals:
        removal.carry_out()
    if as_json:
        values = {"removed": [str(removal.name) for removal in removals], "freed_bytes": sum(freed)}
        invocation.say(json.dumps(values, ensure_ascii=False))
        return 0
    for removal, num_bytes in zip(removals, freed, strict=True):
        invocation.say(f"removed {removal.name}, {size_text(num_bytes)}")
    return 0


def _agreed(removals: Sequence[Removal], invocation: Invocation) -> bool:
    for removal in removals:
        directory = one_line(str(removal.repository.directory))
        invocation.say(f"{removal.name}  {size_text(removal.freed_bytes)}  {directory}")
    invocation.stdout.write("Remove this? [y/N] ")
    invocation.stdout.flush()
    return invocation.stdin.readline().strip().lower() in ("y", "yes")
