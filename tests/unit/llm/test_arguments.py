"""What the arguments of `LLM` become before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config.engine import EngineConfig
from penstock.errors import NotEnoughMemoryError, UsageError
from penstock.hosts.local import LocalHost
from penstock.hosts.resources import HostResources
from penstock.llm import arguments
from penstock.llm.arguments import engine_config, settled

SMALL_HEAD = HostResources(num_cpus=2, cpus=(0, 1), free_bytes=1 << 20, num_gpus=1)
TWO_HOSTS: dict[str, Any] = {"hosts": 2, "listen_workers": "127.0.0.1:7700"}


@pytest.fixture(autouse=True)
def small_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host has no room for the model of the package."""
    monkeypatch.setattr(arguments, "LocalHost", lambda: LocalHost(detect=lambda: SMALL_HEAD))


def config_of(tmp_path: Path, backend: str = "mp", **given: Any) -> EngineConfig:
    token = {"join_token_file": str(tmp_path / "token")} if given.get("hosts", 1) > 1 else {}
    return engine_config({"model": "demo", "seed": 0, "pipeline_parallel_size": 2} | token | given, backend)


@pytest.mark.parametrize(
    ("backend", "given"),
    [
        ("mp", TWO_HOSTS),
        ("ray", {"hosts": 2}),
        ("ssh_hosts:SshHosts", {}),
        ("mp", TWO_HOSTS | {"partition": "auto"}),
        ("mp", TWO_HOSTS | {"pin_threads": "on", "threads_per_rank": 2}),
        ("mp", TWO_HOSTS | {"device": "cuda", "tensor_parallel_size": 2}),
        ("mp", TWO_HOSTS | {"kv_host_bytes": 1000}),
    ],
    ids=str,
)
def test_r15_what_other_hosts_have_room_for_is_not_asked_of_this_one(
    tmp_path: Path, backend: str, given: dict[str, Any]
) -> None:
    config = config_of(tmp_path, backend, **given)
    same, plan = settled(config)
    assert same == config, "the supervisor measures the stages where they run"
    assert (plan.core.max_model_len, plan.core.vocab_size) == (2048, plan.spec.vocab_size)


def test_a_model_without_room_on_the_only_host_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughMemoryError):
        settled(config_of(tmp_path))


def test_r15_threads_of_this_process_run_on_no_other_host(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run on this host alone") as refused:
        settled(config_of(tmp_path, "inprocess", **TWO_HOSTS))
    assert refused.value.param == "hosts"
