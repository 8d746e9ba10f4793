"""The settings of an engine over several hosts, given to the head (the host that serves).

Workers have flags of their own (`cli.worker`).
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Annotated

import msgspec

from penstock import __version__
from penstock.config.checks import MAX_AGE_S, above_zero, at_least
from penstock.config.home import home_path
from penstock.config.ray import ray_options
from penstock.config.setting import Setting
from penstock.errors import UsageError

DEFAULT_PORT = 7700
SAME_VERSION = "Run the same version of Penstock on all hosts."  # remedy of many errors
_ADDRESS = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<name>[^\[\]:]+))(?::(?P<port>\d{1,5}))?")


class HostsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts that serve together, and the means by which they recognise each other.

    Attributes:
        hosts: number of hosts, including this one; all others run `penstock worker`.
        listen_workers: ADDRESS:PORT where workers join; the port is 7700 if it is left out.
        join_token_file: file of the token that workers join with; written if it does not exist.
        join_token_ttl_s: seconds that a new token is valid.
        host_name: name of this host in the cluster; "" uses the machine's name.
        link_ports: first and last port for links from other hosts to this one.
        insecure_links: send links between hosts in plain text; the workers must be started with it too.
        state_dir: directory of the cluster's identity; None: `~/.local/state/penstock`.
        discover: announce the head in the local network by mDNS (extra `discovery`).
        rejoin_timeout_s: seconds to wait for a lost host; then the others take over its stages.
        ray: how the executor backend `ray` places hosts, as a JSON object (`config.ray.RayOptions`).
    """

    hosts: Annotated[int, Setting("hosts", "hosts that serve together, including this one")] = 1
    listen_workers: Annotated[str | None, Setting("hosts", "ADDRESS:PORT where workers join")] = None
    join_token_file: Annotated[str | None, Setting("hosts", "file of the join token; written if absent")] = (
        None
    )
    join_token_ttl_s: Annotated[
        float, Setting("hosts", "seconds that a new token is valid", is_argument=False)
    ] = 3600.0
    host_name: Annotated[str, Setting("hosts", "name of this host in the cluster", is_argument=False)] = ""
    link_ports: Annotated[str, Setting("hosts", "ports for links from other hosts")] = "7701-7732"
    insecure_links: Annotated[
        bool,
        Setting("hosts", "links between ranks in plain text; workers need it too", is_argument=False),
    ] = False
    state_dir: Annotated[str | None, Setting("hosts", "directory of the cluster's identity")] = None
    discover: Annotated[
        bool,
        Setting("hosts", "announce this head in the local network (mDNS)", is_argument=False),
    ] = False
    rejoin_timeout_s: Annotated[float, Setting("hosts", "seconds to wait for a lost host")] = 30.0
    ray: Annotated[str, Setting("hosts", "JSON: placement of hosts by Ray (docs/clusters.md)")] = "{}"

    def __post_init__(self) -> None:
        at_least("hosts", self.hosts, 1)
        above_zero("join_token_ttl_s", self.join_token_ttl_s, MAX_AGE_S)
        above_zero("rejoin_timeout_s", self.rejoin_timeout_s)
        ray_options(self.ray)
        if self.listen_workers is not None:
            parse_address(self.listen_workers, "--listen-workers")
            if self.hosts == 1:
                raise UsageError(
                    "--listen-workers is given, and --hosts is 1.",
                    remedy="Give the number of hosts with --hosts, including this one.",
                    param="hosts",
                )

    def require_joining(self) -> None:
        """Raise `UsageError` if there are several hosts, but no address or no token file for workers to join.

        It is called for the backend `mp` alone: with other backends a user need not give them.
        """
        if self.hosts > 1 and (self.listen_workers is None or self.join_token_file is None):
            missing = "--listen-workers" if self.listen_workers is None else "--join-token-file"
            raise UsageError(
                f"--hosts is {self.hosts}, and {missing} is not given.",
                remedy="Give --listen-workers ADDRESS:PORT and --join-token-file PATH for workers to join.",
                param="hosts",
            )


def parse_address(text: str, flag: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Return host and port of `host:port`, `[v6]:port` or the host alone.

    Port 0 stands for any free port. Only `--listen-workers` may have it, on a head whose workers a launcher
    starts.

    Args:
        flag: the flag with this address, for errors.
        default_port: the port if the text has none.

    Raises:
        UsageError: the text is not an address.
    """
    match = _ADDRESS.fullmatch(text.strip())
    port = int(match["port"] or default_port) if match else 0
    if match is None or not 0 <= port <= 65535 or (port == 0 and flag != "--listen-workers"):
        raise UsageError(
            f"{flag} {text!r} is not an address.",
            remedy=f"Write host and port, such as 10.0.0.1:{default_port} or [fd00::1]:{default_port}.",
            param=flag,
        )
    return match["six"] or match["name"], port


def own_host_name(given: str) -> str:
    """Return the name of this host: the given name, or the machine's name in characters that are allowed."""
    return given or re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname()).strip("-._")[:64] or "host"


def own_version() -> str:
    """Return the version of Penstock that this process runs; all hosts must have the same.

    The package that is installed may be another one by now. The import rules let few modules import the
    package's root, so the others ask here.
    """
    return __version__


def state_directory(given: str | os.PathLike[str] | None) -> Path:
    """Return the directory for what must outlive the processes of Penstock on a host.

    Args:
        given: the user's `--state-dir`; None takes the default.

    Raises:
        UsageError: it is in a home directory, and this user has none.
    """
    if given is None:
        given = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "penstock"
    return home_path(given, "Set HOME, or give --state-dir a whole path.").resolve()


def head_directory(given: str | os.PathLike[str] | None) -> Path:
    """Return the directory with the identity of a head's cluster and the list of hosts that may join.

    Args:
        given: as for `state_directory`.
    """
    return state_directory(given) / "head"
