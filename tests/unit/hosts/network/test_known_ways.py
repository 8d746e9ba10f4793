"""What was measured between hosts outlives the head, and no longer than their interfaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.hosts.network.known_ways import KnownWay, KnownWays, Wire
from penstock.hosts.network.link_measuring import StreamSpeed

CABLE, WIRELESS = Wire("eth0", "enp3"), Wire("wlan0", "wlp4")


def way(wire: Wire) -> KnownWay:
    speed = StreamSpeed(round_trip_s=0.001, bytes_per_s_out=1e8, bytes_per_s_in=9e7)
    return KnownWay(wire=wire, speed=speed, mtu=1500, measured_at=1.7e9)


def test_measurements_are_kept_for_each_pair_of_hosts(tmp_path: Path) -> None:
    known = KnownWays(tmp_path / "ways")
    assert known.find("desk", "tower", [CABLE]) == {}
    known.keep("desk", "tower", [CABLE, WIRELESS], [way(CABLE)])
    again = KnownWays(tmp_path / "ways")
    assert again.find("desk", "tower", [WIRELESS, CABLE]) == {CABLE: way(CABLE)}
    assert again.find("attic", "tower", [WIRELESS, CABLE]) == {}
    assert [path.name for path in (tmp_path / "ways").iterdir()] == ["desk+tower.json"]


def test_other_interfaces_are_not_known_and_the_older_ones_are(tmp_path: Path) -> None:
    known = KnownWays(tmp_path / "ways")
    known.keep("desk", "tower", [CABLE], [way(CABLE)])
    assert known.find("desk", "tower", [CABLE, WIRELESS]) == {}
    assert known.find_older("desk", "tower") == {CABLE: way(CABLE)}


def test_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    known = KnownWays(tmp_path / "ways")
    (tmp_path / "ways" / "desk+tower.json").write_text('{"wires": 1}', encoding="utf-8")
    assert known.find_older("desk", "tower") == {}


def test_a_file_that_cannot_be_written_is_no_error_and_leaves_nothing(tmp_path: Path) -> None:
    known = KnownWays(tmp_path / "ways")
    (tmp_path / "ways" / "desk+tower.json").mkdir()
    known.keep("desk", "tower", [CABLE], [way(CABLE)])
    assert known.find_older("desk", "tower") == {}
    assert [path.name for path in (tmp_path / "ways").iterdir()] == ["desk+tower.json"]


def test_r15_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ways").mkdir()
    (tmp_path / "ways").chmod(0o755)
    with pytest.raises(UsageError):
        KnownWays(tmp_path / "ways")
