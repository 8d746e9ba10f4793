"""When the members of several replicas meet, and what is asked of hosts. With processes: tests/fault."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from fakes import FakeClock
from penstock.batch import RankLoaded
from penstock.config.engine import EngineConfig, ModelConfig, ParallelConfig
from penstock.config.hosts import HostsConfig
from penstock.engine.supervisor import pipeline_processes
from penstock.engine.supervisor.launch import resolve
from penstock.engine.supervisor.pipe_layout import PipeLayout
from penstock.engine.supervisor.pipeline_processes import PipelineProcesses, begin_together
from penstock.engine.supervisor.reports import (
    Caution,
    Event,
    Notice,
    Recovered,
    StageLoaded,
    StageLost,
    event_line,
)
from penstock.engine.supervisor.standbys import NO_STANDBYS, StandbyRanks
from penstock.errors import LinkClosedError, ModelConfigError, WaitTimeoutError
from penstock.hosts.member import Member
from penstock.hosts.member_watch import MemberWatch
from penstock.hosts.network.routes import DefaultRoutes
from penstock.hosts.rank_host import Hosts
from penstock.process.child import Abandoned, LinkExchanged, LinkJudged, Ready, TensorsRead, WeightsLoaded
from penstock.process.config import FirstLoad, RankConfig
from penstock.process.control import AttachLink, EpochLost, ExchangeLink, Stop
from penstock.process.endpoints import CoreEndpoints, RankEndpoints
from penstock.process.pipe_hosts import PipeHosts
from stand_in_hosts import LOADED, StandInEnd, StandInHost, StandInMember


@dataclass
class OneReplica:
    """Stands for `PipelineProcesses`."""

    have_loaded: bool = False
    num_begun: int = 0

    def begin(self) -> None:
        self.num_begun += 1


def test_i4_no_replica_begins_before_the_weights_of_all_are_in_memory() -> None:
    """It would size its KV cache by memory that another's weights are going to take."""
    first, second = OneReplica(have_loaded=True), OneReplica()
    replicas: list[Any] = [first, second]
    assert not begin_together(replicas)
    assert (first.num_begun, second.num_begun) == (0, 0)
    second.have_loaded = True
    assert begin_together(replicas)
    assert (first.num_begun, second.num_begun) == (1, 1)


# --- over hosts that a test plays ------------------------------------------------------------------


REJOIN_TIMEOUT_S = 20.0


class ReviewedRoutes(DefaultRoutes):
    """Notes when the ways between the hosts are looked at, for as long as a test likes.

    Attributes:
        are_known: whether it says that they are.
        occasions: of each question.
        names: of the hosts between which they are to be known.
    """

    def __init__(self) -> None:
        self.are_known = True
        self.occasions: list[object] = []
        self.names: set[str] = set()

    def is_settled(self, names: Collection[str]) -> bool:
        self.names.update(names)
        return self.are_known

    def review(self, occasion: object, names: Collection[str]) -> bool:
        self.occasions.append(occasion)
        return self.is_settled(names)


class Replica:
    """Core and first stage at one host, the second stage at another; neither has a process."""

    def __init__(self, standbys: StandbyRanks = NO_STANDBYS, **parallel: Any) -> None:
        self.head, self.other = StandInHost("attic", "tcp"), StandInHost("cellar", "pigeon", "tcp")
        self.routes = ReviewedRoutes()
        hosts = self.hosts = Hosts(self.head, self.other, routes=self.routes)
        config = EngineConfig(
            model=ModelConfig(model="demo"),
            parallel=ParallelConfig(pipeline_parallel_size=2, **parallel),
            cluster=HostsConfig(rejoin_timeout_s=REJOIN_TIMEOUT_S),
        )
        self.clock = FakeClock()
        layout = PipeLayout(resolve(config, hosts.resources()), hosts, config, self.clock)
        self.events: list[Event] = []
        self.watch = MemberWatch(lambda member, event: self.processes.take(member, event))
        self.processes = PipelineProcesses(layout, hosts, self.watch, self, standbys)
        self.processes.start()

    def report(self, event: Event) -> None:
        self.events.append(event)

    @property
    def started(self) -> list[str]:
        return [f"{host.name}: {member.name}" for host in (self.head, self.other) for member in host.members]

    def hear(self) -> None:
        for member in self.watch.members:
            self.watch.hear(member)

    def close(self) -> None:
        self.watch.close()
        self.processes.close()
        self.head.close()
        self.other.close()


