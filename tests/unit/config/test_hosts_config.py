"""The settings of an engine over several hosts: addresses, names, and what must be given together."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import __version__
from penstock.config.engine import EngineConfig, ModelConfig, ParallelConfig
from penstock.config.hosts import (
    HostsConfig,
    own_host_name,
    parse_address,
    state_directory,
)
from penstock.errors import UsageError
from penstock.trust.peer_names import HOST_NAME

JOINING: dict[str, Any] = {"listen_workers": "10.0.0.1:7700", "join_token_file": "/token"}


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:7701", ("10.0.0.1", 7701)),
        ("tower", ("tower", 7700)),
        (" tower.local:1 ", ("tower.local", 1)),
        ("[fd00::1]:65535", ("fd00::1", 65535)),
        ("[::1]", ("::1", 7700)),
    ],
)
def test_g1_an_address_is_a_host_and_perhaps_a_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, "--join") == address


@pytest.mark.parametrize(
    "text", ["", ":7700", "fd00::1", "tower:", "tower:0", "tower:65536", "[::1]:x", "a:b:1"]
)
def test_g1_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"--join .* is not an address") as caught:
        parse_address(text, "--join")
    assert "10.0.0.1:7700" in caught.value.remedy


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"hosts": 0}, "hosts is 0; it must be at least 1"),
        ({**JOINING, "hosts": 2, "join_token_ttl_s": 0.0}, "join_token_ttl_s is 0"),
        ({"rejoin_timeout_s": 0.0}, "rejoin_timeout_s is 0"),
        ({**JOINING, "hosts": 2, "listen_workers": "x:y"}, "--listen-workers 'x:y' is not an address"),
        (JOINING, "--hosts is 1"),
        ({"ray": '{"placement": "wide"}'}, '--ray \'{"placement": "wide"}\' cannot be read'),
        ({"ray": '{"resources": {"GPU": 0}}'}, "an amount of a resource must be above 0"),
        ({"ray": '{"nodes": 2}'}, "unknown field `nodes`"),
    ],
)
def test_g1_settings_that_do_not_go_together_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        HostsConfig(**given)


@pytest.mark.parametrize(
    ("given", "missing"),
    [({"hosts": 2}, "--listen-workers"), ({"hosts": 2, "listen_workers": "x"}, "--join-token-file")],
)
def test_i2_where_no_launcher_starts_workers_a_user_must_say_where_they_join(
    given: dict[str, Any], missing: str
) -> None:
    cluster = HostsConfig(**given)
    model = ModelConfig(model="demo")
    with pytest.raises(UsageError, match=f"{missing} is not given"):
        EngineConfig(model=model, cluster=cluster)
    with_ray = EngineConfig(model=model, cluster=cluster, parallel=ParallelConfig(backend="ray"))
    assert with_ray.cluster == cluster


def test_i2_a_head_whose_workers_are_started_may_listen_at_any_free_port() -> None:
    assert parse_address("0.0.0.0:0", "--listen-workers") == ("0.0.0.0", 0)


def test_one_host_needs_none_of_it() -> None:
    assert HostsConfig().hosts == 1
    assert HostsConfig(**JOINING, hosts=3).hosts == 3


@pytest.mark.parametrize("machine", ["tower", "Anna's laptop", "-x-", "…", "a" * 80])
def test_g1_a_machine_has_a_name_that_a_certificate_can_carry(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: machine)
    assert HOST_NAME.fullmatch(own_host_name(""))
    assert own_host_name("desk") == "desk"


def test_r15_a_process_has_the_version_of_its_code_when_the_package_is_replaced_under_it() -> None:
    """A worker whose head comes later still has the old code: it is not trusted as a new one."""
    replaced = "from importlib import metadata; metadata.version = lambda name: '9.9.9'"
    command = f"from penstock.config import hosts; {replaced}; print(hosts.own_version())"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{__version__}\n"


def test_state_is_kept_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_directory(None) == tmp_path / "penstock"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_directory(None) == Path("~/.local/state/penstock").expanduser().resolve()
    assert state_directory(str(tmp_path / "x")) == tmp_path / "x"
