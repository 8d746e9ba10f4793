"""`penstock plan`: how a model would be laid out, and why; serves nothing.

Called by `cli.program`. With `--devices` it plans for devices that need not be there
(`cli.plans.plan_devices`). Without `--devices`, it shows which layers each stage would hold under
`--partition auto`: it measures the stages, or uses what was measured before, as `penstock serve` would. With
`--hosts` it waits for the workers first.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from penstock.cli.flags import flag, with_settings
from penstock.cli.plans.spoken_events import Speaker
from penstock.cli.terminal import Invocation, printable
from penstock.config.declared import ENGINE, configured_engine
from penstock.config.hosts import HostsConfig
from penstock.engine.supervisor.auto_partition import settle_partition
from penstock.errors import UsageError
from penstock.hosts.launchers.backends import open_hosts
from penstock.hosts.launchers.engine_hosts import Voices


@with_settings(*ENGINE, HostsConfig)
def plan(
    model: str | None = None,
    /,
    *,
    devices: Annotated[
        str | None,
        flag("such as a100-80g:4, rtx4090+cpu:16c:64g, FILE.toml or here", "--devices", group="plan"),
    ] = None,
    concurrency: Annotated[int, flag("requests at once, for --devices", "--concurrency", group="plan")] = 1,
    as_json: Annotated[bool, flag("print the plan for --devices as JSON", "--json", group="plan")] = False,
    invocation: Annotated[Invocation, Parameter(parse=False)],
    **given: Any,
) -> int:
    """Run the command. Returns 0 with a table on standard output."""
    if not model:
        raise UsageError("no model is given.", remedy="Use `penstock plan MODEL --pp 2`.")
    if devices is not None:
        from penstock.cli.plans.plan_devices import plan_for_devices

        return plan_for_devices(model, devices, concurrency, given, invocation, as_json=as_json)
    if as_json:
        raise UsageError(
            "--json is for a plan with --devices.",
            remedy="Add --devices, such as --devices here.",
            param="json",
        )
    # `--partition`, and layers in a topology file, are ignored: the question is which layers would be best.
    given.pop("partition", None)
    config = configured_engine(given, model).with_partition("auto")
    if config.parallel.pipeline_parallel_size == 1:
        raise UsageError(
            "one stage holds all layers; no choice is left.",
            remedy="Give the number of stages, such as --pp 2; or devices, such as --devices a100-80g:4.",
            param="pipeline_parallel_size",
        )
    speaker = Speaker(invocation.say)
    with contextlib.closing(open_hosts(config, Voices(speaker.note, speaker.caution))) as gathered:
        gathered.gather([])  # waits for the workers, if there are several hosts
        settled = settle_partition(config, gathered.hosts, speaker)
    invocation.say(_how_to_serve(settled.parallel.partition, given.get("topology")))
    return 0


def _how_to_serve(partition: str, topology: Path | None) -> str:
    if topology is None:
        return f"Serve it with --partition {partition}, or with --partition auto."
    name = printable(str(topology))
    return f"Serve it with the layers {partition} in {name}, or with --partition {partition} and none there."