@pytest.fixture
def parallel() -> dict[str, Any]:
    """Settings that a test may override by parameters of its own."""
    return {}


@pytest.fixture
def replica(parallel: dict[str, Any]) -> Iterator[Replica]:
    made = Replica(**parallel)
    yield made
    made.close()


def test_each_rank_is_started_and_connected_by_its_host(replica: Replica) -> None:
    assert replica.started == ["attic: stage 0", "attic: core", "cellar: stage 1"]
    replica.processes.begin()
    stage_0, core = replica.head.members
    (stage_1,) = replica.other.members
    (to_core,), (to_first,), (to_last,) = core.handed, stage_0.handed, stage_1.handed
    assert isinstance(to_core, CoreEndpoints)
    assert isinstance(to_first, RankEndpoints)
    assert isinstance(to_last, RankEndpoints)
    assert to_core.plans == [to_first.plans, to_last.plans]
    assert to_core.results == to_last.results
    assert to_first.outgoing == [to_last.incoming]
    assert to_first.tokens == to_last.tokens
    assert {kind for host in (replica.head, replica.other) for kind, _ in host.made} == {"tcp"}
    ends = [end for host in (replica.head, replica.other) for _, end in host.made]
    assert {tuple(end.happened) for end in ends} == {("delivered",)}


def test_r3_a_rank_that_is_lost_elsewhere_is_started_there_again(replica: Replica) -> None:
    serve(replica)
    core, lost = replica.head.members[1], replica.other.members[0]
    assert isinstance(replica.events[1], StageLoaded)
    assert {event.process for event in replica.events if isinstance(event, StageLoaded)} == {
        "attic #0",
        "cellar #1",
    }
    ends = [end for host in (replica.head, replica.other) for _, end in host.made]
    lost.leave(-9)
    replica.processes.recover()
    told = next(event for event in replica.events if isinstance(event, StageLost))
    assert told.error.message == "stage 1 (cellar #1) was killed by signal 9 (SIGKILL)."
    assert told.restarts == ["stage 1"]
    assert {tuple(end.happened) for end in ends} == {("delivered", "end")}
    assert lost.done == ["close"]
    assert replica.started == ["attic: stage 0", "attic: core", "cellar: stage 1", "cellar: stage 1"]
    assert [type(message) for message in core.handed] == [CoreEndpoints, EpochLost, CoreEndpoints]
    (fresh,) = replica.other.members[1].handed
    assert isinstance(fresh, RankEndpoints)
    assert fresh.epoch == 1


def test_g1_the_ends_of_a_connection_know_who_is_at_them(replica: Replica) -> None:
    replica.processes.begin()
    known = {
        (host.name, parties.own, parties.peer, parties.peer_host)
        for host in (replica.head, replica.other)
        for parties in host.parties
    }
    assert known == {
        ("attic", "core", "rank-0", "attic"),
        ("attic", "rank-0", "core", "attic"),
        ("attic", "core", "rank-1", "cellar"),
        ("cellar", "rank-1", "core", "attic"),
        ("cellar", "rank-1", "rank-0", "attic"),
        ("attic", "rank-0", "rank-1", "cellar"),
    }
    assert {parties.epoch for parties in replica.other.parties} == {0}


def serve(replica: Replica) -> None:
    """Let all stages load and be ready."""
    replica.processes.begin()
    for member in (replica.head.members[0], replica.other.members[0]):
        member.say(WeightsLoaded(bytes_read=2, seconds=0.1, identity=b"model"))
        member.say(Ready(rank=LOADED))
    replica.hear()


def test_r15_a_core_that_serves_is_told_of_its_hosts_and_tells_of_slow_links(replica: Replica) -> None:
    """One that still waits for ranks would take the message for another epoch."""
    serve(replica)
    core = replica.head.members[1]
    replica.processes.recover()
    assert not any(isinstance(message, PipeHosts) for message in core.handed)
    core.say(Ready())
    replica.hear()
    replica.processes.recover()
    assert isinstance(told := core.handed[-1], PipeHosts)
    assert told.stages == ["attic", "cellar"]
    slow = LinkJudged(
        sender="attic", receiver="cellar", is_slow=True, bytes_per_s=2.5e6, measured_bytes_per_s=117.5e6
    )
    core.say(slow)
    core.say(msgspec.structs.replace(slow, is_slow=False))
    replica.hear()
    assert replica.events[-2:] == [
        Caution(
            text="The link from attic to cellar carries 20 Mbit/s instead of the measured 940 Mbit/s. "
            "Look for other traffic, a damaged cable or a weak signal."
        ),
        Notice(
            text="The link from attic to cellar has recovered: it carries at least half of the "
            "measured 940 Mbit/s."
        ),
    ]


