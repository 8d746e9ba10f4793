"""Devices as `--devices` and its file describe them, and what is said of those that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.layouts.device_file import devices_of
from penstock.layouts.device_text import parse_devices
from penstock.layouts.devices import GIB


def test_i6_a_known_device_has_the_figures_of_its_data_sheet() -> None:
    devices = parse_devices("a100-80g:4")
    (host,) = devices.hosts
    assert (host.name, len(host.devices), devices.num_devices) == ("host0", 4, 4)
    device = host.devices[0]
    assert (device.kind, device.memory_bytes, device.type) == ("a100-80g", 80 * GIB, "cuda")
    assert (device.read_bytes_per_s, device.flops_per_s) == (2039e9, 312e12)
    assert (host.link.kind, host.link.bytes_per_s) == ("nvlink", 600e9)
    assert parse_devices("A100:4").hosts[0].devices == host.devices


def test_i6_a_cpu_is_what_its_notes_say() -> None:
    (host,) = parse_devices("cpu:16c:64g@40GB/s").hosts
    (device,) = host.devices
    assert (device.cores, device.memory_bytes, device.read_bytes_per_s) == (16, 64 * GIB, 40e9)
    assert (device.type, host.link.kind) == ("cpu", "memory")


def test_i6_notes_change_what_is_known() -> None:
    slow, fast = parse_devices("a100:2:pcie, h100:8x2:nvlink=450GB/s@100Gbit@5us").hosts[:2]
    assert slow.link.kind == "pcie"
    assert (fast.link.bytes_per_s, fast.link.is_nvlink) == (450e9, True)
    assert fast.network.bytes_per_s == 12.5e9
    assert fast.network.latency_s == pytest.approx(5e-6)
    (host,) = parse_devices("gpu:24g@1000GB/s:160tflops:2").hosts
    assert [device.memory_bytes for device in host.devices] == [24 * GIB] * 2
    (mixed,) = parse_devices("rtx4090+cpu:8c:32g").hosts
    assert ([device.type for device in mixed.devices], mixed.link.kind) == (["cuda", "cpu"], "pcie")
    assert not mixed.is_uniform


def test_i6_hosts_are_joined_by_the_slower_network_or_their_own_link(tmp_path: Path) -> None:
    devices = parse_devices("h100:8x2@100Gbit,rtx4090@1Gbit@2ms")
    assert [host.name for host in devices.hosts] == ["host0", "host1", "host2"]
    assert devices.link_between("host0", "host1").bytes_per_s == 12.5e9
    assert devices.link_between("host2", "host0").bytes_per_s == 125e6
    assert devices.link_between("host2", "host0").latency_s == pytest.approx(2e-3)
    assert devices.link_between("host0", "host0").is_nvlink
    assert not devices.is_uniform
    assert parse_devices("h100:8x2").is_uniform
    path = tmp_path / "hosts.toml"
    path.write_text(
        '\ufeff[[host]]\nname = "desk"\ndevices = "rtx4090:2"\n'
        '[[host]]\nname = "attic"\ndevices = "cpu:4c:8g"\n'
        '[[link]]\nhosts = ["attic", "desk"]\nrate = "1Gbit"\nlatency = "5ms"\n'
    )
    link = devices_of(str(path)).link_between("desk", "attic")
    assert (link.kind, link.bytes_per_s) == ("network", 125e6)
    assert link.latency_s == pytest.approx(5e-3)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is empty"),
        ("h100,,h100", "is empty"),
        ("h101:4", "'h101' is not a known device"),
        ("h100:0", "does not name a device"),
        ("h100:4x0", "does not name a device"),
        ("h100:4:8", "gives its number twice"),
        ("h100:nvlink:pcie", "gives its link twice"),
        ("h100:16c", "gives cores to a GPU"),
        ("h100:quick", "'quick' in 'h100:quick' is not a known property"),
        ("h100@0Gbit", "'0gbit' is zero"),
        ("h100:nvlink=fast", "is not a rate"),
        ("cpu", "needs its cores and its memory"),
        ("cpu:16c", "needs its cores and its memory"),
        ("cpu:16c:64g:nvlink", "is a CPU, which has no nvlink"),
        ("gpu:24g", "needs its memory, bandwidth and rate"),
        ("h100:8x2+cpu:8c:64g", "different numbers of hosts"),
        ("here,h100", "'here' cannot be combined"),
        ("h100:4097", "more than 4096"),
    ],
)
def test_i6_devices_that_cannot_be_read_are_refused_with_those_that_are_known(text: str, what: str) -> None:
    with pytest.raises(UsageError) as refused:
        devices_of(text)
    assert what in refused.value.message
    assert "a100-80g" in refused.value.remedy
    assert refused.value.param == "devices"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "missing required field"),
        ("host = []", "it has no host"),
        ("[[stage]]\ntp = 2", "unknown field"),
        ('[[host]]\nname = "a"\ndevices = "h100"\n' * 2, "the same name"),
        ('[[host]]\nname = "a"\ndevices = "h100:8x2"', "is several hosts"),
        ('[[host]]\nname = "a"\ndevices = "h100,t4"', "has a comma"),
        ('[[host]]\nname = "a"\ndevices = "h100"\n[[link]]\nhosts = ["a", "b"]\nrate = "1Gbit"', "joins a"),
        ("\x00", ""),
    ],
)
def test_i6_a_file_of_devices_that_is_wrong_is_refused_by_name(
    content: str, what: str, tmp_path: Path
) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(content)
    with pytest.raises(UsageError) as refused:
        devices_of(str(path))
    assert what in refused.value.message
    assert "hosts.toml" in refused.value.message


def test_i6_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        devices_of(str(tmp_path / "absent.toml"))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("host = " + 100_000 * "[", "recursion"),
        ('[[host]]\nname = "desk"\ndevices = "a100:9999"\n', "9999 devices are more than 4096"),
    ],
)
def test_i6_a_file_without_measure_is_refused(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=what):
        devices_of(str(path))
