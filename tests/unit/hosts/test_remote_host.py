"""A host elsewhere, asked over a wire: its agent does what the head asks, and takes no more than it may."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import msgspec
import pytest

from agent_pairs import IDENTITY, LINK, RUN, SECRET, Pair, parties, rank_config
from hand_core import Crew
from penstock.errors import (
    ErrorInfo,
    LinkClosedError,
    PeerError,
    ProtocolError,
    StageLostError,
    WaitTimeoutError,
)
from penstock.faults import parse
from penstock.hosts import remote_host
from penstock.hosts.agent import HEAD_LIMIT_S
from penstock.hosts.agent_messages import (
    AgentHello,
    AskClock,
    Ended,
    Hand,
    LogLines,
    Said,
    Started,
    StartRank,
    ToAgent,
    ToHead,
    ToldClock,
)
from penstock.hosts.agent_wire import AgentWire
from penstock.hosts.member import Member
from penstock.hosts.member_watch import MemberWatch
from penstock.hosts.network.scout_messages import ScoutFailed, SurveyHost
from penstock.hosts.rank_host import BulkNeed, Parties, PlanNeed
from penstock.hosts.remote_host import SILENCE_LIMIT_S
from penstock.hosts.stream_ends import StreamInvitation
from penstock.hosts.weights.model_supply import Delivery
from penstock.kvstore.own_store import TierNeed
from penstock.process.child import (
    Alive,
    ChildFailed,
    LinkExchanged,
    LinkJudged,
    LoadProgressed,
    Ready,
    StatusEvent,
    WeightsLoaded,
)
from penstock.process.config import MeasureConfig, StoreConfig
from penstock.process.control import AttachLink, Stop, UseModel
from penstock.process.endpoints import HeldEnd, MemoryHandle, RankEndpoints, RingHandle, SocketHandle
from penstock.told_text import cleaned
from penstock.trust.peer_names import PeerName
from stand_in_hosts import LOADED, StandInMember

(FAULT,) = parse("rank.load@0:1=kill")


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_g1_what_a_member_says_and_how_it_ends_is_told(pair: Pair) -> None:
    member, own = pair.start()
    assert member.exit_code is None
    own.say(WeightsLoaded(bytes_read=5, seconds=0.5, identity=b"i"))
    own.say(Ready(epoch=0, rank=LOADED))
    pair.serve()
    assert [type(event) for event in member.read_status()] == [WeightsLoaded, Ready]
    assert (member.has_loaded, member.is_ready) == (True, True)
    assert member.identity == "desk #1 on desk"
    own.say(ChildFailed(error=ErrorInfo(kind="PenstockError", message="it broke.")))
    own.leave(3)
    pair.serve()
    assert len(member.read_status()) == 1
    assert (member.exit_code, member.end().message) == (3, "it broke.")
    member.close()


def test_r15_an_agent_takes_no_path_and_no_fault(pair: Pair) -> None:
    pair.start(faults=[FAULT])
    (rank,) = pair.own.ranks
    assert (rank.model_path, rank.faults, rank.store, rank.host) == ("", [], None, "desk")
    assert pair.models.sought == [(1, IDENTITY, rank)]


TIERS = StoreConfig(url="/secret/of/the/head", quota_bytes=1 << 20, namespace=bytes(16), host_blocks=3)


def test_r15_an_agent_keeps_kv_blocks_where_its_own_command_line_says(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    send = AgentWire.send

    def note(wire: AgentWire[Any], message: msgspec.Struct) -> None:
        sent.append(msgspec.json.encode(message))
        send(wire, message)

    monkeypatch.setattr(AgentWire, "send", note)
    pair.start(store=TIERS)
    (rank,) = pair.own.ranks
    assert rank.store == msgspec.structs.replace(TIERS, url="/kv/of/desk", host="desk")
    assert not any(b"secret" in message for message in sent)
    config = rank_config(store=TIERS)
    pair.host.start_measuring(
        MeasureConfig(rank=config, num_rows=[1], context=1, prefill_tokens=1, case_s=1.0), "stage 1"
    )
    pair.serve()
    assert not any(b"secret" in message for message in sent)


def test_g1_a_worker_without_the_store_that_the_head_needs_says_so_at_the_start(pair: Pair) -> None:
    member = pair.host.start_rank(
        rank_config(store=msgspec.structs.replace(TIERS, url="s3://secret", quota_bytes=None)), "stage 1", 1
    )
    pair.serve()
    member.read_status()
    assert (member.exit_code, pair.own.members) == (1, [])
    error = member.end()
    assert (error.kind, error.param) == ("UsageError", "kv_store")
    assert "of the kind s3, but the worker desk has no --kv-store" in error.message
    assert "Start that worker with --kv-store s3://" in error.remedy


def test_r15_the_head_sends_no_path() -> None:
    sent = {field.name for field in msgspec.structs.fields(StartRank)}
    assert sent == {"number", "rank", "name", "model", "tier"}
    of_tier = {field.name for field in msgspec.structs.fields(TierNeed)}
    assert of_tier == {
        "kind",
        "quota_bytes",
        "namespace",
        "description",
        "host_blocks",
        "writes_back",
        "write_bytes_per_s",
    }
    with pytest.raises(msgspec.ValidationError):  # which model it is says the own host alone
        msgspec.convert(
            {"number": 1, "message": {"type": "use_model", "path": "/x", "identity": ""}, "type": "hand"},
            Hand,
        )


def test_g1_weights_that_cannot_be_had_end_the_rank_that_waits_for_them(pair: Pair) -> None:
    member, own = pair.start()
    error = PeerError("the disk is full.", remedy="Free space.", code="disk_full")
    pair.models.deliveries = [Delivery(99, error), Delivery(1, error)]
    pair.serve()
    member.read_status()
    assert (member.exit_code, own.exit_code) == (1, -9)
    assert (member.end().code, member.end().remedy) == ("disk_full", "Free space.")
    assert pair.models.ended == [1]


def test_g1_weights_are_handed_to_their_rank_and_their_coming_is_told(pair: Pair) -> None:
    member, own = pair.start()
    progress = LoadProgressed(done=1, total=2, what="fetching")
    model = UseModel(path="/cache/1", identity=IDENTITY)
    pair.models.deliveries = [Delivery(1, progress), Delivery(1, model)]
    pair.serve()
    assert member.read_status() == [progress]
    assert own.handed == [model]
    pair.agent.close()
    assert pair.models.ended == [1, "close"]


def test_g1_ends_within_the_host_are_made_without_a_round_trip(pair: Pair) -> None:
    accepted = pair.host.accept("ring", LINK, parties("desk", "rank-2"))
    joined = pair.host.join("ring", LINK, parties("desk"), accepted.invitation)
    member, own = pair.start()
    member.hand(RankEndpoints(epoch=3, plans=joined.endpoint, tokens=[accepted.endpoint]))
    pair.serve()
    (first, second) = (end for _, end in pair.own.made)
    assert second.endpoint == first.invitation
    assert own.handed == [RankEndpoints(epoch=3, plans=second.endpoint, tokens=[first.endpoint])]
    assert isinstance(accepted.endpoint, HeldEnd)
    accepted.delivered()
    accepted.end()
    joined.close()
    pair.serve()
    assert (first.happened, second.happened) == (["delivered", "end"], ["close"])


def test_g1_a_rank_is_handed_its_end_of_a_link_within_an_epoch(pair: Pair) -> None:
    accepted = pair.host.accept("ring", LINK, parties("desk", "rank-2"))
    member, own = pair.start()
    member.hand(AttachLink(number=7, endpoint=accepted.endpoint))
    pair.serve()
    ((_, end),) = pair.own.made
    assert own.handed == [AttachLink(number=7, endpoint=end.endpoint)]
    exchanged = LinkExchanged(epoch=3, number=7)
    own.say(exchanged)
    pair.serve()
    assert member.read_status() == [exchanged]


def test_g1_a_bulk_channel_is_a_need_like_any_other(pair: Pair) -> None:
    accepted = pair.host.accept("ring", BulkNeed(num_chunks=3), parties("desk", "rank-2"))
    joined = pair.host.join("ring", BulkNeed(num_chunks=3), parties("desk"), accepted.invitation)
    pair.serve()
    first, second = (end for _, end in pair.own.made)
    assert second.endpoint == first.invitation
    assert isinstance(joined.endpoint, HeldEnd)


def test_g1_an_end_for_another_host_says_where_it_listens(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = StreamInvitation(host="10.0.0.2", port=7701)

    def accept(kind: str, need: object, given: Parties) -> object:
        end = original(kind, LINK, given)
        end.invitation = where  # type: ignore[misc]
        return end

    original = pair.own.accept
    monkeypatch.setattr(pair.own, "accept", accept)
    crew = Crew()
    found: list[Any] = []
    crew.start(lambda: found.append(pair.host.accept("tls", LINK, parties("tower"))))
    while not pair.own.made:
        pair.serve_who_asks()
    crew.join()
    assert found[0].invitation == where
    name = PeerName(cluster="0" * 32, host="desk", role="rank-1", run=RUN, epoch=3)
    assert pair.allowed.issue(name) == SECRET
    assert pair.allowed.run_of_head == RUN


def test_g1_an_end_that_cannot_be_made_is_refused_with_the_agents_words(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept(*given: object) -> None:
        asked.append(given)
        raise OSError(24, "Too many open files")

    asked: list[object] = []
    monkeypatch.setattr(pair.own, "accept", accept)
    crew = Crew()
    raised: list[BaseException] = []

    def ask() -> None:
        with pytest.raises(PeerError) as caught:
            pair.host.accept("tls", LINK, parties("tower"))
        raised.append(caught.value)

    crew.start(ask)
    while not asked:
        pair.serve_who_asks()
    crew.join()
    assert "Too many open files" in str(raised[0])


class Listening:
    """Has the host of a pair say that its ends for other hosts listen at an address."""

    WHERE = StreamInvitation(host="10.0.0.2", port=7701)

    def __init__(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        self._accept = pair.own.accept
        monkeypatch.setattr(pair.own, "accept", self.accept)

    def accept(self, kind: str, need: object, given: Parties) -> object:
        end = self._accept(kind, LINK, given)
        end.invitation = self.WHERE  # type: ignore[misc]
        return end


def test_r15_an_end_that_nobody_waits_for_any_more_is_closed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would listen at one of the link ports for ever."""
    Listening(pair, monkeypatch)
    monkeypatch.setattr(remote_host, "ANSWER_S", 0.01)
    with pytest.raises(WaitTimeoutError):
        pair.host.accept("tls", LINK, parties("tower"))
    pair.serve()
    ((_, end),) = pair.own.made
    assert end.happened == ["close"]


