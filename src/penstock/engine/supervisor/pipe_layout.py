"""Decides where the ranks of a pipeline run, from epoch to epoch: on the same hosts as before, or on others.

A lost host is waited for (`host_choice`). If it does not come back, all stages are placed anew over the hosts
that are connected, if memory allows (`stage_spread`). `launch` then plans for these hosts as at a start.
Ranks that keep their host, device and threads go on; the others are started again. This module decides, and
starts nothing. Used by `engine.supervisor.pipeline_processes`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import msgspec

from penstock.batch import RankLoaded
from penstock.config.engine import CacheConfig, EngineConfig, ParallelConfig
from penstock.config.speculation import SpeculationConfig
from penstock.engine.supervisor.class_choice import has_class
from penstock.engine.supervisor.host_blocks import host_tier_bytes
from penstock.engine.supervisor.host_choice import HostChoice
from penstock.engine.supervisor.launch import LaunchPlan, resolve_replicas
from penstock.engine.supervisor.placement import replicas_beside
from penstock.engine.supervisor.stage_spread import HostRoom, StageDemand, spread
from penstock.engine.supervisor.told_hosts import ToldHosts
from penstock.errors import ErrorInfo, HostMissingError, PenstockError, describe
from penstock.families.spec import ITEM_SIZES
from penstock.hosts.member import Member
from penstock.hosts.rank_host import Hosts
from penstock.hosts.resources import HostResources
from penstock.kernels.cpu.targets import AUTO
from penstock.process.config import RankConfig


class Settlement(NamedTuple):
    """The decision on which hosts the next epoch of a pipeline runs, or that it cannot begin yet.

    Attributes:
        is_settled: the epoch can begin, as `PipeLayout.plan` says.
        notes: sentences for the user.
        refusal: why the pipeline cannot run on the hosts that are connected now; None if it can run there,
            or if a lost host is still waited for.
    """

    is_settled: bool
    notes: Sequence[str] = ()
    refusal: ErrorInfo | None = None


class PipeLayout:
    """The layout of one pipeline: on which host, device and threads each rank runs, from epoch to epoch.

    Args:
        plan: launch plan of the first epoch.
        hosts: all hosts; more may join later.
        config: config from which the plan was made.
        clock: monotonic seconds.

    Attributes:
        plan: launch plan of the present epoch, or of the next epoch once that is settled.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        hosts: Hosts,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self._hosts = hosts
        self._config = config
        self._clock = clock
        own = {rank.host for rank in plan.ranks}
        names = [name for name in hosts if name in own]
        self._choice = HostChoice(names, config.cluster.rejoin_timeout_s, of_others=set(hosts) - own)
        num_replicas = config.parallel.data_parallel_size
        self._beside = replicas_beside(plan.core.replica or 0, num_replicas, len(hosts))
        self._spare_hosts: set[str] = set()  # connected hosts without stages of this pipeline
        self._awaited: tuple[str, ...] = ()  # lost hosts; the user was told that they are waited for
        self._refused: tuple[str, ...] = ()  # lost hosts; the user was told that others cannot take over
        self._told = ToldHosts(hosts, clock)

    def look(self) -> list[str]:
        """Record which hosts are connected.

        Returns sentences for the user if more hosts are there now. To be called each second.
        """
        there = self._hosts.names_there
        self._choice.look(there, self._clock())
        spare = set(there) - set(self._choice.laid_over)
        new = sorted(spare - self._spare_hosts)
        self._spare_hosts = spare
        able = self._of_the_class(new)
        notes = [f"{_listed(able)} can take stages from the next epoch on."] if able else []
        wanted = self._config.parallel.numeric_class
        unable = [name for name in new if name not in able]
        return notes + [
            f"{name} can take no stages: it does not support --numeric-class {wanted}." for name in unable
        ]

    def tell(self, core: Member) -> None:
        """Send the core what has changed about its stages' hosts; to be called each second in service."""
        self._told.tell(core, self.plan)

    def settle(self, loaded: Mapping[int, RankLoaded], living: Set[int]) -> Settlement:
        """Decide on which hosts the next epoch runs; to be called again until that is settled.

        If these are not the hosts of the last epoch, `plan` is replaced.

        Args:
            loaded: by the number of a rank, what it reported when it had loaded.
            living: numbers of the ranks that still hold their weights.
        """
        names = self._choice.next_hosts(self._of_the_class(self._hosts.names_there), self._clock())
        if not names:
            return self._wait()
        if names == self._choice.laid_over:
            self._awaited = self._refused = ()
            return Settlement(is_settled=True)
        missing = self._choice.missing
        try:
            notes = self._lay_over(names, loaded, living)
        except (PenstockError, OSError) as error:
            # If no host is missing, hosts that came back were to take stages; it can also go on as before.
            return self._refuse(missing, names, describe(error)) if missing else Settlement(is_settled=True)
        self._awaited = self._refused = ()
        return Settlement(is_settled=True, notes=notes)

    def _of_the_class(self, names: Sequence[str]) -> list[str]:
        """Return those of these hosts that can compute in the class of `--numeric-class`."""
        parallel = self._config.parallel
        if parallel.numeric_class == AUTO:
            return list(names)
        return [name for name in names if has_class(parallel, self._hosts[name].resources())]

    def _wait(self) -> Settlement:
        """Return a settlement that waits for a host, with a note to the user once for each loss."""
        missing = self._choice.missing
        if self._awaited == missing:
            return Settlement(is_settled=False)
        self._awaited = missing
        limit_s = self._config.cluster.rejoin_timeout_s
        note = (
            f"waiting for {self._with_stages(missing)}, {limit_s:g} s at most (--rejoin-timeout); then the "
            "other hosts take over if they have the memory."
        )
        return Settlement(is_settled=False, notes=[note])

    def _refuse(self, missing: Sequence[str], names: Sequence[str], error: ErrorInfo) -> Settlement:
        """Return a settlement in which no connected host can take over, with a note once for each loss."""
        refusal = HostMissingError(
            f"the pipeline waits for {self._with_stages(missing)}; {_listed(names)} cannot take over: "
            f"{error.message}",
            remedy=f"Start `penstock worker` on {_listed(missing)} again to continue. {error.remedy}",
            stage=min((rank.stage for rank in self.plan.ranks if rank.host in missing), default=None),
        )
        is_new, self._refused = self._refused != tuple(missing), tuple(missing)
        notes = [f"{refusal.message} {refusal.remedy}"] if is_new else []
        return Settlement(is_settled=False, notes=notes, refusal=refusal.info())

    def _with_stages(self, missing: Sequence[str]) -> str:
        """Return text such as "the host desk (stage 1)"."""
        stages = sorted({rank.stage for rank in self.plan.ranks if rank.host in missing})
        hosts, numbers = "host" + "s" * (len(missing) > 1), "stage" + "s" * (len(stages) > 1)
        return f"the {hosts} {_listed(missing)} ({numbers} {_listed(map(str, stages))})"

    def _lay_over(
        self, names: Sequence[str], loaded: Mapping[int, RankLoaded], living: Set[int]
    ) -> list[str]:
        """Change the plan to one over these hosts, and return sentences on what has changed.

        Raises:
            NotEnoughMemoryError: the stages do not fit on these hosts.
            PenstockError, OSError: what `launch.resolve_replicas` raises.
        """
        before = {rank.stage: rank.host for rank in self.plan.ranks}
        demands = [self._demand(stage, names, loaded, living) for stage in before]
        given = {name: self._hosts[name].resources() for name in names}
        after = spread(demands, [self._room(host) for host in given.values()])
        homes = {name: self._with_held(host, demands) for name, host in given.items()}
        missing = self._choice.missing
        self.plan = self._planned([homes[name] for name in after])
        self._choice.lay_over([name for name in names if name in after])
        moves = [
            f"stage {stage} goes to {home}"
            for (stage, host), home in zip(before.items(), after, strict=True)
            if host != home
        ]
        reason = f"without {_listed(missing)}: " if missing else ""
        return [f"{reason}{', '.join(moves)}."] if moves else []

    def _room(self, host: HostResources) -> HostRoom:
        """Return a host's room for this pipeline, a share: all replicas there may look for room at once."""
        share = host.free_bytes // len(self._beside)
        return HostRoom(name=host.name, free_bytes=share, num_gpus=host.num_gpus)

    def _with_held(self, host: HostResources, demands: Sequence[StageDemand]) -> HostResources:
        """Return a host with the memory that it would have without our weights, which a plan counts anew."""
        held_bytes = sum(demand.held_bytes for demand in demands if demand.host == host.name)
        free_bytes = host.free_bytes + len(self._beside) * held_bytes
        return msgspec.structs.replace(host, free_bytes=free_bytes)

    def _demand(
        self, stage: int, names: Sequence[str], loaded: Mapping[int, RankLoaded], living: Set[int]
    ) -> StageDemand:
        """Return the memory that a stage needs, by what its ranks reported when they had loaded."""
        num_blocks = min((message.max_blocks for message in loaded.values()), default=0)
        ranks = {number: rank for number, rank in enumerate(self.plan.ranks) if rank.stage == stage}
        on_cpu = [number for number, rank in ranks.items() if rank.device_type == "cpu" and number in loaded]
        weights = {number: loaded[number].tensor_bytes for number in on_cpu}
        whole = {number: weights[number] + num_blocks * loaded[number].block_bytes for number in on_cpu}
        tiers = {number: self._tier_bytes(rank) for number, rank in ranks.items()}
        host = next(rank.host for rank in ranks.values())
        return StageDemand(
            host=host if host in names else "",
            num_bytes=sum(whole.values()) + sum(tiers.values()),
            held_bytes=sum(weights[number] for number in on_cpu if number in living),
            missing_bytes=sum(
                whole.get(number, 0) + tiers[number] for number in ranks if number not in living
            ),
            growth_bytes=sum(tiers[number] for number in ranks if number in living),
            num_gpus=sum(rank.device_type != "cpu" for rank in ranks.values()),
        )

    def _tier_bytes(self, rank: RankConfig) -> int:
        return host_tier_bytes(self.plan.spec, rank, ITEM_SIZES[rank.dtype])

    def _planned(self, homes: Sequence[HostResources]) -> LaunchPlan:
        """Return the present plan with ranks placed as at a start over these hosts, one for each stage."""
        config = self._config
        # Ranks keep their tiers of KV blocks from the start (`_placed_as`): nothing is decided anew here.
        # The files are those of the start, whatever the model's name means by now. A draft model runs on.
        config = msgspec.structs.replace(
            config,
            model=msgspec.structs.replace(config.model, model=self.plan.model_path),
            parallel=self._parallel_beside(config.parallel),
            cache=_without_tiers(config.cache),
            speculation=_without_draft_model(config.speculation),
        )
        head = self._hosts.head.resources()
        fresh = resolve_replicas(config, [head, *homes], homes)[
            self._beside.index(self.plan.core.replica or 0)
        ]
        ranks = [_placed_as(rank, own) for rank, own in zip(self.plan.ranks, fresh.ranks, strict=True)]
        core = msgspec.structs.replace(self.plan.core, cpus=fresh.core.cpus)
        return msgspec.structs.replace(self.plan, ranks=ranks, core=core)

    def _parallel_beside(self, parallel: ParallelConfig) -> ParallelConfig:
        """Return the settings of the replicas on the same hosts alone: they share threads and GPUs."""
        num_ranks = len(self.plan.ranks)
        own = [replica * num_ranks + rank for replica in self._beside for rank in range(num_ranks)]
        # A stage stays on the type of device that it has computed on, which decides its numbers.
        devices = [rank.device_type for rank in self.plan.ranks] * len(self._beside)
        if parallel.device != "auto":
            devices = [parallel.rank_devices[rank] for rank in own]
        threads = parallel.rank_threads
        return msgspec.structs.replace(
            parallel,
            data_parallel_size=len(self._beside),
            device=",".join(devices),
            threads_per_rank=None if threads is None else [threads[rank] for rank in own],
        )


def _placed_as(rank: RankConfig, other: RankConfig) -> RankConfig:
    """Return the config of `rank` with the place of `other`: host, device, threads, cores, and its links."""
    return msgspec.structs.replace(
        rank,
        host=other.host,
        device=other.device,
        threads=other.threads,
        cpus=other.cpus,
        link_frames=other.link_frames,
    )


def _without_tiers(cache: CacheConfig) -> CacheConfig:
    return msgspec.structs.replace(cache, kv_store=None, kv_host_bytes=0, kv_store_policy="write-through")


def _without_draft_model(speculation: SpeculationConfig) -> SpeculationConfig:
    """Return the settings without a draft model: it runs beside the core already, and stays there."""
    if speculation.speculative_model is None:
        return speculation
    return SpeculationConfig(speculative_method="off")


def _listed(words: Iterable[str]) -> str:
    """Return text such as "a, b and c"."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
