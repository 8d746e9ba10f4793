"""`penstock cache ls`, `stat` and `clear`: what is in a store of KV blocks, also while servers use it.

Called by `cli.program`. `ls` and `stat` change nothing, neither records nor the order in which the store
evicts them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Annotated

from cyclopts import Parameter

from penstock.cli.flags import flag
from penstock.cli.terminal import Invocation, one_line
from penstock.errors import UsageError
from penstock.kvstore.clearing import clear_records
from penstock.kvstore.inspection import (
    Namespace,
    Verified,
    open_to_clear,
    open_to_read,
    survey,
    verify_all,
    verify_sample,
)
from penstock.kvstore.store import directory_of

StoreAddress = Annotated[str | None, flag("directory or URL of the store", "--kv-store", group="cache")]
_SHOWN_DIGITS = 12


def cache_ls(store: StoreAddress = None, *, invocation: Annotated[Invocation, Parameter(parse=False)]) -> int:
    """List the store's namespaces, the largest first. Returns 0."""
    with closing(open_to_read(_address(store))) as opened:
        namespaces = survey(opened)
    if not namespaces:
        invocation.say("the store is empty")
        return 0
    rows = [("namespace", "blocks", "records", "size", "opened", "model"), *map(_row, namespaces)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=False)]
        invocation.say("  ".join([*cells, row[5]]))
    return 0


def cache_stat(
    store: StoreAddress = None,
    *,
    verify: Annotated[bool, flag("check every record, not a sample", "--verify", group="cache")] = False,
    invocation: Annotated[Invocation, Parameter(parse=False)],
) -> int:
    """Show the store's totals and verify its records. Returns 1 if a record is bad, else 0."""
    address = _address(store)
    with closing(open_to_read(address)) as opened:
        namespaces = survey(opened)
        verified = verify_all(opened) if verify else verify_sample(opened)
    for name, text in _totals(address, namespaces, verified):
        invocation.say(f"{name:<10} {text}")
    if verified.num_bad:
        invocation.warn(
            "the server recomputes bad records when it reads them; `penstock cache clear` removes all."
        )
    return 1 if verified.num_bad else 0


def cache_clear(
    store: StoreAddress = None,
    *,
    namespace: Annotated[
        str, flag("first digits of the namespace to remove", "--namespace", group="cache")
    ] = "",
    everything: Annotated[bool, flag("all namespaces", "--all", group="cache")] = False,
    yes: Annotated[bool, flag("do not ask", "--yes", "-y", group="cache")] = False,
    invocation: Annotated[Invocation, Parameter(parse=False)],
) -> int:
    """Remove one namespace or all. Returns 0 when the records are gone, 1 when the user declined."""
    address = _address(store)
    with closing(open_to_read(address)) as opened:
        namespaces = survey(opened)
    chosen = _chosen(namespaces, namespace, everything=everything)
    if not chosen:
        invocation.say("the store is empty")
        return 0
    if not yes and not _agreed(chosen, invocation):
        invocation.say("nothing was removed")
        return 1
    with closing(open_to_clear(address)) as to_clear:
        count = sum(clear_records(to_clear, target.name, time.monotonic, math.inf) for target in chosen)
    invocation.say(f"removed {_counted(count, 'record')}")
    return 0


def _address(store: str | None) -> str:
    if not store:
        raise UsageError(
            "no store is given.",
            remedy="Give its directory or URL, as in penstock cache ls ~/kv, or set PENSTOCK_KV_STORE.",
            param="kv_store",
        )
    return store


def _chosen(namespaces: Sequence[Namespace], digits: str, *, everything: bool) -> list[Namespace]:
    if everything == bool(digits):
        raise UsageError(
            "give either --namespace or --all.",
            remedy="`penstock cache ls` shows the digits of each namespace; --all removes every one.",
            param="namespace",
        )
    fitting = [namespace for namespace in namespaces if namespace.name.hex().startswith(digits.lower())]
    if digits and len(fitting) != 1:
        raise UsageError(
            f"--namespace {digits} fits {len(fitting)} of {_counted(len(namespaces), 'namespace')}.",
            remedy="`penstock cache ls` shows them.",
            param="namespace",
        )
    return fitting


def _agreed(chosen: Sequence[Namespace], invocation: Invocation) -> bool:
    for namespace in chosen:
        invocation.say("  ".join(_row(namespace)))
    invocation.stdout.write("Remove this from the store? [y/N] ")
    invocation.stdout.flush()
    return invocation.stdin.readline().strip().lower() in ("y", "yes")


def _row(namespace: Namespace) -> tuple[str, ...]:
    about = namespace.description
    opened, model = "-", "unknown"
    if about is not None:
        opened = datetime.fromtimestamp(about.opened_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        model = f"{about.model} ({about.dtype}, {about.kind}, blocks of {about.block_size})"
    digits, size = namespace.name.hex()[:_SHOWN_DIGITS], _size(namespace.num_bytes)
    return digits, f"{namespace.num_blocks:,}", f"{namespace.num_records:,}", size, opened, one_line(model)


def _totals(address: str, namespaces: Sequence[Namespace], verified: Verified) -> Iterator[tuple[str, str]]:
    yield "namespaces", f"{len(namespaces):,}"
    yield "blocks", f"{sum(namespace.num_blocks for namespace in namespaces):,}"
    yield "records", f"{sum(namespace.num_records for namespace in namespaces):,}"
    yield "size", _size(sum(namespace.num_bytes for namespace in namespaces))
    quotas = [
        about.quota_bytes
        for namespace in namespaces
        if (about := namespace.description) and about.quota_bytes
    ]
    if quotas:
        yield "quota", f"{_size(min(quotas))}, set by a server"
    elif directory_of(address) is None:
        yield "quota", "set in the store: by the bucket's rules, or by maxmemory"
    else:
        yield "quota", "not known"
    bad = f"{verified.num_bad:,} bad" if verified.num_bad else "all good"
    yield "verified", f"{_counted(verified.num_looked_at, 'record')}, {bad}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} B"
