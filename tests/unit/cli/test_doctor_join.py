"""What `doctor --join` says of what a visit has found: one line for each check, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clusters import Cluster
from penstock.cli import doctor_join
from penstock.cli.doctor_join import NO_JOIN, JoinSettings, check_join, findings_of
from penstock.cli.findings import Finding
from penstock.errors import JoinTokenError, LinkClosedError, OtherVersionError
from penstock.hosts.network.interfaces import AddressPair, HostAddress, Medium
from penstock.hosts.network.link_choice import MeasuredPair
from penstock.hosts.network.link_measuring import StreamSpeed
from penstock.hosts.network.port_check import CheckedPorts
from penstock.hosts.network.scout import Dead, Survey
from penstock.hosts.network.visiting import Visited, VisitSettings
from penstock.hosts.worker import credentials_path
from penstock.trust.join_token import JoinToken
from penstock.trust.token_prompt import JOIN_TOKEN

MBIT = 1e6 / 8


def measured(
    interface: str = "eth0", number: int = 0, *, mbit: float = 940, mtu: int = 1500, mtus: Any = (1500, 1500)
) -> MeasuredPair:
    own, other = (
        HostAddress(
            address=f"10.0.{number}.{host}", prefix=24, interface=interface, medium=Medium.WIRED, mtu=own_mtu
        )
        for host, own_mtu in zip((2, 1), mtus, strict=True)
    )
    speed = StreamSpeed(round_trip_s=0.0002, bytes_per_s_out=mbit * MBIT, bytes_per_s_in=mbit * MBIT)
    return MeasuredPair(pair=AddressPair(own=own, other=other), speed=speed, mtu=mtu)


def survey(*ways: MeasuredPair) -> Survey:
    return Survey(open=list(ways), dead=[])


NOTHING = Survey(open=[], dead=[Dead(measured().pair, "no answer")])
PORTS = list(range(7702, 7733))
WELL = Visited(
    name="desk",
    own=CheckedPorts(address="10.0.0.2", ports=PORTS, link_ports="7701-7732"),
    head_name="tower",
    head=CheckedPorts(address="10.0.0.1", ports=PORTS, link_ports="7701-7732"),
    to_head=survey(measured()),
    from_head=survey(measured()),
    unreached_at_head={},
    unreached_here={},
)


def found(subject: str, address: str = "", **changed: Any) -> Finding:
    findings = findings_of(msgspec.structs.replace(WELL, **changed), address)
    return next(finding for finding in findings if finding.subject == subject)


def test_g1_all_is_well_and_each_check_has_a_line() -> None:
    findings = findings_of(WELL)
    assert {finding.level for finding in findings} == {"ok"}
    assert [finding.subject for finding in findings] == [
        "head", "version", "ports of head", "own ports", "link", "mtu",
    ]  # fmt: skip
    assert findings[2].text == "7702-7732 of tower (10.0.0.1) are reached"
    assert findings[4].text == (
        "eth0 (10.0.0.2) to eth0 (10.0.0.1): 940 Mbit/s out, 940 Mbit/s in, round trip 0.20 ms; in use"
    )
    assert all((finding.remedy == "") == (finding.level == "ok") for finding in findings)


def test_g1_ports_that_are_closed_one_way_are_a_warning_and_both_ways_a_failure() -> None:
    closed = dict.fromkeys([7702, 7703, 7709], "no answer")
    one_way = found("own ports", unreached_here=closed)
    assert (one_way.level, one_way.text) == (
        "warn",
        "7702-7703, 7709 of desk (10.0.0.2) are not reached: no answer",
    )
    assert "firewall of desk" in one_way.remedy
    assert "desk opens all links itself" in one_way.remedy
    both = {"unreached_here": closed, "unreached_at_head": {7702: "no route to host"}}
    assert {found(subject, **both).level for subject in ("own ports", "ports of head")} == {"fail"}
    taken = CheckedPorts(address="10.0.0.1", ports=[], link_ports="7701")
    assert "all ports 7701 of tower are in use" in found("ports of head", head=taken).text


@pytest.mark.parametrize(
    ("way", "level", "words"),
    [
        (measured(), "ok", "1500 bytes"),
        (measured(mtu=0), "ok", "1500 bytes"),
        (measured(mtu=1400), "warn", "packets of 1400 bytes arrive, but the interfaces are set to 1500"),
        (measured(mtus=(9000, 1500)), "warn", "eth0 has 9000 here, and eth0 1500 at the head"),
    ],
)
def test_g1_the_mtu_is_that_of_the_path(way: MeasuredPair, level: str, words: str) -> None:
    finding = found("mtu", to_head=survey(way))
    assert (finding.level, finding.text) == (level, words)


def test_g1_the_way_in_use_comes_first_and_a_fixed_slower_one_is_warned_of() -> None:
    slow, fast = measured("wlan0", 1, mbit=87), measured("eth0", mbit=940)
    ways = survey(slow, fast)
    assert found("link", to_head=ways).text.startswith("eth0")
    assert found("link", "10.0.1.2", to_head=ways).text.startswith("wlan0")
    assert "is idle: eth0" in found("idle link", "10.0.1.2", to_head=ways).text
    gone = found("link", "10.0.7.7", to_head=ways)
    assert (gone.level, gone.remedy[:28]) == ("fail", "Leave --address out, for eth")


def test_g1_a_head_that_no_way_leads_to_is_a_failure_unless_it_can_dial() -> None:
    none = found("link", to_head=NOTHING, from_head=NOTHING)
    assert none.level == "fail"
    assert "eth0 (10.0.0.2) to eth0 (10.0.0.1): no answer" in none.text
    assert found("link", to_head=NOTHING).level == "warn"


@pytest.mark.parametrize(
    ("error", "subject"),
    [
        (OtherVersionError("the worker runs Penstock 1, and the head 2."), "version"),
        (JoinTokenError("the join token has expired."), "head"),
        (LinkClosedError("no program listens at 10.0.0.1:7700."), "head"),
    ],
)
def test_g1_a_head_that_does_not_let_this_host_in_is_one_failure(
    error: Exception, subject: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*given: object) -> None:
        raise error

    monkeypatch.setattr(doctor_join, "visit_head", fail)
    (finding,) = check_join(JoinSettings(join="10.0.0.1", state_dir=tmp_path))
    assert (finding.level, finding.subject) == ("fail", subject)
    assert finding.remedy
    assert check_join(NO_JOIN) == []


def test_i2_the_token_comes_from_where_a_worker_would_take_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def visit(_: VisitSettings, token: Callable[[], JoinToken]) -> Visited:
        asked.append(token().text())
        return WELL

    monkeypatch.setattr(doctor_join, "visit_head", visit)
    of_environment, of_file = (JoinToken.new(key).text() for key in (b"a key", b"another"))
    monkeypatch.setenv(JOIN_TOKEN, of_environment)
    file = tmp_path / "token"
    file.write_text(of_file)
    file.chmod(0o600)
    for given in (None, file):
        check_join(JoinSettings(join="10.0.0.1", state_dir=tmp_path, join_token_file=given))
    assert asked == [of_environment, of_file]
    monkeypatch.setenv(JOIN_TOKEN, of_environment[:-1] + "!")
    (finding,) = check_join(JoinSettings(join="10.0.0.1", state_dir=tmp_path))
    assert (finding.level, finding.subject) == ("fail", "head")
    assert "mistyped" in finding.text


def test_g1_the_check_takes_the_certificate_that_a_worker_would_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The head had another address when this host joined, and the token may be used up."""
    cluster, visited = Cluster(tmp_path / "head"), list[Path]()
    before = credentials_path(tmp_path, ("10.0.0.9", 7700), "desk")
    cluster.joined("desk").save(before)

    def visit(given: VisitSettings, _: object) -> Visited:
        visited.append(given.credentials)
        return WELL

    monkeypatch.setattr(doctor_join, "visit_head", visit)
    monkeypatch.setenv(JOIN_TOKEN, cluster.token.text())
    check_join(JoinSettings(join="10.0.0.1:7700", name="desk", state_dir=tmp_path))
    assert visited == [before]
    assert before.exists(), "a check moves nothing"
