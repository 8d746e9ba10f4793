"""Which hosts an executor backend makes, and which ones are refused by their name (row I2)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.config.engine import EngineConfig, ModelConfig, ParallelConfig
from penstock.config.executor_backend import require_backend
from penstock.errors import UsageError
from penstock.hosts.launchers.backends import open_hosts
from penstock.hosts.launchers.engine_hosts import OneHost, Voices

MODULE = '''
from penstock.hosts.launchers.engine_hosts import OneHost

class Own(OneHost):
    """An executor of a user's own."""

    supports_pp = True

    def __init__(self, engine, voices):
        super().__init__()
        voices.tell(f"{engine.model.model} on hosts of my own")

class OneStage(Own):
    supports_pp = False

def no_hosts(engine, voices):
    return "none"

no_hosts.supports_pp = True
number = 3
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that a user has written."""
    (tmp_path / "own_executors.py").write_text(MODULE)
    (tmp_path / "broken_executors.py").write_text("import no_such_module_of_anybody\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_executors"


def engine_of(backend: str, num_stages: int = 2) -> EngineConfig:
    parallel = ParallelConfig(backend=backend, pipeline_parallel_size=num_stages)
    return EngineConfig(model=ModelConfig(model="demo"), parallel=parallel)


def test_i2_a_class_of_the_users_own_makes_the_hosts(own: str) -> None:
    told: list[str] = []
    hosts = open_hosts(engine_of(f"{own}:Own"), Voices(told.append, told.append))
    assert isinstance(hosts, OneHost)
    assert told == ["demo on hosts of my own"]
    hosts.close()


def test_i2_a_class_that_runs_no_pipelines_serves_one_stage_alone(own: str) -> None:
    name = f"{own}:OneStage"
    open_hosts(engine_of(name, num_stages=1), Voices(print, print)).close()
    with pytest.raises(UsageError, match=rf"'{name}' does not support pipelines .* --pp is 2") as caught:
        open_hosts(engine_of(name), Voices(print, print))
    assert "mp, ray, or MODULE:CLASS" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no_executors:Own", "'no_executors:Own' cannot be imported: "),
        ("broken_executors:Own", "No module named 'no_such_module_of_anybody'"),
        ("own_executors:Other", "the module own_executors has no class 'Other' for an executor backend"),
        ("own_executors:number", "has no class 'number'"),
        ("own_executors:no_hosts", "makes str, which has no 'gather'"),
    ],
)
def test_i2_a_class_that_cannot_be_used_is_named_with_what_is_wrong(own: str, name: str, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)) as caught:
        open_hosts(engine_of(name), Voices(print, print))
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["mp", "ray", "package.module:Class"])
def test_i2_the_backends_of_the_command_line(name: str) -> None:
    assert require_backend(name) == name


@pytest.mark.parametrize(
    "name", ["", "dask", "inprocess", "module:", ":Class", "a b:C", "module.Class", "m:C:D"]
)
def test_i2_an_unknown_backend_is_refused_by_its_name_with_the_list(name: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"distributed_executor_backend is {name!r}")) as caught:
        require_backend(name)
    assert caught.value.remedy == "Use mp, ray, or MODULE:CLASS."


def test_i2_ray_that_is_not_installed_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(name: str, *_: Any) -> None:
        return None

    monkeypatch.setattr("importlib.util.find_spec", nothing)
    from penstock.config.hosts import HostsConfig

    parallel = ParallelConfig(backend="ray", pipeline_parallel_size=2)
    engine = EngineConfig(model=ModelConfig(model="demo"), parallel=parallel, cluster=HostsConfig(hosts=2))
    with pytest.raises(UsageError, match="ray is not installed") as caught:
        open_hosts(engine, Voices(print, print))
    assert "penstock[ray]" in caught.value.remedy
