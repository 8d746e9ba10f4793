"""`--partition auto` before `resolve`: what is measured, kept and decided; and real measuring processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from checkpoints import make_checkpoint
from disturbed import started_processes
from fakes import FakeClock
from penstock.config.engine import (
    PARTITION_VARIABLE,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from penstock.engine.supervisor import auto_partition, measuring
from penstock.engine.supervisor.auto_partition import measure_configs, settle_partition
from penstock.engine.supervisor.launch import resolve
from penstock.engine.supervisor.measuring import measure
from penstock.engine.supervisor.reports import Event, Notice, PartitionChosen, event_line
from penstock.errors import (
    CheckpointError,
    NotEnoughMemoryError,
    StageLostError,
    UsageError,
    WaitTimeoutError,
)
from penstock.hosts import local
from penstock.hosts.local import LocalHost
from penstock.hosts.local_process import LocalMember, spawn
from penstock.hosts.rank_host import Hosts
from penstock.hosts.resources import HostResources
from penstock.planner.mix import Mix
from penstock.planner.stage_costs import StageCosts, StepCosts
from penstock.process.child import Measured, Ready
from penstock.process.config import MeasureConfig
from stand_in_hosts import StandInHost

HOST = HostResources(num_cpus=2, free_bytes=8 << 30, num_gpus=0, cpus=(0, 1))
HOSTS = Hosts(LocalHost(lambda: HOST))
LOAD_S = 3600.0


class Events:
    """Remembers what was reported."""

    def __init__(self) -> None:
        self.all: list[Event] = []

    def report(self, event: Event) -> None:
        self.all.append(event)


class FakeMeasuring:
    """Stands for the processes: stage 0 is three times as slow as the others."""

    def __init__(self) -> None:
        self.calls: list[Sequence[MeasureConfig]] = []

    def __call__(
        self, configs: Sequence[MeasureConfig], hosts: Hosts, load_timeout_s: float
    ) -> list[StageCosts]:
        self.calls.append(configs)
        return [_costs(3.0 if config.rank.is_first else 1.0) for config in configs]


def _costs(layer_s: float) -> StageCosts:
    step = StepCosts(num_tokens=1, layer_s=layer_s, fixed_s=0.0, embed_s=0.0, head_s=0.0, link_s=0.0)
    return StageCosts(
        decode=[step],
        prefill=step,
        layer_bytes=1 << 20,
        end_bytes=0,
        kv_block_bytes=1 << 12,
        block_size=32,
        available_bytes=0,
        num_sharers=2,
        has_kernels=True,
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeMeasuring:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    made = FakeMeasuring()
    monkeypatch.setattr(auto_partition, "measure", made)
    return made


def engine(model: str = "demo", **parallel: object) -> EngineConfig:
    values = {"pipeline_parallel_size": 2, "partition": "auto"} | parallel
    return EngineConfig(model=ModelConfig(model=model), parallel=ParallelConfig(**values))


# --- What is decided ---------------------------------------------------------------------------------------


def test_d5_numbers_stand_in_place_of_auto(fake: FakeMeasuring) -> None:
    events = Events()
    settled = settle_partition(engine(), HOSTS, events)
    assert settled.parallel.partition == "1,5"
    assert [(rank.start_layer, rank.end_layer) for rank in resolve(settled, [HOST]).ranks] == [(0, 1), (1, 6)]
    chosen = events.all[-1]
    assert isinstance(chosen, PartitionChosen)
    assert chosen.layers == [1, 5]
    assert event_line(chosen).startswith("partition 1,5: ")
    assert event_line(chosen).count("\n") == len(chosen.table) - 1


def test_costs_are_measured_once_and_kept(fake: FakeMeasuring, tmp_path: Path) -> None:
    first, second = Events(), Events()
    settle_partition(engine(), HOSTS, first)
    settle_partition(engine(), HOSTS, second)
    assert len(fake.calls) == 1
    texts = [event.text for event in first.all if isinstance(event, Notice)]
    assert texts[0] == "measuring 2 stages to choose the partition."
    assert str(tmp_path / "cache" / "partition") in texts[1]
    assert [event.text for event in second.all if isinstance(event, Notice)] == texts[1:]
    for path in (tmp_path / "cache" / "partition").iterdir():
        path.unlink()
    settle_partition(engine(), HOSTS, Events())
    settle_partition(engine(threads_per_rank="2,1"), HOSTS, Events())
    assert len(fake.calls) == 3


def workers(**models: str) -> Hosts:
    """A head and workers that differ in nothing but the model of their CPU."""
    own = {name: msgspec.structs.replace(HOST, cpu_model=model) for name, model in models.items()}
    return Hosts(
        LocalHost(lambda: HOST), *(LocalHost(partial(own.__getitem__, name), name=name) for name in own)
    )


def test_g1_costs_are_measured_again_with_other_hosts_or_in_another_order(fake: FakeMeasuring) -> None:
    config = engine(pipeline_parallel_size=3)
    for hosts, count in (
        (workers(attic="Xeon", cellar="EPYC"), 1),
        (workers(garden="Xeon", shed="EPYC"), 1),  # other names of the same machines, for all that is known
        (workers(cellar="EPYC", attic="Xeon"), 2),
        (workers(attic="Xeon", cellar="Core"), 3),
        (workers(attic="Xeon", cellar="Xeon"), 4),
        (workers(cellar="Xeon", attic="Xeon"), 5),
        (workers(attic="Xeon", cellar="EPYC"), 5),
    ):
        settle_partition(config, hosts, Events())
        assert len(fake.calls) == count


@pytest.mark.parametrize(
    "parallel", [{"partition": "even"}, {"partition": "5,1"}, {"pipeline_parallel_size": 1}]
)
def test_other_policies_and_one_stage_measure_nothing(
    fake: FakeMeasuring, parallel: dict[str, object]
) -> None:
    config, events = engine(**parallel), Events()
    assert settle_partition(config, HOSTS, events) is config
    assert (fake.calls, events.all) == ([], [])
    resolve(config, [HOST])


def test_the_variable_overrides_the_default_policy_only(
    fake: FakeMeasuring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PARTITION_VARIABLE, "5,1")
    assert settle_partition(engine(), HOSTS, Events()).parallel.partition == "1,5"
    config = engine(partition="even").with_partition_of(os.environ)
    assert resolve(config, [HOST]).ranks[0].end_layer == 5


def test_a_bad_mix_is_refused_whatever_the_policy(fake: FakeMeasuring) -> None:
    with pytest.raises(UsageError, match="partition_mix is"):
        settle_partition(engine(partition="even", partition_mix="much"), HOSTS, Events())


def test_more_stages_than_layers_are_refused_before_anything_is_measured(fake: FakeMeasuring) -> None:
    with pytest.raises(UsageError, match="more than the model's 6 layers"):
        settle_partition(engine(pipeline_parallel_size=7), HOSTS, Events())
    assert fake.calls == []


def test_d16_the_memory_of_the_host_counts_as_it_is_now(fake: FakeMeasuring) -> None:
    tight = HostResources(num_cpus=2, free_bytes=7 << 20, num_gpus=0)
    with pytest.raises(NotEnoughMemoryError, match="no split of 6 layers over 2 stages"):
        settle_partition(engine(), Hosts(LocalHost(lambda: tight)), Events())


# --- What is measured --------------------------------------------------------------------------------------


def configs(
    host: HostResources = HOST, mix: str = "512:128", *, num_stages: int = 3, **scheduler: int
) -> list[MeasureConfig]:
    config = EngineConfig(
        model=ModelConfig(model="demo"),
        parallel=ParallelConfig(pipeline_parallel_size=num_stages, tied_head="transfer", async_depth=1),
        scheduler=SchedulerConfig(**scheduler),
    )
    return measure_configs(resolve(config, [host]), config.scheduler.prefill_chunk, Mix.parse(mix), [host])


def test_every_rank_times_its_own_end_of_the_model() -> None:
    ranks = [config.rank for config in configs()]
    assert [(rank.start_layer, rank.end_layer) for rank in ranks] == [(0, 4), (1, 5), (2, 6)]
    assert {(rank.tied_head, rank.depth, rank.link_frames) for rank in ranks} == {("load", 1, 1)}
    assert [(rank.is_first, rank.is_last) for rank in ranks] == [(True, False), (False, False), (False, True)]


def test_few_layers_are_timed_where_memory_is_short() -> None:
    little = HostResources(num_cpus=2, free_bytes=6 << 20, num_gpus=0)
    assert [(c.rank.start_layer, c.rank.end_layer) for c in configs(little)] == [(0, 1), (1, 2), (5, 6)]


def test_the_cases_are_those_that_the_search_will_ask_for() -> None:
    config = configs(max_num_seqs=200, prefill_chunk=100)[0]
    assert config.num_rows == [1, 4, 8, 16, 32, 64, 66]
    assert (config.context, config.prefill_tokens) == (576, 100)
    assert configs(max_num_seqs=2)[0].num_rows == [1]
    assert configs(max_num_seqs=12)[0].num_rows == [1, 4]
    assert configs(mix="0:128")[0].prefill_tokens == 1
    assert configs(mix="50:20")[0].context == 60


# --- Real processes ----------------------------------------------------------------------------------------


def quick(model: str = "demo") -> list[MeasureConfig]:
    """Two ranks in plain torch, timed as briefly as can be."""
    config = engine(model, partition="even", threads_per_rank=1, kernels="off", pin_threads="off")
    made = measure_configs(resolve(config, [HOST]), 16, Mix(8, 4), [HOST])
    return [msgspec.structs.replace(config, case_s=0.0, num_rows=[1, 4]) for config in made]


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No process and no descriptor, whatever happened."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert started_processes() == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("nothing_is_left")
def test_d5_the_ranks_are_measured_on_their_own_device() -> None:
    first, last = measure(quick(), HOSTS, LOAD_S)
    for own in (first, last):
        assert [step.num_tokens for step in own.decode] == [1, 4]
        assert own.prefill.num_tokens == 8
        assert all(step.layer_s > 0 and step.fixed_s > 0 and step.link_s > 0 for step in own.decode)
        assert (own.block_size, own.num_sharers) == (32, 2)
        assert own.available_bytes > 0
    assert all(step.embed_s > 0 and step.head_s == 0 for step in first.decode)
    assert all(step.head_s > 0 and step.embed_s == 0 for step in last.decode)
    assert first.layer_bytes == last.layer_bytes
    embedding, norm = 1024 * 192 * 2, 192 * 2
    assert (first.end_bytes, last.end_bytes) == (embedding, embedding + norm)


@pytest.mark.usefixtures("nothing_is_left")
def test_a_rank_that_cannot_load_says_why(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, layers=4)
    (model / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        measure(quick(str(model)), HOSTS, LOAD_S)


@pytest.mark.usefixtures("nothing_is_left")
def test_a_rank_that_dies_without_a_word_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn_and_kill(*arguments: Any, **options: Any) -> LocalMember:
        child = spawn(*arguments, **options)
        if child.stage == 1:
            child.kill_now()
        return child

    monkeypatch.setattr(local, "spawn", spawn_and_kill)
    with pytest.raises(StageLostError, match=r"the measuring of stage 1 .* was killed by signal 9") as caught:
        measure(quick(), HOSTS, LOAD_S)
    assert caught.value.stage == 1


class SlowHost(StandInHost):
    """A host whose ranks load and measure for so long. Each look takes 10 s of its clock."""

    def __init__(self, load_s: float, measure_s: float) -> None:
        super().__init__("desk", "ring")
        self.clock = FakeClock()
        self._load_s, self._measure_s = load_s, measure_s

    def tend(self, now: float) -> None:
        self.clock.advance(10.0)
        passed_s = now - 100.0
        for member in self.members:
            if not member.is_ready and passed_s >= self._load_s:
                member.say(Ready())
            elif member.handed and member.exit_code is None and passed_s >= self._load_s + self._measure_s:
                member.say(Measured(costs=msgspec.Raw(msgspec.json.encode(_costs(1.0)))))
                member.leave(0)


def measured_at(host: SlowHost, monkeypatch: pytest.MonkeyPatch) -> list[StageCosts]:
    monkeypatch.setattr(measuring, "LOOK_S", 0.0)
    configs = [
        msgspec.structs.replace(config, rank=msgspec.structs.replace(config.rank, host="desk"))
        for config in quick()
    ]
    with contextlib.closing(Hosts(host)) as hosts:
        return measure(configs, hosts, LOAD_S, host.clock)


def test_measuring_has_its_time_once_all_have_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    host = SlowHost(load_s=LOAD_S - 50.0, measure_s=measuring.TIMEOUT_S - 50.0)
    assert len(measured_at(host, monkeypatch)) == 2


def test_ranks_to_be_measured_may_load_for_as_long_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        WaitTimeoutError, match="stage 0 and the measuring of stage 1 had not loaded"
    ) as caught:
        measured_at(SlowHost(load_s=LOAD_S + 50.0, measure_s=0.0), monkeypatch)
    assert "after 3600 s" in str(caught.value)
    assert "Raise --load-timeout" in caught.value.remedy


def test_measuring_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    host = SlowHost(load_s=LOAD_S - 50.0, measure_s=measuring.TIMEOUT_S + 50.0)
    with pytest.raises(WaitTimeoutError, match="could not be measured in 900 s") as caught:
        measured_at(host, monkeypatch)
    assert "Set the layers of each stage with --partition" in caught.value.remedy