def test_g1_d15_a_start_and_a_recovery_say_who_computes_in_another_class(replica: Replica) -> None:
    """The recovery says what the core has heard from the ranks of that epoch."""
    serve(replica)
    fast = msgspec.structs.replace(LOADED, numeric_class="avx512 1f0a2b3c")
    for member in (replica.head.members[0], replica.other.members[0]):
        member.say(Ready(rank=fast))
    replica.hear()
    texts = [event.text for event in replica.processes.startup_notices() if isinstance(event, Notice)]
    assert not any("class" in text for text in texts)
    core, lost = replica.head.members[1], replica.other.members[0]
    core.say(Ready())
    lost.leave(-9)
    replica.processes.recover()
    core.say(Ready(epoch=1, numeric_classes=["avx512 1f0a2b3c", "avx2 99aabbcc"]))
    replica.hear()
    (recovered,) = [event for event in replica.events if isinstance(event, Recovered)]
    changed, mixed = recovered.notes
    assert changed.startswith("stage 1 on cellar now computes in avx2 99aabbcc instead of avx512 1f0a2b3c")
    assert "numeric classes are mixed" in mixed
    assert "stage 0 on attic: avx512 1f0a2b3c" in mixed
    assert event_line(recovered).count("\nnote: ") == 2


def test_g1_no_epoch_begins_before_a_host_that_is_lost_is_back(replica: Replica) -> None:
    serve(replica)
    replica.other.members[0].leave(1)
    replica.other.is_there = False
    for _ in range(3):
        replica.processes.recover()
    assert len(replica.other.members) == 1
    replica.other.is_there = True
    replica.processes.recover()
    assert len(replica.other.members) == 2


def lose_other_host(replica: Replica) -> None:
    """The host with the second stage is gone, with all its members."""
    for member in replica.other.members:
        member.leave(-9)
    replica.other.is_there = False
    replica.processes.recover()


def notices(replica: Replica) -> list[str]:
    return [event.text for event in replica.events if isinstance(event, Notice)]


@pytest.mark.parametrize("parallel", [{"threads_per_rank": 1}], ids=str)
def test_r15_a_host_that_does_not_come_back_leaves_its_stage_to_the_others(replica: Replica) -> None:
    serve(replica)
    lose_other_host(replica)
    assert replica.started == ["attic: stage 0", "attic: core", "cellar: stage 1"]
    replica.clock.advance(REJOIN_TIMEOUT_S)
    replica.processes.recover()
    assert replica.started == ["attic: stage 0", "attic: core", "attic: stage 1", "cellar: stage 1"]
    assert notices(replica)[-1] == "without cellar: stage 1 goes to attic."
    stage_0, core, stage_1 = replica.head.members
    assert stage_0.done == [], "it keeps its weights"
    assert [type(message) for message in core.handed] == [CoreEndpoints, EpochLost, CoreEndpoints]
    ends = [member.handed[-1] for member in (stage_0, stage_1)]
    assert [end.epoch for end in ends if isinstance(end, RankEndpoints)] == [1, 1]
    started_as = replica.head.ranks[1]
    assert (started_as.host, started_as.num_blocks, started_as.first_load.identity) == ("attic", 7, b"model")


def test_r15_a_rank_whose_share_of_the_cores_has_changed_is_started_again(replica: Replica) -> None:
    serve(replica)
    before = replica.head.members[0]
    lose_other_host(replica)
    replica.clock.advance(REJOIN_TIMEOUT_S)
    replica.processes.recover()
    assert before.done == ["kill_now", "close"]
    assert [(rank.stage, rank.threads) for rank in replica.head.ranks] == [(0, 4), (0, 2), (1, 2)]


