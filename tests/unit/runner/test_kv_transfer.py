"""Orders carried out by a rank: blocks into the store and back, whatever the store does."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import pytest
import torch
from torch import Tensor

from fakes import FakeClock
from penstock.attention.block_codec import SlotCodec
from penstock.attention.metadata import LayerKV
from penstock.batch import ALL_BLOCKS, NO_STORE_USE, OrdersDone, StoreUse, TierOrder
from penstock.errors import StoreError
from penstock.kvstore.guard import MAX_FAILURES, GuardedStore
from penstock.kvstore.host_tier import HostTier, NoStore, block_bytes
from penstock.kvstore.names import record_key
from penstock.kvstore.store import MemoryStore
from penstock.runner.kv_transfer import AWAIT_S, DEADLINE_S, SAVE_AT_ONCE, KVTransfer

LAYERS, HEADS, BLOCK, WIDTH, BLOCKS = 3, 2, 4, 5, 12
SPACE = bytes(16)
NAMES = [bytes([number]) * 32 for number in range(20)]


def layers(seed: int | None) -> list[LayerKV]:
    """Filled, or zeros."""
    source = torch.Generator().manual_seed(seed or 0)

    def slots() -> Tensor:
        filled = torch.randn(BLOCKS * BLOCK, HEADS, WIDTH, generator=source)
        return torch.zeros_like(filled) if seed is None else filled

    return [LayerKV(key=slots(), value=slots()) for _ in range(LAYERS)]


def codec(num_heads: int = HEADS) -> SlotCodec:
    return SlotCodec(num_heads=num_heads, num_parts=2, width=WIDTH, dtype=torch.float32, block_size=BLOCK)


class SlowStore(MemoryStore):
    """Answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def get(self, keys: object) -> list[bytes | None]:
        self.may_go_on.wait(60)
        return super().get(keys)  # type: ignore[arg-type]


