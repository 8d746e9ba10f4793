"""`penstock cache ls`, `stat` and `clear`: what is in a store of KV blocks, also while servers use it.

Called by `cli`. Looking changes nothing, neither records nor the order in which they are given up.
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
    """The command. Returns 0."""
    with closing(open_to_read(_address(store))) as opened:
        found = survey(opened)
    if not found:
        invocation.say("the store is empty")
        return 0
    rows = [("namespace", "blocks", "records", "size", "opened", "model"), *map(_row, found)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=False)]
        invocation.say("  ".join([*cells, row[5]]))
    return 0


def cache_stat(
    store: StoreAddress = None,
    *,
    verify: Annotated[bool, flag("look at every record, not at some", "--verify", group="cache")] = False,
    invocation: Annotated[Invocation, Parameter(parse=False)],
) -> int:
    """The command. Returns 1 if a record is not what it should be, else 0."""
    address = _address(store)
    with closing(open_to_read(address)) as opened:
        found = survey(opened)
        verified = verify_all(opened) if verify else verify_sample(opened)
    for name, text in _totals(address, found, verified):
        invocation.say(f"{name:<10} {text}")
    if verified.num_bad:
        invocation.warn(
            "bad records are computed again when they are met; `penstock cache clear` removes all."
        )
    return 1 if verified.num_bad else 0


def cache_clear(
    store: StoreAddress = None,
    *,
    namespace: Annotated[str, flag("which one: its first digits", "--namespace", group="cache")] = "",
    everything: Annotated[bool, flag("all namespaces", "--all", group="cache")] = False,
    yes: Annotated[bool, flag("do not ask", "--yes", "-y", group="cache")] = False,
    invocation: Annotated[Invocation, Parameter(parse=False)],
) -> int:
    """The command. Returns 0 when the records are gone, 1 when the answer was no."""
    address = _address(store)
    with closing(open_to_read(address)) as opened:
        found = survey(opened)
    chosen = _chosen(found, namespace, everything=everything)
    if not chosen:
        invocation.say("the store is empty")
        return 0
    if not yes and not _agreed(chosen, invocation):
        invocation.say("nothing was removed")
        return 1
    with closing(open_to_clear(address)) as to_clear:
        count = sum(clear_records(to_clear, one.name, time.monotonic, math.inf) for one in chosen)
    invocation.say(f"removed {_counted(count, 'record')}")
    return 0


def _address(store: str | None) -> str:
    if not store:
        raise UsageError(
            "it is not said which store.",
            remedy="Give its directory or URL, as in penstock cache ls ~/kv, or set PENSTOCK_KV_STORE.",
            param="kv_store",
        )
    return store


def _chosen(found: Sequence[Namespace], digits: str, *, everything: bool) -> list[Namespace]:
    if everything == bool(digits):
        raise UsageError(
            "either one namespace is removed or all are.",
            remedy="Give --namespace with its first digits (`penstock cache ls` shows them), or --all.",
            param="namespace",
        )
    fitting = [one for one in found if one.name.hex().startswith(digits.lower())]
    if digits and len(fitting) != 1:
        raise UsageError(
            f"--namespace {digits} fits {len(fitting)} of {_counted(len(found), 'namespace')}.",
            remedy="`penstock cache ls` shows them.",
            param="namespace",
        )
    return fitting


def _agreed(chosen: Sequence[Namespace], invocation: Invocation) -> bool:
    for one in chosen:
        invocation.say("  ".join(_row(one)))
    invocation.stdout.write("Remove this from the store? [y/N] ")
    invocation.stdout.flush()
    return invocation.stdin.readline().strip().lower() in ("y", "yes")


def _row(one: Namespace) -> tuple[str, ...]:
    about = one.description
    opened, model = "-", "unknown"
    if about is not None:
        opened = datetime.fromtimestamp(about.opened_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        model = f"{about.model} ({about.dtype}, {about.kind}, blocks of {about.block_size})"
    digits, size = one.name.hex()[:_SHOWN_DIGITS], _size(one.num_bytes)
    return digits, f"{one.num_blocks:,}", f"{one.num_records:,}", size, opened, one_line(model)


def _totals(address: str, found: Sequence[Namespace], verified: Verified) -> Iterator[tuple[str, str]]:
    yield "namespaces", f"{len(found):,}"
    yield "blocks", f"{sum(one.num_blocks for one in found):,}"
    yield "records", f"{sum(one.num_records for one in found):,}"
    yield "size", _size(sum(one.num_bytes for one in found))
    quotas = [about.quota_bytes for one in found if (about := one.description) and about.quota_bytes]
    if quotas:
        yield "quota", f"{_size(min(quotas))}, as a server has set it"
    elif directory_of(address) is None:
        yield "quota", "kept where the store is: by the bucket's rules, or by maxmemory"
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
