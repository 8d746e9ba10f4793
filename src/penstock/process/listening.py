"""Opens the HTTP socket: checks where the server may listen, and names the process that has the port already.

The supervisor binds the socket before anything is loaded, so that a busy port is known at once. It keeps the
socket over a restart of the API process. This module serves nothing itself.

With `reuse_port` two servers may have the same port. The new server listens only when it is ready. From then
on the kernel gives it every new connection (`take_over`), so that the old server can finish its requests.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from penstock.config.server import ServerConfig
from penstock.errors import PortInUseError, UsageError
from penstock.process import tls

BACKLOG = 2048
_SO_ATTACH_REUSEPORT_CBPF = 51
_BPF_RETURN, _SECOND = 0x06, 1
_SocketAddress = tuple[str, int] | tuple[str, int, int, int]  # of IPv6 with its flow and its interface
_HOST = r"(?:\[[0-9a-f:.]+\]|[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?)"
_ORIGIN = re.compile(rf"(?P<scheme>[a-z][a-z0-9+.-]*)://{_HOST}(?::(?P<port>[1-9][0-9]{{0,4}}))?")
_IMPLIED_PORTS = frozenset({("http", "80"), ("https", "443")})


def listen(config: ServerConfig) -> socket.socket:
    """Return the bound HTTP socket; it listens, unless the port is to be taken over later (`reuse_port`).

    Raises:
        UsageError: a setting cannot be used. The address does not exist, or other machines reach it and no
            key is set. Or a key, an origin of web pages, a host name or the certificate is not valid.
        PortInUseError: the port is taken, or this process may not use it. The error names the process that
            has the port, if we are allowed to see it.
    """
    refuse_bad_keys(config.api_keys, config.admin_keys)
    refuse_bad_origins(config.allowed_origins)
    refuse_bad_hosts(config.allowed_hosts)
    tls.server_context(config)
    family, address = _resolve(config)
    _require_key_unless_loopback(config, address[0])
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if config.reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        if not config.reuse_port:
            listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(config, error) from error
    return listener


def take_over(listener: socket.socket) -> None:
    """Let the kernel give all new connections of a shared port to this socket, which has begun to listen.

    The sockets that share a port form a group, and this one is the second as long as the old server lives. A
    classic BPF program chooses the second; if the group has only one socket, the kernel takes that one.
    Source: socket(7), SO_ATTACH_REUSEPORT_CBPF.
    """
    program = ctypes.create_string_buffer(struct.pack("@HBBI", _BPF_RETURN, 0, 0, _SECOND))
    pointer = struct.pack("@HP", 1, ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, pointer)


def url(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a listening socket, such as `http://127.0.0.1:8000`."""
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    host, port = socket.getnameinfo(listener.getsockname(), numeric)  # with the interface of fe80::…
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def refuse_bad_keys(keys: Sequence[str], admin_keys: Sequence[str]) -> None:
    """Raise `UsageError` for a key that is empty or blank, and for an API key that is also an admin key."""
    for name, group in (("api_keys", keys), ("admin_keys", admin_keys)):
        blank = next((index for index, key in enumerate(group) if not key.strip()), None)
        if blank is not None:
            raise UsageError(
                f"{name}[{blank}] is empty.",
                remedy="Give a key that is not empty, or leave it out.",
                param=name,
            )
    if set(keys) & set(admin_keys):
        raise UsageError(
            "an admin key is also an API key, so every client would be an administrator.",
            remedy="Use a separate key for administrators.",
            param="admin_keys",
        )


def refuse_bad_origins(origins: Sequence[str]) -> None:
    """Raise `UsageError` for text that is not an origin of web pages as browsers write it."""
    for index, origin in enumerate(origins):
        named, match = f"allowed_origins[{index}] is {origin[:128]!r}", _ORIGIN.fullmatch(origin)
        if match is None:
            raise UsageError(
                f"{named}, which is not an origin.",
                remedy="Write it as browsers send it, such as https://chat.example or http://localhost:3000: "
                "lower case, no path, no pattern. For several, give --allowed-origins once for each.",
                param="allowed_origins",
            )
        if (match["scheme"], match["port"]) in _IMPLIED_PORTS:
            raise UsageError(
                f"{named}; browsers leave out port {match['port']} there.",
                remedy="Leave the port out as well.",
                param="allowed_origins",
            )


def refuse_bad_hosts(hosts: Sequence[str]) -> None:
    """Raise `UsageError` for text that is not a host name or address as in the HTTP header `Host`."""
    for index, host in enumerate(hosts):
        if re.fullmatch(_HOST, host.lower()) is None:
            raise UsageError(
                f"allowed_hosts[{index}] is {host[:128]!r}, which is not a host name.",
                remedy="Write only the name, such as host.docker.internal: no scheme, no port, no pattern. "
                "For several, give --allowed-hosts once for each.",
                param="allowed_hosts",
            )


def _resolve(config: ServerConfig) -> tuple[int, _SocketAddress]:
    try:
        addresses = socket.getaddrinfo(
            config.host or "0.0.0.0", config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as error:
        raise UsageError(
            f"--host {config.host} is not an address of this machine: {error}.",
            remedy="Use 127.0.0.1, or an address that `ip addr` shows.",
            param="host",
        ) from error
    family, _, _, _, address = addresses[0]
    return family, address  # type: ignore[return-value]  # of families without addresses there is none


def _require_key_unless_loopback(config: ServerConfig, host: str) -> None:
    is_loopback = ipaddress.ip_address(host.partition("%")[0]).is_loopback
    if is_loopback or config.api_keys or config.insecure:
        return
    raise UsageError(
        f"--host {config.host} is reachable from other machines, and no API key is set.",
        remedy="Set --api-key (or --api-key-file), or add --insecure.",
        param="host",
        code="no_api_key",
    )


def _bind_error(config: ServerConfig, error: OSError) -> PortInUseError | UsageError:
    if error.errno == errno.EADDRINUSE:
        owner = _owner(config.port)
        by = f" by pid {owner[0]} ({owner[1]})" if owner else " by another process"
        return PortInUseError(
            f"port {config.port} is used{by}.", remedy="Use --port or stop it.", param="port"
        )
    if error.errno == errno.EACCES:
        return PortInUseError(
            f"port {config.port} needs privileges that this process does not have.",
            remedy="Use a --port from 1024 on.",
            param="port",
        )
    return UsageError(f"cannot listen on {config.host} port {config.port}: {error.strerror}.", param="host")


def _owner(port: int) -> tuple[int, str] | None:
    """Return pid and name of the process that listens on a TCP port; None if we may not see it."""
    inodes = _listening_inodes(port)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _holds_socket(entry, inodes):
            return int(entry.name), _name_of(entry)
    return None


def _name_of(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "it has already ended"


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            local, state, inode = fields[1], fields[3], fields[9]
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:  # 0A: TCP_LISTEN
                inodes.add(inode)
    return inodes


def _holds_socket(process: Path, inodes: set[str]) -> bool:
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:  # not ours to see, or it has just ended
        return False
    return any(_socket_inode(descriptor) in inodes for descriptor in descriptors)


def _socket_inode(descriptor: Path) -> str:
    try:
        target = os.readlink(descriptor)
    except OSError:  # closed in the meantime
        return ""
    return target[8:-1] if target.startswith("socket:[") else ""