def test_r15_where_the_others_cannot_take_over_requests_end_with_that_and_all_goes_on_later(
    replica: Replica,
) -> None:
    serve(replica)
    lose_other_host(replica)
    replica.head.free_bytes = 0
    replica.clock.advance(REJOIN_TIMEOUT_S)
    for _ in range(3):
        replica.processes.recover()
    core = replica.head.members[1]
    lost = [message for message in core.handed if isinstance(message, EpochLost)]
    assert [message.ends for message in lost] == ["none", "all", "all", "all"], "others may have come"
    assert lost[-1].error.kind == "HostMissingError"
    assert notices(replica)[-1].startswith(
        "the pipeline waits for the host cellar (stage 1); attic cannot take over: "
    )
    assert len(notices(replica)) == 2
    replica.other.is_there = True
    replica.processes.recover()
    assert replica.started[-2:] == ["cellar: stage 1", "cellar: stage 1"]
    assert isinstance(core.handed[-1], CoreEndpoints)


def test_r15_a_host_that_is_back_disturbs_no_healthy_pipe_and_is_used_by_the_next_epoch(
    replica: Replica,
) -> None:
    serve(replica)
    lose_other_host(replica)
    replica.clock.advance(REJOIN_TIMEOUT_S)
    replica.processes.recover()
    serving = [*replica.head.members]
    replica.other.is_there = True
    for _ in range(3):
        replica.processes.recover()
    assert replica.head.members == serving
    assert notices(replica)[-1] == "cellar can take stages from the next epoch on."
    serving[-1].leave(-9)
    replica.processes.recover()
    assert notices(replica)[-1] == "stage 1 goes to cellar."
    assert [rank.stage for rank in replica.other.ranks] == [1, 1]


