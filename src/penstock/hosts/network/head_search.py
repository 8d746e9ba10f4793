"""Looks for the head of a worker that was not told where it is (`penstock worker --discover`).

`found_head` waits for it when the worker starts. When a running worker has lost its head, `head_elsewhere`
looks whether it is announced at another address.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from penstock.hosts.network.discovery import Address, HeadSearch
from penstock.hosts.network.joining_address import shown
from penstock.process.readiness import Waitable, await_readable
from penstock.trust.cancellation import Cancellation, CancelledError
from penstock.trust.token_prompt import Tokens

SEARCH_S = 1.0  # for a lost head: ranks of this host may still run, and wait for the next try to join
_LOOK_S = 0.1  # between two looks at whether the search is still wanted


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


def head_elsewhere(
    cluster: str,
    known: Address,
    cancellation: Cancellation,
    search: Callable[[str], HeadSearch] = HeadSearch,
) -> Address | None:
    """Return another address and port at which a lost head is announced; None after `SEARCH_S` without one.

    Args:
        cluster: name of the cluster.
        known: address and port at which the head does not answer, so that this one is not returned.
        cancellation: ends the search from another thread.
        search: begins a search for the head of a cluster.

    Raises:
        CancelledError: the search is not wanted any more.
    """
    try:
        with closing(search(cluster)) as heads:
            for _ in range(round(SEARCH_S / _LOOK_S)):
                cancellation.check()
                await_readable([heads], _LOOK_S)
                while (address := heads.take()) is not None:
                    if address != known:
                        return address
    except CancelledError:
        raise
    except Exception:  # of any kind, such as of a network that is down: a later search may find the head
        return None
    return None
