"""A user starts the workers, and they find the head by themselves (`--discover`)."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from penstock.errors import PenstockError
from penstock.hosts.launchers.starter import WantedWorkers
from penstock.hosts.member import Waitable
from penstock.hosts.network.discovery import Announcement
from penstock.hosts.network.interfaces import usable_addresses
from penstock.hosts.network.joining_address import is_any_address


class Announced:
    """Announces the head in the local network. Implements `WorkerStarter`.

    Args:
        tell: takes lines for the user.
        announce: makes the announcement.
    """

    failure: PenstockError | None = None
    sources: Sequence[Waitable] = ()

    def __init__(
        self, tell: Callable[[str], None], announce: Callable[..., Announcement] = Announcement
    ) -> None:
        self._tell = tell
        self._announce = announce
        self._announcement: Announcement | None = None

    def start(self, wanted: WantedWorkers) -> None:
        own = [each.address for each in usable_addresses() if not each.is_link_local]
        addresses = own if is_any_address(wanted.host) else [wanted.host]
        self._announcement = self._announce(wanted.host_name, wanted.cluster, wanted.port, addresses)
        workers = f"{wanted.number} worker" + "s" * (wanted.number != 1)
        self._tell(
            f"waiting for {workers}; this head can be found in the local network. On other hosts type:\n"
            f"  penstock worker --discover --join-token-file {shlex.quote(wanted.token_file)}"
        )
        self._tell(
            f"links from other hosts come to the ports {wanted.link_ports} of this host (--link-ports)"
        )

    def attend(self) -> None:
        """Nothing comes from the user here."""

    def take_lost(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        if self._announcement is not None:
            self._announcement.close()
            self._announcement = None
