"""Orders of plans, and what is told of them between plans."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from penstock.batch import (
    EntryAnswers,
    EntryCall,
    GrammarsBuilt,
    OrdersDone,
    ScheduledBatch,
    Shutdown,
    TierOrder,
    decode_to_core,
    encode,
)
from penstock.pipeline.decision_log import DecisionLog
from penstock.pipeline.links.plan_channel import QueueChannel
from penstock.pipeline.stage import plans_from
from penstock.pipeline.transfer_orders import NoTransfer, TransferOrders

ORDER = TierOrder(4, False, 1, b"name")


class NoBuilds:
    """The builds of a rank that builds no grammars."""

    is_building = False

    def collect(self) -> GrammarsBuilt | None:
        return None


class FakeTransfer:
    """Has done what it was given when it has been asked a few times."""

    def __init__(self) -> None:
        self.given: list[TierOrder] = []
        self.num_asked = 0
        self.heard: list[TierOrder | bytes] = []

    @property
    def is_busy(self) -> bool:
        return bool(self.given)

    def submit_orders(self, orders: list[TierOrder]) -> None:
        self.given += orders
        self.heard += orders

    def forget_blocks(self, names: Sequence[bytes]) -> None:
        self.heard += names

    def collect(self) -> OrdersDone | None:
        self.num_asked += 1
        if not self.given or self.num_asked < 3:
            return None
        done, self.given = [order.order for order in self.given], []
        return OrdersDone(done=done, failed=[])


def test_answers_go_out_while_there_is_no_plan() -> None:
    """A request that waits for its blocks is the only one: no plan comes before the answer has gone."""
    core, rank = QueueChannel.pair()
    orders = TransferOrders(FakeTransfer(), rank, NoBuilds())
    orders.take_orders([ORDER])
    plans = plans_from(rank, orders=orders)

    def answer() -> None:
        """As the core: send the next plan when it has heard of the order."""
        frame = core.recv(60.0)
        assert frame is not None
        assert decode_to_core(frame) == OrdersDone(done=[4], failed=[])
        core.send(encode(DecisionLog().seal(ScheduledBatch(step_id=0))))
        core.send(encode(Shutdown()))

    thread = threading.Thread(target=answer)
    thread.start()
    assert [plan.step_id for plan in plans] == [0]
    thread.join(60)
    assert orders.patience_s is None


def test_h9_what_is_given_up_makes_room_before_the_orders_of_its_plan() -> None:
    transfer = FakeTransfer()
    orders = TransferOrders(transfer, QueueChannel.pair()[1], NoBuilds())
    orders.take_orders([], [b"older"])
    orders.take_orders([ORDER], [b"old"])
    assert transfer.heard == [b"older", b"old", ORDER]


class FakeBuilds:
    """Has built when it has been asked a few times."""

    def __init__(self) -> None:
        self.num_asked = 0

    @property
    def is_building(self) -> bool:
        return self.num_asked < 3

    def collect(self) -> GrammarsBuilt | None:
        self.num_asked += 1
        return GrammarsBuilt(built=[5], failed={}) if self.num_asked == 3 else None


def test_dr5_what_is_built_is_told_while_there_is_no_plan() -> None:
    core, rank = QueueChannel.pair()
    orders = TransferOrders(NoTransfer(), rank, FakeBuilds())
    plans = plans_from(rank, orders=orders)

    def answer() -> None:
        frame = core.recv(60.0)
        assert frame is not None
        assert decode_to_core(frame) == GrammarsBuilt(built=[5], failed={})
        core.send(encode(Shutdown()))

    thread = threading.Thread(target=answer)
    thread.start()
    assert list(plans) == []
    thread.join(60)
    assert orders.patience_s is None


def test_a_rank_without_a_store_refuses_orders() -> None:
    core, rank = QueueChannel.pair()
    orders = TransferOrders(NoTransfer(), rank, NoBuilds())
    orders.take_orders([])
    orders.take_orders([ORDER])
    orders.send_answers()
    frame = core.recv(0)
    assert frame is not None
    assert decode_to_core(frame) == OrdersDone(done=[], failed=[4])
    assert core.recv(0) is None
    assert orders.patience_s is None


class FakeEntries:
    """Has counted when it has been asked a few times."""

    def __init__(self) -> None:
        self.given: list[EntryCall] = []
        self.num_asked = 0

    @property
    def is_busy(self) -> bool:
        return bool(self.given) and self.num_asked < 3

    def carry_out(self, call: EntryCall) -> None:
        self.given.append(call)

    def collect(self) -> EntryAnswers | None:
        self.num_asked += bool(self.given)
        return EntryAnswers(counts={6: 2}) if self.num_asked == 3 else None


def test_g1_calls_about_the_hosts_store_come_between_plans_and_are_answered_there() -> None:
    """They are no plans: the log does not know them."""
    core, rank = QueueChannel.pair()
    entries = FakeEntries()
    orders = TransferOrders(NoTransfer(), rank, NoBuilds(), entries)
    log = DecisionLog()
    call = EntryCall(number=6, what="count", names=[b"name"], share=b"share")
    for message in (log.seal(ScheduledBatch(step_id=0)), call):
        core.send(encode(message))
    plans = plans_from(rank, orders=orders)

    def answer() -> None:
        frame = core.recv(60.0)
        assert frame is not None
        assert decode_to_core(frame) == EntryAnswers(counts={6: 2})
        core.send(encode(log.seal(ScheduledBatch(step_id=1))))
        core.send(encode(Shutdown()))

    thread = threading.Thread(target=answer)
    thread.start()
    assert [plan.step_id for plan in plans] == [0, 1]
    thread.join(60)
    assert entries.given == [call]
    assert orders.patience_s is None
