"""Joins the head at its last address or, with `--discover`, at the address that a search finds.

A head may come back at another address, for example after a new lease of DHCP. A worker with `--discover`
then finds it by its announcement (`hosts.network.head_search`). The head must show the key of its cluster
there, as at any address. Used by `hosts.worker`, in the threads of `hosts.join_attempts`.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import CertificateError, JoinError, PeerError, WrongClusterError
from penstock.hosts.network.joining_address import shown
from penstock.trust.cancellation import Cancellation
from penstock.trust.joining import Address, JoinedHead, needs_token
from penstock.trust.membership import Membership

Find = Callable[[str, Address, Cancellation], Address | None]


def found_nowhere(cluster: str, known: Address, cancellation: Cancellation) -> Address | None:
    """Find no other address; the search of a worker whose user has typed the address of the head."""
    return None


class FollowedHead:
    """The head of a worker, which is joined where it is: mostly at the address of before.

    Args:
        membership: how this host proves itself to the head.
        address: address and port at which the head was last.
        find: searches the network for the head of a cluster at another address than this one; returns None if
            it finds none within a second or so.
        tell: takes lines for the user.
    """

    def __init__(
        self, membership: Membership, address: Address, find: Find, tell: Callable[[str], None]
    ) -> None:
        self._membership = membership
        self._address = address
        self._find = find
        self._tell = tell

    def join(self, cancellation: Cancellation) -> JoinedHead:
        """Join the head once, as `Membership.join` does, and raise what that raises.

        If the head does not answer at its last address, and is found at another one, it is joined there.
        """
        try:
            return self._membership.join(self._address, cancellation)
        except PeerError as error:
            cluster = self._membership.cluster
            if not cluster or _is_answer(error):
                raise
            found = self._find(cluster, self._address, cancellation)
            if found is None:
                raise
        joined = self._membership.join(found, cancellation)
        self._address = found
        self._tell(f"the head has moved to {shown(*found)}")
        return joined


def _is_answer(error: PeerError) -> bool:
    """Return whether the head itself has given this error, so that it is at its address."""
    if isinstance(error, CertificateError | WrongClusterError):
        return needs_token(error)  # any other host that has the address now can cause all others
    return isinstance(error, JoinError)
