"""Looks for the head of a worker that was not told where it is (`penstock worker --discover`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from penstock.hosts.network.discovery import Address, HeadSearch
from penstock.hosts.network.joining_address import shown
from penstock.process.readiness import Waitable, await_readable
from penstock.trust.token_prompt import Tokens


def found_head(
    tokens: Tokens,
    tell: Callable[[str], None],
    stop: Waitable,
    search: Callable[[str], HeadSearch] = HeadSearch,
) -> Address | None:
    """Wait until the head of the token's cluster is found in the local network; return its address and port.

    Args:
        tokens: join tokens of the worker; without one at hand any head will do.
        tell: shows the user a line of text.
        stop: readable when the worker is to end.
        search: begins a search for the head of a cluster.

    Returns:
        None if the worker is to end.

    Raises:
        UsageError: the network or the library cannot be used.
    """
    token = tokens.at_hand()
    cluster = "" if token is None else token.cluster
    tell(
        "searching for this token's head in the local network"
        if cluster
        else "searching for a head in the local network"
    )
    with closing(search(cluster)) as heads:
        while (address := heads.take()) is None:
            if stop in await_readable([heads, stop]):
                return None
        tell(f"found a head at {shown(*address)}")
        return address