@pytest.mark.parametrize(
    "kind", [WaitTimeoutError, ModelConfigError, OSError], ids=lambda kind: kind.__name__
)
def test_g1_an_epoch_that_a_host_refuses_is_tried_again(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def refuse(*given: object) -> None:
        raise kind("the host cellar has not answered for 5 s.")

    serve(replica)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(replica.other, "accept", refuse)
        replica.other.members[0].leave(-9)
        replica.processes.recover()
    lost = [event for event in replica.events if isinstance(event, StageLost)]
    assert lost[-1].error.message == "no new epoch can begin: the host cellar has not answered for 5 s."
    replica.processes.recover()
    assert isinstance(replica.other.members[-1].handed[0], RankEndpoints)


def test_g1_ways_are_looked_at_when_an_epoch_ends_though_nobody_has(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_processes, "CAUSE_GRACE_S", 0.0)
    serve(replica)
    stage = replica.other.members[0]
    stage.say(Abandoned(epoch=0, error=LinkClosedError("the link is broken.").info()))
    replica.hear()
    num_handed = len(stage.handed)
    replica.routes.are_known = False
    replica.processes.recover()
    replica.processes.recover()
    assert replica.routes.occasions == [(None, 0)] * 2, "it does not wait, and asks again"
    assert len(stage.handed) == num_handed
    replica.routes.are_known = True
    replica.processes.recover()
    assert isinstance(stage.handed[-1], RankEndpoints)
    stage.leave(-9)  # a lost rank is no matter of ways
    replica.routes.are_known = False  # but they are looked for, since a host is back
    replica.processes.recover()
    assert len(replica.other.members) == 1
    replica.routes.are_known = True
    replica.processes.recover()
    assert len(replica.other.members) == 2
    assert replica.routes.occasions == [(None, 0)] * 3


def test_r15_an_epoch_waits_for_the_ways_between_its_own_hosts_alone(replica: Replica) -> None:
    """Others stand by, and those to a host that has just come are measured for seconds."""
    standing_by = StandInHost("shed", "tcp")
    replica.hosts.add(standing_by)
    serve(replica)
    replica.other.members[0].leave(-9)
    replica.processes.recover()
    assert replica.routes.names == {"attic", "cellar"}
    standing_by.close()


@pytest.mark.parametrize("is_lost_in_the_end", [False, True])
def test_r15_a_host_that_is_away_has_its_stages_until_it_is_lost(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, is_lost_in_the_end: bool
) -> None:
    """All its connections were reset. Nobody waits for one of its members to end, as none may."""
    monkeypatch.setattr(pipeline_processes, "CAUSE_GRACE_S", 3600.0)
    serve(replica)
    stage = replica.other.members[0]
    replica.other.is_there = False
    replica.head.members[0].say(Abandoned(epoch=0, error=LinkClosedError("the link is broken.").info()))
    replica.hear()
    replica.processes.recover()
    assert (len(stage.handed), stage.done) == (1, [])
    if is_lost_in_the_end:
        stage.leave(1)
        replica.processes.recover()
    replica.other.is_there = True
    replica.processes.recover()
    assert isinstance(replica.other.members[-1].handed[-1], RankEndpoints)
    losses = [event for event in replica.events if isinstance(event, StageLost)]
    assert [event.retry_s for event in losses] == [0.0] * (1 + is_lost_in_the_end)
    assert losses[0].restarts == []
    assert len(replica.other.members) == 1 + is_lost_in_the_end


@pytest.mark.parametrize("is_away", [True, False])
def test_r15_a_stage_is_not_killed_for_what_its_host_cannot_say(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, is_away: bool
) -> None:
    """That it has left the epoch is heard when the host is back; a kill would be carried out then."""
    monkeypatch.setattr(pipeline_processes, "CAUSE_GRACE_S", 0.0)
    monkeypatch.setattr(pipeline_processes, "DUMP_S", 0.0)
    serve(replica)
    stage, core = replica.other.members[0], replica.head.members[1]
    left = Abandoned(epoch=0, error=LinkClosedError("the link is broken.").info(), leave_s=0.0)
    core.say(left)
    replica.head.members[0].say(left)
    replica.hear()
    replica.other.is_there = not is_away
    replica.processes.recover()
    replica.processes.kill_hung()
    assert stage.done == ([] if is_away else ["show_threads", "kill_now"])


@pytest.mark.parametrize("parallel", [{"tied_head": "transfer"}], ids=str)
def test_r4_s2_a_rank_that_is_started_again_takes_part_in_the_transfer_of_a_tied_head(
    replica: Replica,
) -> None:
    """Issue 25, point 14: the other ranks send or await the head in every epoch."""
    replica.processes.begin()
    lost = replica.other.members[0]
    for member in (replica.head.members[0], lost):
        member.say(WeightsLoaded(bytes_read=2, seconds=0.1))
        member.say(Ready(rank=LOADED))
    replica.hear()
    lost.leave(-9)
    replica.processes.recover()
    assert [(rank.stage, rank.tied_head) for rank in replica.other.ranks] == [(1, "transfer")] * 2


def test_r3_a_replacement_is_given_what_the_first_load_read(replica: Replica) -> None:
    """The table of the first load stays, whatever later ranks read."""
    read = {name: name.encode() * 16 + b"1" * 16 for name in "abc"}
    replica.processes.begin()
    for member, parts in ((replica.head.members[0], "ab"), (replica.other.members[0], "c")):
        for part in parts:
            member.say(TensorsRead(digests=read[part]))
        member.say(WeightsLoaded(bytes_read=2, seconds=0.1, identity=b"the model"))
        member.say(Ready(rank=LOADED))
    replica.hear()
    assert replica.other.ranks[0].first_load == FirstLoad()
    for number in (1, 2):
        replica.other.members[-1].leave(-9)
        replica.processes.recover()
        first_load = replica.other.ranks[number].first_load
        assert first_load == FirstLoad(identity=b"the model", digests=b"".join(read.values()))
        replica.other.members[-1].say(TensorsRead(digests=b"c" * 16 + b"2" * 16))
        replica.other.members[-1].say(WeightsLoaded(bytes_read=2, seconds=0.1, identity=b"another"))
        replica.hear()


def test_all_are_told_to_leave_and_who_still_loads_is_ended(replica: Replica) -> None:
    replica.head.members[0].say(Ready(rank=LOADED))
    replica.hear()
    replica.processes.stop_all()
    assert [member.handed for member in (*replica.head.members, *replica.other.members)] == [[Stop()]] * 3
    assert replica.head.members[0].done == []
    assert replica.other.members[0].done == ["kill_now"]


# --- links exchanged within an epoch ---------------------------------------------------------------


def test_g1_a_link_is_exchanged_while_the_epoch_goes_on(replica: Replica) -> None:
    serve(replica)
    ends_before = [end for host in (replica.head, replica.other) for _, end in host.made]
    old_in, old_out = (link_end(host) for host in (replica.other, replica.head))
    replica.processes.exchange_link((0, 0), (1, 0), 40)
    (stage_0, core), (stage_1,) = replica.head.members, replica.other.members
    to_sender, to_receiver, to_core = stage_0.handed[-1], stage_1.handed[-1], core.handed[-1]
    assert isinstance(to_sender, AttachLink)
    assert isinstance(to_receiver, AttachLink)
    assert isinstance(to_core, ExchangeLink)
    assert to_sender == to_receiver, "the numbers of stand-in ends are the same"
    order = to_core.order
    assert (order.number, order.first_step) == (to_sender.number, 40)
    assert (order.stage, order.sender, order.receiver) == (0, 0, 0)
    new = [end for host in (replica.head, replica.other) for end in host_ends(host) if end not in ends_before]
    assert [end.happened for end in new] == [["delivered"]] * 2
    assert old_in.happened == old_out.happened == ["delivered"]
    stage_1.say(LinkExchanged(epoch=0, number=order.number))
    replica.hear()
    assert old_in.happened == old_out.happened == ["delivered", "end"]
    assert all(end.happened == ["delivered"] for end in ends_before if end not in (old_in, old_out))
    assert not any(isinstance(event, StageLost) for event in replica.events)


def test_g1_a_link_that_was_exchanged_ends_with_its_epoch(replica: Replica) -> None:
    """Also the one of before, of which the receiver has not said that it is empty, or says it too late."""
    serve(replica)
    replica.processes.exchange_link((0, 0), (1, 0))
    ends = [end for host in (replica.head, replica.other) for end in host_ends(host)]
    replica.other.members[0].leave(-9)
    replica.processes.recover()
    assert {tuple(end.happened) for end in ends} == {("delivered", "end")}
    replica.head.members[0].say(LinkExchanged(epoch=0, number=1))
    replica.hear()


def test_g1_a_link_stays_where_another_one_cannot_be_made(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(replica)

    def fail(*given: object) -> None:
        raise OSError("no descriptors")

    monkeypatch.setattr(replica.head, "join", fail)
    with pytest.raises(OSError, match="no descriptors"):
        replica.processes.exchange_link((0, 0), (1, 0))
    assert not any(isinstance(message, ExchangeLink) for message in replica.head.members[1].handed)
    assert not any(isinstance(message, AttachLink) for message in replica.other.members[0].handed)


def host_ends(host: StandInHost) -> list[StandInEnd]:
    return [end for _, end in host.made]


def link_end(host: StandInHost) -> StandInEnd:
    """That of the link between the two stages: the first one whose other end is not the core's."""
    ends = zip(host_ends(host), host.parties, strict=True)
    return next(end for end, parties in ends if "core" not in (parties.own, parties.peer))


# --- a rank beside the pipe ------------------------------------------------------------------------


class Beside:
    """Standbys that a test plays. Implements `StandbyRanks`."""

    def __init__(self) -> None:
        self.waiting: dict[int, StandInMember] = {}  # by number of the rank
        self.tended: list[int] = []
        self.replacements: list[RankConfig] = []

    def tend(
        self,
        now: float,
        ranks: Sequence[RankConfig],
        loaded: Mapping[int, RankLoaded],
        config_of: Callable[[int], RankConfig],
    ) -> None:
        self.tended.append(len(ranks))
        self.replacements = [config_of(index) for index in range(len(ranks))]

    def take(self, rank: RankConfig, member_index: int) -> Member | None:
        return self.waiting.pop(member_index, None)

    def close(self) -> None:
        """The members belong to the test."""


def test_g1_r4_a_lost_rank_is_replaced_by_its_standby_which_is_started_by_nobody() -> None:
    beside = Beside()
    replica = Replica(beside)
    try:
        serve(replica)
        replica.processes.keep_standbys(0.0)
        assert [rank.num_blocks for rank in beside.replacements] == [LOADED.max_blocks] * 2
        assert beside.replacements[1].first_load.identity == b"model", "it must load the same model"
        standby = StandInMember(replica.other, "stage 1", 1, 1)
        standby.has_loaded = True
        beside.waiting[1] = standby
        replica.other.members[0].leave(-9)
        replica.processes.recover()
        assert replica.started == ["attic: stage 0", "attic: core", "cellar: stage 1"]
        (ends,) = standby.handed
        assert isinstance(ends, RankEndpoints)
        assert ends.epoch == 1
        assert standby in replica.watch.members
        replica.processes.keep_standbys(0.0)
        assert beside.tended == [2, 0], "the pipe is not whole before a step has crossed it"
    finally:
        replica.close()