class LayerByLayer(MemoryStore):
    """Gives one layer after the other, each when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_give = [threading.Event() for _ in range(LAYERS)]

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        layer = int.from_bytes(keys[0][-4:-2], "big")
        self.may_give[layer].wait(60)
        return super().get(keys)


class BrokenStore(MemoryStore):
    def put(self, records: object) -> None:
        raise StoreError("no room.")


@contextmanager
def transfer(
    store: MemoryStore,
    kv: list[LayerKV],
    first_layer: int = 0,
    clock: Callable[[], float] = time.monotonic,
    write_bytes_per_s: int = 0,
    tier: GuardedStore | None = None,
) -> Iterator[KVTransfer]:
    made = KVTransfer(
        tier or GuardedStore(store),
        codec(),
        kv,
        first_layer=first_layer,
        first_head=0,
        namespace=SPACE,
        write_bytes_per_s=write_bytes_per_s,
        clock=clock,
    )
    with closing(made):
        yield made


def answers(one: KVTransfer) -> dict[int, bool]:
    """Of all that was submitted."""
    found: dict[int, bool] = {}
    while one.is_busy:
        told = one.collect()
        if told is not None:
            found |= dict.fromkeys(told.done, True) | dict.fromkeys(told.failed, False)
    return found


def stores(*blocks: int) -> list[TierOrder]:
    return [TierOrder(number, False, block, NAMES[number]) for number, block in enumerate(blocks)]


def block_of(kv: list[LayerKV], block: int) -> Tensor:
    span = slice(block * BLOCK, (block + 1) * BLOCK)
    return torch.stack([torch.stack([layer.key[span], layer.value[span]]) for layer in kv])


def test_h5_h6_blocks_go_to_the_store_and_come_back_to_other_places() -> None:
    store, full, empty = MemoryStore(), layers(seed=1), layers(seed=None)
    count = SAVE_AT_ONCE + 2
    with transfer(store, full) as one:
        one.submit_orders(stores(*range(count)))
        assert answers(one) == dict.fromkeys(range(count), True)
    assert len(store.records) == count * LAYERS * HEADS
    assert record_key(SPACE, NAMES[0], LAYERS - 1, HEADS - 1) in store.records
    with transfer(store, empty) as one:
        one.submit_orders([TierOrder(100 + n, True, (n + 1) % BLOCKS, NAMES[n]) for n in range(count)])
        assert answers(one) == dict.fromkeys(range(100, 100 + count), True)
    for number in range(count):
        assert torch.equal(block_of(empty, (number + 1) % BLOCKS), block_of(full, number))


def test_d15_two_stages_of_the_same_model_share_nothing_and_one_reads_what_both_wrote() -> None:
    store, full, empty = MemoryStore(), layers(seed=1), layers(seed=None)
    for first, own in ((0, full[:1]), (1, full[1:])):
        with transfer(store, own, first_layer=first) as one:
            one.submit_orders(stores(3))
            answers(one)
    with transfer(store, empty) as one:
        one.submit_orders([TierOrder(0, True, 5, NAMES[0])])
        assert answers(one) == {0: True}
    assert torch.equal(block_of(empty, 5), block_of(full, 3))


def test_h13_a_part_that_is_missing_fails_the_load() -> None:
    store, full, empty = MemoryStore(), layers(seed=1), layers(seed=None)
    with transfer(store, full) as one:
        one.submit_orders(stores(0, 1))
        answers(one)
    del store.records[record_key(SPACE, NAMES[0], 1, 0)]
    with transfer(store, empty) as one:
        one.submit_orders([TierOrder(n, True, n, NAMES[n]) for n in range(3)])
        assert answers(one) == {0: False, 1: True, 2: False}
    assert not block_of(empty, 2).any()
    assert torch.equal(block_of(empty, 1), block_of(full, 1))


def test_r9_a_store_that_takes_nothing_fails_the_order() -> None:
    with transfer(BrokenStore(), layers(seed=1)) as one:
        one.submit_orders(stores(0))
        assert answers(one) == {0: False}


@pytest.mark.parametrize("is_load", [False, True])
def test_r9_a_copy_that_cannot_be_made_fails_its_orders_and_no_later_ones(
    is_load: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a device whose memory is taken for a moment."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with transfer(MemoryStore(), layers(seed=1)) as one:
        one.submit_orders(stores(0))
        assert answers(one) == {0: True}
        with monkeypatch.context() as patched:
            patched.setattr(one._codec, "import_blocks" if is_load else "export_blocks", fail)
            one.submit_orders([TierOrder(number, is_load, number, NAMES[0]) for number in (1, 2)])
            assert answers(one) == {1: False, 2: False}
        assert "out of memory" in caplog.text
        one.submit_orders([TierOrder(3, is_load, 3, NAMES[0])])
        assert answers(one) == {3: True}


def test_r4_orders_of_an_epoch_that_is_over_are_not_carried_out() -> None:
    """Though the store has not answered yet; what it says later goes nowhere."""
    store, full, empty = SlowStore(), layers(seed=1), layers(seed=None)
    with transfer(store, full) as one:
        one.submit_orders(stores(0, 1))
        answers(one)
    with transfer(store, empty) as one:
        one.submit_orders([TierOrder(n, True, n, NAMES[n]) for n in range(2)])
        one.reset()
        assert not one.is_busy
        assert one.collect() is None
        store.may_go_on.set()
        one.submit_orders([TierOrder(7, True, 5, NAMES[1])])
        assert answers(one) == {7: True}, "and later ones are"
    assert not block_of(empty, 0).any()
    assert not block_of(empty, 1).any()


def test_r9_a_store_that_does_not_answer_fails_orders_in_the_end() -> None:
    store, empty, clock = SlowStore(), layers(seed=None), FakeClock()
    with transfer(store, layers(seed=1)) as one:
        one.submit_orders(stores(0, 1, 2))
        answers(one)
    with transfer(store, empty, clock=clock) as one:
        one.submit_orders([TierOrder(n, True, n, NAMES[n]) for n in range(2)])
        assert one.collect() is None
        clock.advance(DEADLINE_S + 1)
        one.submit_orders([TierOrder(2, True, 2, NAMES[2])])
        told = one.collect()
        assert told == OrdersDone(done=[], failed=[0, 1])
        store.may_go_on.set()
        assert answers(one) == {2: True}
    assert not block_of(empty, 0).any(), "the block is somebody else's by now"


@pytest.mark.parametrize("size", [0, 1])
def test_r9_a_record_of_another_size_is_no_record(size: int) -> None:
    store = MemoryStore()
    GuardedStore(store).put(
        {
            record_key(SPACE, NAMES[0], layer, head): bytes(size)
            for layer in range(LAYERS)
            for head in range(HEADS)
        }
    )
    with transfer(store, layers(seed=None)) as one:
        one.submit_orders([TierOrder(0, True, 0, NAMES[0])])
        assert answers(one) == {0: False}


def test_a_rank_tells_what_it_has_done_with_the_store_since_it_told_last() -> None:
    store, clock = MemoryStore(), FakeClock()

    def use_of(one: KVTransfer, orders: list[TierOrder]) -> StoreUse:
        one.submit_orders(orders)
        total = NO_STORE_USE
        while one.is_busy:
            answer = one.collect()
            total = total if answer is None else total.plus(answer.use)
        return total

    block_bytes = LAYERS * HEADS * codec().record_bytes
    with transfer(store, layers(seed=1), clock=clock) as one:
        assert use_of(one, stores(0, 1)) == StoreUse(bytes_written=2 * block_bytes)
        loaded = use_of(one, [TierOrder(7, True, 3, NAMES[0])])
        assert loaded == StoreUse(bytes_read=block_bytes, records_read=LAYERS * HEADS)
        key = record_key(SPACE, NAMES[1], 0, 0)
        store.records[key] = store.records[key][:-1]
        bad = use_of(one, [TierOrder(8, True, 4, NAMES[1])])
        assert bad == StoreUse(bytes_read=codec().record_bytes, records_read=1, verify_failures=1), (
            "further layers are not asked"
        )


def test_a_rank_tells_again_in_every_epoch_that_its_store_is_switched_off() -> None:
    with transfer(BrokenStore(), layers(seed=1)) as one:
        for _ in range(MAX_FAILURES):
            one.submit_orders(stores(0))
            answers(one)
        one.reset()
        one.submit_orders(stores(0))
        while (told := one.collect()) is None:
            pass
        assert told.use == StoreUse(switched_off=1)
        one.submit_orders(stores(0))
        while (told := one.collect()) is None:
            pass
        assert told.use == NO_STORE_USE


def test_h4_a_step_reads_each_layer_when_it_is_there_and_not_before() -> None:
    store, full, empty = LayerByLayer(), layers(seed=1), layers(seed=None)
    with transfer(store, full) as one:
        one.submit_orders(stores(0, 1))
        answers(one)
    reached: queue.SimpleQueue[int] = queue.SimpleQueue()
    with transfer(store, empty, clock=FakeClock()) as one:
        one.submit_orders([TierOrder(n, True, n + 3, NAMES[n]) for n in range(2)])

        def step() -> None:
            wait = one.layers_of([0, 1, 99])  # nobody knows the last: it is answered
            for layer in range(LAYERS):
                wait(layer)
                reached.put(layer)

        thread = threading.Thread(target=step)
        thread.start()
        for layer in range(LAYERS):
            assert reached.empty()
            store.may_give[layer].set()
            assert reached.get(timeout=60) == layer
            for block in (0, 1):
                assert torch.equal(
                    block_of(empty, block + 3)[: layer + 1], block_of(full, block)[: layer + 1]
                )
        thread.join()
        assert answers(one) == {0: True, 1: True}


def test_h4_layers_that_do_not_come_hold_a_step_up_for_so_long_only() -> None:
    """All of them together."""
    store, clock = LayerByLayer(), FakeClock()
    with transfer(store, layers(seed=1)) as one:
        one.submit_orders(stores(0, 1))
        answers(one)
    with transfer(store, layers(seed=None), clock=clock) as one:
        one.submit_orders([TierOrder(n, True, n, NAMES[n]) for n in range(2)])
        wait = one.layers_of([0])
        store.may_give[0].set()
        wait(0)
        clock.advance(AWAIT_S + 0.1)
        wait(1)
        told = one.collect()
        assert told is not None
        assert (told.done, told.failed, told.late) == ([], [], [0])
        for event in store.may_give:
            event.set()
        assert answers(one) == {1: True}, "which no step has waited for"


def test_r4_an_order_of_another_core_that_has_its_number_is_another_order() -> None:
    """Ranks outlive a core; the thread may be in the midst of what the old one has ordered."""
    store, empty = LayerByLayer(), layers(seed=None)
    with transfer(store, layers(seed=1)) as one:
        one.submit_orders(stores(0))
        answers(one)
    store.may_give[0].set()
    with transfer(store, empty) as one:
        one.submit_orders([TierOrder(0, True, 5, NAMES[0])])
        one.layers_of([0])(0)
        one.reset()
        before = block_of(empty, 5)
        one.submit_orders([TierOrder(0, True, 9, NAMES[3])])  # which nobody has stored
        for event in store.may_give:
            event.set()
        assert answers(one) == {0: False}
    assert torch.equal(block_of(empty, 5), before), "it is somebody else's by now"
    assert not block_of(empty, 9).any()


def test_h4_whoever_waits_for_a_layer_of_an_epoch_that_is_over_goes_on() -> None:
    store = LayerByLayer()
    with transfer(store, layers(seed=1)) as one:
        one.submit_orders(stores(0))
        answers(one)
    with transfer(store, layers(seed=None), clock=FakeClock()) as one:
        one.submit_orders([TierOrder(0, True, 0, NAMES[0])])
        thread = threading.Thread(target=one.layers_of([0]), args=(0,))
        thread.start()
        one.reset()
        thread.join(60)
        assert not thread.is_alive()
        for event in store.may_give:
            event.set()


def test_h2_what_is_to_be_stored_leaves_steps_their_bandwidth_and_holds_up_no_load() -> None:
    store, kv, clock = MemoryStore(), layers(seed=1), FakeClock()
    batch_bytes = SAVE_AT_ONCE * LAYERS * HEADS * codec().record_bytes
    with transfer(store, kv, clock=clock, write_bytes_per_s=batch_bytes) as one:
        one.submit_orders(stores(*range(SAVE_AT_ONCE), 8, 9))
        found: list[int] = []
        while len(found) < SAVE_AT_ONCE:
            told = one.collect()
            found += told.done if told is not None else []
        one.submit_orders([TierOrder(50, True, 11, NAMES[0])])
        while 50 not in found:
            told = one.collect()
            found += told.done if told is not None else []
        assert sorted(found) == [*range(SAVE_AT_ONCE), 50], "the rest is not due"
        clock.advance(1.0)
        one.submit_orders([TierOrder(51, True, 11, NAMES[0])])  # whoever waits looks at the clock again
        assert set(answers(one)) == {8, 9, 51}


def test_h9_blocks_that_are_given_up_leave_host_memory_before_the_orders_that_follow() -> None:
    """Issue 25, point 7: with room for two blocks the rank itself would give up another one."""
    size = block_bytes(LAYERS * HEADS, codec().record_bytes)
    tier = HostTier(NoStore(), 2 * size)
    with transfer(MemoryStore(), layers(seed=1), tier=tier) as one:
        one.submit_orders(stores(0))
        assert answers(one) == {0: True}
        one.submit_orders([TierOrder(1, False, 1, NAMES[1])])
        assert answers(one) == {1: True}
        one.forget_blocks([NAMES[1], NAMES[9]])
        one.reset()  # memory outlives an epoch: what is given up is given up
        one.submit_orders([TierOrder(2, False, 2, NAMES[2])])
        assert answers(one) == {2: True}
        assert tier.use().host_bytes_used == 2 * size
        one.submit_orders([TierOrder(10 + n, True, 5 + n, NAMES[n]) for n in range(3)])
        assert answers(one) == {10: True, 11: False, 12: True}


def test_h16_a_flush_of_the_store_writes_nothing_back() -> None:
    """Ranks drop what host memory has, also blocks whose names another core has known; the next are kept."""
    store = MemoryStore()
    tier = HostTier(store, 64 * block_bytes(LAYERS * HEADS, codec().record_bytes), writes_back=True)
    with transfer(store, layers(seed=1), tier=tier) as one:
        one.submit_orders(stores(0))
        assert answers(one) == {0: True}
        one.forget_blocks([ALL_BLOCKS, NAMES[0]])
        one.submit_orders([TierOrder(1, False, 1, NAMES[1])])
        assert answers(one) == {1: True}
        assert store.records == {}
    assert {key[len(SPACE) :][:32] for key in store.records} == {NAMES[1]}, "at the end"


def test_h2_loads_go_before_what_is_to_be_stored() -> None:
    """Somebody waits for them."""
    store, kv = SlowStore(), layers(seed=1)
    with transfer(store, kv) as one:
        one.submit_orders(stores(0))
        answers(one)
        one.submit_orders([TierOrder(1, True, 1, NAMES[0])])  # the store holds this one up
        one.submit_orders([TierOrder(2 + n, False, n, NAMES[2 + n]) for n in range(2 * SAVE_AT_ONCE)][:10])
        one.submit_orders([TierOrder(50, True, 11, NAMES[0])])
        store.may_go_on.set()
        found: list[int] = []
        while one.is_busy:
            told = one.collect()
            found += told.done if told is not None else []
    assert found[:2] == [1, 50]
    assert len(found) == 12
