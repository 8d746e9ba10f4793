"""The hosts of an engine whose workers Ray starts (`--distributed-executor-backend ray`).

To start workers by hand, a user sets an address where they join, a token file and a directory of state. Here
they are chosen if they are not set; the identity of the cluster is then of this start alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import secrets

import msgspec

from penstock.config.hosts import HostsConfig
from penstock.config.ray import RayOptions, ray_options
from penstock.errors import UsageError
from penstock.hosts.gathering import GatheredHosts
from penstock.hosts.launchers.engine_hosts import Voices
from penstock.hosts.launchers.own_directory import own_directory
from penstock.hosts.launchers.ray_messages import PlaceWorkers
from penstock.hosts.launchers.ray_starter import RayStarter
from penstock.hosts.launchers.starter import WantedWorkers
from penstock.hosts.network.joining_address import is_any_address

ANY_ADDRESS = "0.0.0.0:0"
LIFE_S = 10 * 365 * 86400.0  # the token stays valid, since a lost worker may be replaced at any time
MAX_JOINS = 1000  # so often the token may be used: by each worker that Ray starts on another node
AWAY_LIMIT_S = 300.0  # when a head is away for longer, its workers end, and Ray gets their nodes back
_TOKEN_FILE, _STATE = "join-token", "state"


class RayHosts(GatheredHosts):
    """The hosts of an engine: this one, and the workers that Ray starts.

    Raises:
        UsageError: ray is not installed.
        PenstockError: what `GatheredHosts` raises.
    """

    def __init__(self, cluster: HostsConfig, voices: Voices) -> None:
        if importlib.util.find_spec("ray") is None:
            raise UsageError(
                "--distributed-executor-backend is ray, but ray is not installed.",
                remedy="Run `pip install 'penstock[ray]'`, with the same versions on all nodes.",
                param="distributed_executor_backend",
            )
        options = ray_options(cluster.ray)
        self._own_directory = own_directory(f"head-{secrets.token_hex(6)}")  # of this start alone
        own = self._own_directory.path
        with contextlib.ExitStack() as at_failure:
            at_failure.callback(self._own_directory.delete)
            settings = msgspec.structs.replace(
                cluster,
                listen_workers=cluster.listen_workers or ANY_ADDRESS,
                join_token_file=cluster.join_token_file or str(own / _TOKEN_FILE),
                join_token_ttl_s=LIFE_S,
                state_dir=cluster.state_dir or str(own / _STATE),
            )
            starter = RayStarter(lambda wanted: _order(wanted, options), voices)
            super().__init__(settings, voices, starter, MAX_JOINS)
            at_failure.pop_all()

    def close(self) -> None:
        """Close all hosts, and delete the directory of this start."""
        super().close()
        self._own_directory.delete()


def _order(wanted: WantedWorkers, options: RayOptions) -> PlaceWorkers:
    """Return the order to the Ray driver."""
    words = ["--away-limit", f"{AWAY_LIMIT_S:g}"]
    words += ["--insecure-links"] * wanted.is_plain
    return PlaceWorkers(
        engine=f"penstock-{secrets.token_hex(6)}",
        number=wanted.number,
        host="" if is_any_address(wanted.host) else wanted.host,
        port=wanted.port,
        token_file=wanted.token_file,
        words=words,
        options=options,
    )
