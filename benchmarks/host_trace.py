"""Requests of a real trace on a server over two hosts that loses a host again and again: a bar of
`two_hosts.py`.

The trace is one of the Azure LLM inference traces (AzurePublicDataset). Its arrival times are stretched and
its lengths divided, so that two cores are busy and not overrun; both scales are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from host_bed import NO_SPARE, Bed, Found, Sizes, gigabit_hosts
from host_load import IDS
from peers.report import markdown

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
import host_losses
from host_losses import INPUT_SCALE, Comparison, HostLosses, Timed, compared, play
from penstock.workloads.traces import TraceRow, read_trace

OUTPUT_SCALE = 4
MAX_INPUT, MAX_OUTPUT = 96, 128
REFERENCE_AT_ONCE = 64  # requests of the undisturbed run, which need not wait for their times


def shaped(rows: Sequence[TraceRow], stretch: float, seed: int = 26) -> list[Timed]:
    """Return requests of random ids whose lengths and times are those of a trace, scaled."""
    most = MAX_INPUT, MAX_OUTPUT
    return host_losses.shaped(rows, stretch, ids=IDS, seed=seed, output_scale=OUTPUT_SCALE, most=most)


def trace(bed: Bed) -> Found:
    """Play the trace, undisturbed and with losses, and compare all tokens."""
    sizes = bed.sizes
    rows = read_trace(bed.trace, sizes.trace_requests, kind="azure")
    requests = shaped(rows, sizes.trace_stretch)
    with (
        gigabit_hosts() as hosts,
        bed.pair(hosts, NO_SPARE, "--heartbeat-limit", "3") as server,
    ):
        at_once = [request._replace(arrival_s=0.0) for request in requests]
        expected = play(server.client, at_once, REFERENCE_AT_ONCE)
        with HostLosses(server, hosts, sizes.lose_every_s) as losses:
            answers = play(server.client, requests)
    for answer in answers:
        if answer.error:
            print(answer.error, file=sys.stderr)
    for trouble in losses.troubles:
        print(trouble, file=sys.stderr)
    assert not any(answer.error for answer in expected), "the undisturbed run has failed"
    return summary(sizes, requests, losses, compared(requests, answers, expected))


def summary(sizes: Sizes, requests: Sequence[Timed], losses: HostLosses, found: Comparison) -> Found:
    """Return what is written of a run."""
    num_tokens = sum(request.num_output for request in requests)
    text = (
        f"{len(requests)} requests of the trace in {requests[-1].arrival_s:.0f} s (its times multiplied by "
        f"{sizes.trace_stretch:g}), prompts divided by {INPUT_SCALE}, answers by {OUTPUT_SCALE}: "
        f"{num_tokens} tokens. A host was lost {len(losses.struck)} times, every {sizes.lose_every_s:g} s: "
        f"{', '.join(dict.fromkeys(losses.struck))}."
    )
    columns = ["lost", "with other tokens", "longest pause, s", "longest time to a first token, s"]
    row = [str(found.num_lost), str(found.num_other), f"{found.pause_s:.1f}", f"{found.late_s:.1f}"]
    is_met = found.is_good and bool(losses.struck) and not losses.troubles
    return Found(f"{text}\n\n{markdown(columns, [row])}\n\nbar: none lost, none with other tokens", is_met)