def test_r15_an_end_that_was_asked_for_while_the_connection_was_broken_is_closed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    Listening(pair, monkeypatch)
    pair.break_connection()
    with pytest.raises(LinkClosedError, match=r"the host desk cannot be reached: it was reset\."):
        pair.host.accept("tls", LINK, parties("tower"))
    assert pair.join_again()
    pair.serve()
    ((_, end),) = pair.own.made
    assert end.happened == ["close"]


@pytest.mark.parametrize("what", ["accept", "join"])
def test_g1_a_member_whose_end_could_not_be_made_is_lost_with_the_reason(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The head does not wait for ends within the host, nor for those that dial."""

    def fail(*given: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(pair.own, what, fail)
    accepted = pair.host.accept("ring", LINK, parties("desk", "rank-2"))
    joined = pair.host.join("ring", LINK, parties("desk"), accepted.invitation)
    member, own = pair.start()
    member.hand(RankEndpoints(epoch=3, plans=joined.endpoint, tokens=[]))
    pair.serve()
    member.read_status()
    assert member.end().message == "the host failed: Too many open files."
    assert (own.handed, own.exit_code) == ([], -9)


def test_g1_a_reason_is_forgotten_with_its_end(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(pair.own, "accept", fail)
    accepted = pair.host.accept("ring", LINK, parties("desk", "rank-2"))
    accepted.close()
    member, _ = pair.start()
    member.hand(RankEndpoints(epoch=3, plans=accepted.endpoint, tokens=[]))
    pair.serve()
    member.read_status()
    assert "does not exist or is closed" in member.end().message


def test_g1_a_member_that_needs_an_end_which_was_not_made_is_lost(pair: Pair) -> None:
    member, own = pair.start()
    member.hand(RankEndpoints(epoch=0, plans=HeldEnd(number=99), tokens=[]))
    pair.serve()
    member.read_status()
    assert "end 99 of a connection does not exist" in member.end().message
    assert (own.handed, own.exit_code) == ([], -9)


def test_r15_a_head_that_names_descriptors_of_the_host_gets_none_of_them(pair: Pair) -> None:
    """An agent has descriptors of links, logs and credentials: none is for a rank because of its number."""
    member, own = pair.start()
    ring = RingHandle(memory_fd=3, data_fd=4, space_fd=5, frame_bytes=64, num_frames=1)
    member.hand(RankEndpoints(epoch=0, plans=SocketHandle(handle_fd=6), tokens=[], outgoing=[ring]))
    pair.serve()
    member.read_status()
    assert "the head named descriptors of this host" in member.end().message
    assert (own.handed, own.exit_code) == ([], -9)


def test_messages_without_ends_are_handed_on_as_they_are(pair: Pair) -> None:
    member, own = pair.start()
    member.hand(Stop())
    member.show_threads()
    member.ask_to_leave()
    member.kill_now()
    pair.serve()
    assert own.handed == [Stop()]
    assert own.done == ["show_threads", "ask_to_leave", "kill_now"]
    pair.host.tell(Hand(number=77, message=Stop()))  # to a member that has ended, and is forgotten
    pair.serve()


def test_a_spare_is_kept_where_the_head_wants_one(pair: Pair) -> None:
    assert pair.host.keep_spare(3) == 0
    pair.own.spare_bytes = 5
    pair.serve()
    pair.host.pump()
    assert pair.host.keep_spare(3) == 5
    assert pair.own.spares_kept == [3]


def refuse(*given: object) -> NoReturn:
    raise OSError(errno.EMFILE, "Too many open files")


def test_g1_a_host_that_cannot_keep_a_spare_or_look_at_itself_serves_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, own = pair.start()
    known = pair.host.resources()
    pair.own.spare_bytes = 5
    pair.host.keep_spare(3)
    pair.serve()
    pair.own.free_bytes = 7
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(pair.own, "keep_spare", refuse)
        meanwhile.setattr(pair.own, "resources", refuse)
        pair.host.keep_spare(3)
        pair.serve()
        assert pair.host.resources() == known
        assert pair.host.keep_spare(3) == 0
        pair.break_connection()
        assert pair.join_again(), "its hello has the last answer"
    assert own.done == []
    pair.host.keep_spare(3)
    pair.host.resources()
    pair.serve()
    assert pair.host.resources().free_bytes == 7
    assert pair.host.keep_spare(3) == 5


@pytest.mark.parametrize("is_model", [False, True])
def test_g1_a_member_that_cannot_be_handed_what_it_needs_is_lost_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, is_model: bool
) -> None:
    member, own = pair.start()
    monkeypatch.setattr(own, "hand", refuse)
    if is_model:
        pair.models.deliveries = [Delivery(1, UseModel(path="/cache/1", identity=IDENTITY))]
    else:
        member.hand(Stop())
    pair.serve()
    member.read_status()
    assert (member.exit_code, own.done) == (1, ["kill_now", "close"])
    assert member.end().message == "the host failed: Too many open files."
    assert pair.agent.failure is None


def test_g1_members_are_lost_with_a_worker_that_is_ended_and_the_next_one_serves_others(pair: Pair) -> None:
    member, own = pair.start()
    pair.agent.close()
    assert member.read_status() == []
    assert member.exit_code == 1
    assert "the host desk is lost: its worker has ended." in member.end().message
    assert member.end().kind == StageLostError.__name__
    assert own.done == ["kill_now", "close"], "the agent ends its ranks"
    assert not pair.host.is_there
    assert (len(pair.lost), pair.num_broken) == (1, 1)
    with pytest.raises(OSError, match="desk is lost"):
        pair.host.start_rank(rank_config(0), "stage 0", 0)
    member.close()
    ends = socket.socketpair()
    hello = AgentHello(resources=pair.own.resources(), kinds=[], talk="the next")
    assert not pair.host.attach(AgentWire(ends[0], ToHead), hello)
    assert pair.host.is_there
    assert pair.host.resources().name == "desk"
    assert (len(pair.lost), pair.num_broken) == (1, 1)
    ends[1].close()


def test_g1_a_silent_agent_is_lost_after_the_limit_and_not_by_a_supervisor_that_slept(pair: Pair) -> None:
    member, _ = pair.start()
    pair.tend(0.0)
    pair.tend(100.0)  # the supervisor slept
    assert pair.host.is_there
    now = 100.0
    while not pair.lost:
        now += 1.0
        pair.tend(now)
    assert now - 100.0 == SILENCE_LIMIT_S
    assert "has sent nothing for 3.0 s" in member.end().message


def test_r15_nothing_is_begun_with_a_host_that_does_not_answer_until_it_speaks(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cable that is pulled a link breaks before the host counts as lost. The next epoch would wait for
    the host again and again, and each time that would count as a loss."""

    def accept(*given: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(remote_host, "ANSWER_S", 0.01)
    monkeypatch.setattr(pair.own, "accept", accept)
    with pytest.raises(WaitTimeoutError, match=r"the host desk has not answered for 0\.01 s"):
        pair.host.accept("tls", LINK, parties("tower"))
    assert not pair.host.is_there
    pair.serve()
    pair.tend(0.0)
    assert pair.host.is_there, "it was but busy"
    assert pair.lost == []


def test_r15_a_host_is_in_doubt_before_it_is_lost(pair: Pair) -> None:
    for second in range(10):
        pair.tend(float(second))
        pair.serve()
    for second, is_there in ((10, True), (11, True), (12, False)):
        pair.tend(float(second))
        assert pair.host.is_there == is_there
    assert pair.lost == []
    pair.tend(13.0)
    assert len(pair.lost) == 1


def looks(pair: Pair, answers: Sequence[float], last: int) -> list[tuple[bool, bool]]:
    """Look at a host each second from 10 to the last, while its agent answers at these instants.

    Returns:
        Of each look, whether the host is there, and whether it is lost.
    """
    found = []
    for instant in sorted([*answers, *range(10, last + 1)]):
        if instant in answers:
            pair.serve()
            pair.head_clock.now = instant
            pair.host.pump()
        else:
            pair.tend(float(instant))
            found.append((pair.host.is_there, bool(pair.lost)))
    return found


@pytest.mark.parametrize("round_trip_s", [0.00005, 0.0002, 0.02, 0.2, 0.4])
def test_r15_silence_is_found_at_the_same_look_over_any_path(pair: Pair, round_trip_s: float) -> None:
    found = looks(pair, [10.0 + round_trip_s], 13)
    assert found == [(True, False), (True, False), (False, False), (False, True)]


@pytest.mark.parametrize("begins_at", [10.9999, 11.0, 11.3, 11.8, 11.9999])
def test_r15_a_host_that_stands_still_for_a_second_is_not_lost(pair: Pair, begins_at: float) -> None:
    """Its answers come at once before that, and 200 ms late then."""
    before = [second + 0.0002 for second in (10, 11) if second + 0.0002 < begins_at]
    found = looks(pair, [*before, begins_at + 1.2, 13.2], 14)
    assert not any(is_lost for _, is_lost in found)
    assert found[-1] == (True, False)


def test_r15_what_a_host_has_left_is_asked_each_second(pair: Pair) -> None:
    """The stages of another host may have to find room there."""
    before = pair.host.resources().free_bytes
    pair.serve()
    pair.own.free_bytes = 5
    pair.tend(1.0)
    pair.serve()
    assert before != 5
    assert pair.host.resources().free_bytes == 5


def test_r15_log_lines_of_the_host_come_to_the_head(pair: Pair) -> None:
    said = LogLines(lines=[("stage 1", "a warning"), ("", "its own")], num_dropped=2)
    pair.log.lines.append(said)
    pair.serve()
    pair.host.pump()
    assert pair.logged == [said]


def test_g1_silence_counts_from_when_the_agent_was_heard_and_not_from_the_look_before(pair: Pair) -> None:
    pair.tend(0.0)
    pair.head_clock.now = 0.9
    pair.serve()
    pair.host.pump()
    for now in (1.0, 2.0, 3.0):
        pair.tend(now)
        assert not pair.lost
    pair.tend(4.0)
    assert pair.lost


def test_g1_heartbeats_keep_both_sides_content(pair: Pair) -> None:
    for second in range(100):
        pair.tend(float(second))
        pair.serve()
    assert pair.host.is_there
    assert pair.agent.failure is None


def test_g1_a_silent_head_is_left_by_its_agent(pair: Pair) -> None:
    for _ in range(round(HEAD_LIMIT_S)):
        pair.serve()
    assert pair.agent.failure is None
    pair.serve()
    pair.serve()
    assert "the head has sent nothing" in str(pair.agent.failure)


def test_offers_within_the_host_are_its_own_and_to_others_what_its_agent_said(pair: Pair) -> None:
    assert pair.host.offers(LINK, "desk") == ["ring"]
    assert pair.host.offers(PlanNeed(), "tower") == ["ring", "tls"]


def test_alive_is_enough_for_a_member_to_count_as_heard(pair: Pair) -> None:
    member, own = pair.start()
    own.say(Alive())
    pair.serve()
    member.read_status()
    assert member.has_spoken
    assert MemoryHandle(number=1) != HeldEnd(number=1)


def test_the_clock_of_a_host_is_known_from_its_answers_and_may_begin_anew(pair: Pair) -> None:
    assert pair.host.clocks() == []
    pair.clock.now = 5000.0
    pair.tend(10.0)
    pair.serve()  # at 5001
    pair.head_clock.now = 10.004
    pair.host.pump()
    (clock,) = pair.host.clocks()
    assert clock.host == "desk"
    assert clock.offset_ns == pytest.approx((10.002 - 5001) * 1e9, abs=1000)
    assert clock.error_ns == pytest.approx(2e6, abs=1000)
    pair.tend(20.0)
    (later,) = pair.host.clocks()
    assert later.offset_ns == clock.offset_ns
    assert later.error_ns > clock.error_ns, "clocks drift"
    pair.head_wire.give_up("it was reset.")
    ends = socket.socketpair()
    pair.host.attach(AgentWire(ends[0], ToHead), AgentHello(resources=pair.own.resources(), kinds=[]))
    assert pair.host.clocks() == [later], "what is known stays until it says something else"
    agent: AgentWire[ToAgent] = AgentWire(ends[1], ToAgent)
    pair.tend(30.0)
    (question,) = (message for message in agent.receive() if isinstance(message, AskClock))
    agent.send(ToldClock(asked_ns=question.asked_ns, heard_ns=7, replied_ns=7))  # it was started a moment ago
    pair.head_clock.now = 30.5
    pair.host.pump()
    (clock,) = pair.host.clocks()
    assert clock.offset_ns == pytest.approx(30.25e9, abs=1000)
    agent.close()


def says(pair: Pair, *messages: msgspec.Struct) -> None:
    """The agent says something, as a worker might that is not ours."""
    for message in messages:
        pair.agent._wire.send(message)
    pair.host.pump()


def test_r15_a_rank_that_is_ready_and_does_not_say_what_it_has_loaded_loses_its_host(pair: Pair) -> None:
    member, _ = pair.start()
    says(pair, Said(number=1, event=Ready(epoch=0, rank=None)))
    assert member.read_status() == []
    assert not member.is_ready
    (failure,) = pair.lost
    assert isinstance(failure, ProtocolError)
    assert "stage 1 is ready but does not report what it has loaded" in failure.message
    assert (member.exit_code, member.end().kind) == (1, StageLostError.__name__)


def test_a_measuring_process_is_ready_without_having_loaded_a_rank(pair: Pair) -> None:
    config = MeasureConfig(rank=rank_config(), num_rows=[1], context=1, prefill_tokens=1, case_s=1.0)
    member = pair.host.start_measuring(config, "the measuring of stage 1")
    pair.serve()
    pair.own.members[-1].say(Ready())
    pair.serve()
    member.read_status()
    assert member.is_ready
    assert pair.lost == []


def test_r15_an_error_while_a_message_is_taken_loses_that_host_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, _ = pair.start()

    def fail(message: ToHead) -> None:
        raise OverflowError("a number of the worker\x1b[2J")

    monkeypatch.setattr(pair.host, "_take", fail)
    says(pair, Said(number=1, event=Alive()))
    (failure,) = pair.lost
    assert isinstance(failure, ProtocolError)
    assert "OverflowError" in failure.message
    assert failure.message.isprintable()
    assert failure.remedy
    assert member.exit_code == 1
    assert not pair.host.is_there


def test_r15_an_error_while_an_event_is_handled_loses_that_host_alone(pair: Pair) -> None:
    def handle(member: Member, event: StatusEvent) -> None:
        raise KeyError("of the supervisor")

    watch = MemberWatch(handle)
    member, own = pair.start()
    watch.add(member)
    own.say(Alive())
    pair.serve()
    watch.hear(member)
    assert [type(failure) for failure in pair.lost] == [ProtocolError]
    assert member.exit_code == 1
    watch.reap(member)
    mine = StandInMember(pair.own, "stage 0", 0, 0)  # with a process of this host it is our own bug
    watch.add(mine)
    mine.say(Alive())
    with pytest.raises(KeyError):
        watch.hear(mine)
    mine.leave(0)
    watch.close()


def test_r15_text_of_a_worker_cannot_steer_a_terminal(pair: Pair) -> None:
    evil, shown = "\x1b[2J\nlost: all\r", "\\x1b[2J\\nlost: all\\r"
    member, _ = pair.start()
    error = ErrorInfo(kind="PenstockError", message=evil, remedy=evil)
    rank = msgspec.structs.replace(LOADED, kernels=evil, numeric_class=evil)
    says(
        pair,
        Started(number=1, identity=evil),
        Said(number=1, event=Ready(rank=rank)),
        Said(
            number=1,
            event=LinkJudged(
                sender=evil, receiver=evil, is_slow=True, bytes_per_s=1.0, measured_bytes_per_s=1.0
            ),
        ),
        Said(number=1, event=ChildFailed(error=error, trace="line 1\n  line 2\x1b[2J\n")),
        Ended(number=1, exit_code=1, error=error),
    )
    ready, judged, failed = member.read_status()
    assert member.identity == f"{shown} on desk"
    assert (ready.rank.kernels, ready.rank.numeric_class) == (shown, shown)
    assert (judged.sender, judged.receiver) == (shown, shown)
    assert (failed.error.message, failed.error.remedy) == (shown, shown)
    assert failed.trace == "line 1\n  line 2\\x1b[2J\n"
    assert member.end().message == shown


def test_r15_a_text_of_a_worker_has_a_bounded_length() -> None:
    error = ErrorInfo(kind="PenstockError", message="x" * 100_000)
    clean = cleaned(ChildFailed(error=error, trace="line\n" * 100_000))
    assert len(clean.error.message) < 3000
    assert 10 < clean.trace.count("\n") < 100
    assert cleaned(Alive()) == Alive()


def test_r15_answers_that_nobody_has_asked_for_are_not_kept(pair: Pair) -> None:
    peer = PeerName(cluster="0" * 32, host="attic", role="agent")
    failed = ErrorInfo(kind="PeerError", message="no\x07")
    pair.serve()
    says(pair, *(ScoutFailed(number=number, error=failed) for number in range(1, 100)))
    assert pair.host.scout_answers == {}
    pair.host.tell(SurveyHost(number=7, peer=peer, ways=[]))
    says(pair, *(ScoutFailed(number=number, error=failed) for number in range(100)))
    assert list(pair.host.scout_answers) == [7]
    answer = pair.host.scout_answers[7]
    assert isinstance(answer, ScoutFailed)
    assert answer.error.message == "no\\x07"


def test_r15_a_member_says_no_more_than_is_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_host, "MOST_UNREAD", 3)
    member, _ = pair.start()
    says(pair, *(Said(number=1, event=Alive()) for _ in range(3)))
    assert len(member.read_status()) == 3
    says(pair, *(Said(number=1, event=Alive()) for _ in range(4)))
    assert isinstance(pair.lost[0], ProtocolError)
    assert member.exit_code == 1


@pytest.mark.parametrize(
    ("exit_code", "told"), [(-9, "signal 9 (SIGKILL)"), (-35, "signal 35."), (-200, "signal 200.")]
)
def test_r15_a_member_that_was_killed_by_any_signal_is_named_with_it(
    pair: Pair, exit_code: int, told: str
) -> None:
    member, own = pair.start()
    own.leave(exit_code)
    pair.serve()
    member.read_status()
    assert told in member.end().message
