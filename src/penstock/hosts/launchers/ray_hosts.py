"""The hosts of an engine whose workers Ray starts (`--distributed-executor-backend ray`).

What a user of several machines gives by hand is chosen here if it is not given: where workers join, the token
file, and a cluster identity of this start alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.config.hosts import HostsConfig
from penstock.config.ray import RayOptions, ray_options
from penstock.errors import UsageError
from penstock.hosts.gathering import GatheredHosts
from penstock.hosts.launchers.engine_hosts import Voices
from penstock.hosts.launchers.ray_messages import PlaceWorkers
from penstock.hosts.launchers.ray_starter import RayStarter
from penstock.hosts.launchers.starter import WantedWorkers
from penstock.hosts.member import Waitable
from penstock.hosts.rank_host import Hosts
from penstock.trust.private_files import make_private_directory

ANY_ADDRESS = "0.0.0.0:0"
LIFE_S = 10 * 365 * 86400.0  # of a token: a worker may be lost at any time
MAX_JOINS = 1000  # each worker that Ray starts on another node joins with it
AWAY_LIMIT_S = 300.0  # for which a head may be away; then its workers end, and Ray has their nodes back
_TOKEN_FILE, _STATE = "join-token", "state"


class RayHosts:
    """This host, and the workers that Ray starts. Implements `EngineHosts`.

    Args:
        gathered: which they join.
        directory: of this start alone; it is removed at the end.
    """

    def __init__(self, gathered: GatheredHosts, directory: contextlib.ExitStack) -> None:
        self._gathered = gathered
        self._directory = directory

    @property
    def hosts(self) -> Hosts:
        return self._gathered.hosts

    @property
    def sources(self) -> Sequence[Waitable]:
        return self._gathered.sources

    def gather(self, lifelines: Sequence[Waitable]) -> None:
        self._gathered.gather(lifelines)

    def admit(self) -> None:
        self._gathered.admit()

    def tend(self, now: float) -> None:
        self._gathered.tend(now)

    def close(self) -> None:
        self._gathered.close()
        self._directory.close()


def open_ray_hosts(cluster: HostsConfig, voices: Voices) -> RayHosts:
    """Return the hosts of an engine that Ray brings together.

    Raises:
        UsageError: ray is not installed.
        PenstockError: what `GatheredHosts` raises.
    """
    if importlib.util.find_spec("ray") is None:
        raise UsageError(
            "--distributed-executor-backend is ray, and ray is not installed.",
            remedy="Run `pip install 'penstock[ray]'`, with the same versions on all nodes.",
            param="distributed_executor_backend",
        )
    options = ray_options(cluster.ray)
    with contextlib.ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-ray-")))
        settings = msgspec.structs.replace(
            cluster,
            listen_workers=cluster.listen_workers or ANY_ADDRESS,
            join_token_file=cluster.join_token_file or str(own / _TOKEN_FILE),
            join_token_ttl_s=LIFE_S,
            state_dir=cluster.state_dir or str(own / _STATE),
        )
        make_private_directory(own)
        starter = RayStarter(lambda wanted: _order(wanted, options), voices)
        gathered = GatheredHosts(settings, voices, starter, MAX_JOINS)
        return RayHosts(gathered, stack.pop_all())


def _order(wanted: WantedWorkers, options: RayOptions) -> PlaceWorkers:
    """Return what the driver is to do."""
    words = ["--away-limit", f"{AWAY_LIMIT_S:g}"]
    words += ["--insecure-links"] * wanted.is_plain
    return PlaceWorkers(
        engine=f"penstock-{secrets.token_hex(6)}",
        number=wanted.number,
        host="" if wanted.host == ANY_ADDRESS.partition(":")[0] else wanted.host,
        port=wanted.port,
        token_file=wanted.token_file,
        words=words,
        options=options,
    )
