"""The command `penstock doctor --join`: whether this host could be a worker, and how good its network is.

Called by `cli.doctor`. `hosts.network.visiting` visits the head and measures; this module says what the
results mean, and what to do about them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.cli.findings import Finding
from penstock.cli.flags import flag
from penstock.cli.terminal import remedy_of
from penstock.config.hosts import own_host_name, own_version, parse_address, state_directory
from penstock.errors import OtherVersionError, PenstockError
from penstock.hosts.network.link_choice import MeasuredPair, best_pair, idle_warning, speed_text
from penstock.hosts.network.port_check import CheckedPorts, port_list
from penstock.hosts.network.scout import Survey
from penstock.hosts.network.visiting import Visited, VisitSettings, visit_head
from penstock.hosts.worker import credentials_path, kept_certificate
from penstock.process.link_ports import DEFAULT_LINK_PORTS, PortRange

_GROUP = "join"
_NO_COMMON_NETWORK = "the hosts have no addresses in a common network"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """The settings with which this host would join a head; as for `penstock worker`."""

    join: Annotated[str, flag("ADDRESS:PORT of the head to check", "--join", group=_GROUP)] = ""
    join_token_file: Annotated[
        Path | None,
        flag("file of the join token; the check does not use it up", "--join-token-file", group=_GROUP),
    ] = None
    name: Annotated[str, flag("name of this host in the cluster", "--name", group=_GROUP)] = ""
    address: Annotated[str, flag("address of this host for links", "--address", group=_GROUP)] = ""
    link_ports: Annotated[str, flag("ports for links", "--link-ports", group=_GROUP)] = str(
        DEFAULT_LINK_PORTS
    )
    state_dir: Annotated[
        Path | None, flag("directory of this host's certificate", "--state-dir", group=_GROUP)
    ] = None


NO_JOIN = JoinSettings()


def check_join(settings: JoinSettings) -> list[Finding]:
    """Run all checks of a head and of the network paths to it; none if no head is given.

    Raises:
        UsageError: a setting cannot be used.
    """
    from penstock.hosts.network.interfaces import own_address
    from penstock.trust.cancellation import Cancellation
    from penstock.trust.token_prompt import GivenTokens, environment_token

    if not settings.join:
        return []
    head, name = parse_address(settings.join, "--join"), own_host_name(settings.name)
    file = settings.join_token_file
    tokens = environment_token(file, os.environ) or GivenTokens(file)
    path = credentials_path(state_directory(settings.state_dir), head, name)
    visit = VisitSettings(
        head=head,
        name=name,
        credentials=kept_certificate(path, name, tokens.at_hand()),
        ports=PortRange.parse(settings.link_ports),
        address=own_address(settings.address) if settings.address else "",
    )
    try:
        return findings_of(visit_head(visit, lambda: tokens.ask(Cancellation())), visit.address)
    except OtherVersionError as error:
        return [Finding("fail", "version", error.message, remedy_of(error))]
    except PenstockError as error:
        return [Finding("fail", "head", error.message, remedy_of(error))]


def findings_of(visited: Visited, address: str = "") -> list[Finding]:
    """Return what a visit of a head means for this host.

    Args:
        address: the address that `--address` fixes for this host's links; "" if it fixes none.
    """
    head_whole, own_whole = not visited.unreached_at_head, not visited.unreached_here
    return [
        Finding("ok", "head", f"{visited.head_name} lets this host join as {visited.name}"),
        Finding("ok", "version", f"{own_version()} on both hosts"),
        _ports("ports of head", visited.head, visited.unreached_at_head, visited.head_name, own_whole),
        _ports("own ports", visited.own, visited.unreached_here, visited.name, head_whole),
        *_links(visited.to_head, visited.from_head, address),
    ]


def _ports(
    subject: str, checked: CheckedPorts, unreached: dict[int, str], host: str, leads_other_way: bool
) -> Finding:
    """Return whether the other host reaches the link ports of a host.

    Args:
        subject: first words of the finding.
        checked: the ports, and those that could be checked.
        unreached: reasons by port, for the ports that are not reached.
        host: name of the host that has the ports.
        leads_other_way: whether this host reaches the ports of the other one, and so can dial all links.
    """
    if not checked.ports:
        remedy = "Stop the program that listens there, or give another range with --link-ports on that host."
        return Finding("warn", subject, f"all ports {checked.link_ports} of {host} are in use", remedy)
    if not unreached:
        return Finding("ok", subject, f"{port_list(checked.ports)} of {host} ({checked.address}) are reached")
    why = ", ".join(dict.fromkeys(unreached.values()))
    text = f"{port_list(list(unreached))} of {host} ({checked.address}) are not reached: {why}"
    remedy = f"Open TCP ports {checked.link_ports} in the firewall of {host}."
    if leads_other_way:
        return Finding("warn", subject, text, f"{remedy} Until then {host} opens all links itself.")
    return Finding("fail", subject, text, remedy)


def _links(to_head: Survey, from_head: Survey, address: str) -> list[Finding]:
    """Return a finding for each network path to the head, and one for the MTU of the path that is used.

    The path that links would use comes first.

    Args:
        to_head: paths on which this host dialled the head.
        from_head: paths on which the head dialled this host.
        address: as for `findings_of`.
    """
    if not to_head.open:
        return [_no_link(to_head, from_head)]
    allowed = [one for one in to_head.open if address in ("", one.pair.own.address)]
    if not allowed:
        text = f"no path from {address} reaches the head"
        return [Finding("fail", "link", text, f"Leave --address out, for {best_pair(to_head.open)}.")]
    used = best_pair(allowed)
    others = [one for one in to_head.open if one is not used]
    findings = [
        Finding("ok", "link", f"{_shown(used)}; in use"),
        *(Finding("ok", "link", _shown(one)) for one in others),
        _mtu(used),
    ]
    if warning := idle_warning(used, to_head.open):
        remedy = "Leave --address out, or give another address."
        findings.append(Finding("warn", "idle link", warning, remedy))
    return findings


def _no_link(to_head: Survey, from_head: Survey) -> Finding:
    if from_head.open:
        pair = from_head.open[0].pair
        text = f"only the head can open connections: {pair}; it was not measured"
        return Finding("warn", "link", text, "Open the head's link ports in its firewall.")
    tried = "; ".join(f"{one.pair}: {one.why}" for one in to_head.dead) or _NO_COMMON_NETWORK
    remedy = "Open the link ports of one of the two hosts in its firewall, or join at another address."
    return Finding("fail", "link", f"no path reaches the head ({tried})", remedy)


def _shown(one: MeasuredPair) -> str:
    speed = one.speed
    return (
        f"{one.pair}: {speed_text(speed.bytes_per_s_out)} out, {speed_text(speed.bytes_per_s_in)} in, "
        f"round trip {1e3 * speed.round_trip_s:.2f} ms"
    )


def _mtu(used: MeasuredPair) -> Finding:
    """Return whether packets arrive that are as large as both interfaces allow."""
    own, other = used.pair.own, used.pair.other
    least = min(own.mtu, other.mtu)
    if 0 < used.mtu < least:
        text = f"packets of {used.mtu} bytes arrive, but the interfaces are set to {least}"
        return Finding("warn", "mtu", text, f"Set the MTU of both interfaces to {used.mtu}.")
    if own.mtu != other.mtu:
        text = f"{own.interface} has {own.mtu} here, and {other.interface} {other.mtu} at the head"
        return Finding("warn", "mtu", text, "Give both the same MTU, or large packets may be lost.")
    return Finding("ok", "mtu", f"{used.mtu or least} bytes")
