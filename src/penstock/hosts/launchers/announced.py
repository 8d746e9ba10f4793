"""Announces the head (the host that serves) in the local network, where workers find it (`--discover`)."""

from __future__ import annotations

from collections.abc import Callable

from penstock.hosts.launchers.starter import TypedByUser, WantedWorkers
from penstock.hosts.network.discovery import Announcement
from penstock.hosts.network.joining_address import join_hosts


class Announced(TypedByUser):
    """A starter that announces the head in the local network, where workers that a user starts find it.

    Implements `WorkerStarter`.

    Args:
        tell: shows the user a line of text.
        announce: makes the announcement.
    """

    def __init__(
        self, tell: Callable[[str], None], announce: Callable[..., Announcement] = Announcement
    ) -> None:
        super().__init__(tell)
        self._announce = announce
        self._announcement: Announcement | None = None

    def start(self, wanted: WantedWorkers) -> None:
        addresses = join_hosts(wanted.host)
        self._announcement = self._announce(wanted.host_name, wanted.cluster, wanted.port, addresses)
        self._invite(wanted, "this head is announced in the local network. On other hosts", "--discover")

    def close(self) -> None:
        """Withdraw the announcement; the workers go on, since they are the user's."""
        if self._announcement is not None:
            self._announcement.close()
            self._announcement = None
