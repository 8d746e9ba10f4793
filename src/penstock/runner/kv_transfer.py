"""Copies blocks between a rank's KV cache and the store, beside its steps.

    plan with orders ──submit──▶ thread: export + put, or get + import ──▶ answers ──collect──▶ core
    blocks given up ──forget──▶ thread: out of host memory, before the orders of the same plan

The stage loop submits the orders of a plan when all steps before it have run, so that a block to be stored
has its content. The core keeps every block of an order until all ranks have answered, so that no step writes
to it. A step may read a block that is being loaded only if it waits for each layer (`layers_of`). A store
that does not work makes orders fail, and nothing else. If a store does not answer at all, the orders fail at
their deadline. From then on the core may give the block to a request, so that this module no longer touches
it, whatever the store still answers.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.attention.block_codec import BlockCodec
from penstock.attention.metadata import AnyKV
from penstock.batch import ALL_BLOCKS, OrderResult, OrdersDone, OrderStatus, TierOrder
from penstock.kvstore.found import some_at_a_time
from penstock.kvstore.guard import GuardedStore
from penstock.kvstore.meter import StoreMeter
from penstock.kvstore.names import record_key
from penstock.models.interfaces import BeforeLayer

SAVE_AT_ONCE = 8  # blocks that are copied to the store in one go, with all layers
LOAD_AT_ONCE = 256  # blocks whose records of one layer are got from the store in one go
DEADLINE_S = 10.0  # of an order, from its submission: the time for orders before it is included
AWAIT_S = 1.0  # the longest wait of a step, for all layers that are being loaded: later steps wait, too
LEAVE_S = 2.0  # for the thread to end

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """An order that is not answered yet.

    Attributes:
        deadline: clock time after which the order fails.
        num_layers: number of the rank's layers that are loaded already.
    """

    order: TierOrder
    deadline: float
    num_layers: int = 0


class _Waiting:
    """The orders that have not been begun: loads go first, and saves keep within a rate of bytes."""

    def __init__(self, write_bytes_per_s: int) -> None:
        self._write_bytes_per_s = write_bytes_per_s
        self._loads: deque[Sequence[TierOrder]] = deque()
        self._saves: deque[Sequence[TierOrder]] = deque()
        self._save_at = -math.inf  # the earliest clock time of the next save

    def add(self, orders: Sequence[TierOrder]) -> None:
        if loads := [order for order in orders if order.is_load]:
            self._loads.append(loads)
        self._saves.extend(some_at_a_time([order for order in orders if not order.is_load], SAVE_AT_ONCE))

    def due_in(self, now: float) -> float:
        """Return the seconds until something may begin; infinite if there is nothing."""
        if self._loads:
            return 0.0
        return max(0.0, self._save_at - now) if self._saves else math.inf

    def take(self) -> Sequence[TierOrder]:
        """Remove and return orders of one kind, loads first."""
        return (self._loads or self._saves).popleft()

    def saved(self, num_bytes: int, now: float) -> None:
        """Count bytes that were taken out of the cache, which delays the next save."""
        if self._write_bytes_per_s:
            self._save_at = now + num_bytes / self._write_bytes_per_s

    def clear(self) -> None:
        self._loads.clear()
        self._saves.clear()


class KVTransfer:
    """The transfer of blocks between a rank's KV cache and the store, in a thread of its own.

    Args:
        store: the store; closed with this.
        codec: turns a block of one layer into the store's records, and back.
        kv: the KV cache of the rank's own layers, in order.
        first_layer: the number that the first of these layers has in the model.
        first_head: the number that the rank's first key-value head has in the model.
        namespace: the namespace of all records in the store.
        write_bytes_per_s: most bytes copied out of the cache per second, so that enough of the memory's
            bandwidth is left for steps; 0: no limit. Loads are never delayed.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: GuardedStore,
        codec: BlockCodec,
        kv: Sequence[AnyKV],
        *,
        first_layer: int,
        first_head: int,
        namespace: bytes,
        write_bytes_per_s: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._meter = StoreMeter(store)
        self._codec, self._kv = codec, list(kv)
        self._first_layer, self._first_head, self._namespace = first_layer, first_head, namespace
        self._clock = clock
        self._lock = threading.Condition()  # guards the fields below, and blocks while they are copied
        self._open: dict[int, _Open] = {}  # by the order's number
        self._waiting = _Waiting(write_bytes_per_s)
        self._given_up: list[bytes] = []  # names; kept at the end of an epoch, as host memory outlives it
        self._is_closed = False
        self._answers: deque[OrderResult] = deque()
        self._thread = threading.Thread(target=self._run, name="kv transfer", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether orders are not answered yet, or answers not collected."""
        return bool(self._open or self._answers)

    def submit_orders(self, orders: list[TierOrder]) -> None:
        """Queue orders for the thread, without waiting; loads go first, since a request waits for them.

        An order that has not been carried out after `DEADLINE_S` fails.
        """
        with self._lock:
            deadline = self._clock() + DEADLINE_S
            self._open.update({order.order: _Open(order, deadline) for order in orders})
            self._waiting.add(orders)
            self._lock.notify_all()

    def forget_blocks(self, names: Sequence[bytes]) -> None:
        """Queue the removal of blocks from host memory, by their names; it is done before any later order.

        `ALL_BLOCKS` among the names stands for all blocks. These are not written to the store.
        """
        with self._lock:
            self._given_up += names
            self._lock.notify_all()

    def collect(self) -> OrdersDone | None:
        """Return the outcomes of orders since the last call, and how the store was used; None: no outcomes.

        Orders past their deadline fail now, and are among the outcomes. The call does not wait.
        """
        if not self.is_busy:
            return None
        with self._lock:
            now = self._clock()
            self._answer([number for number, found in self._open.items() if now > found.deadline], "failed")
            answers, self._answers = self._answers, deque()
        if not answers:
            return None
        return OrdersDone(
            done=[order for order, status in answers if status == "done"],
            failed=[order for order, status in answers if status == "failed"],
            late=[order for order, status in answers if status == "late"],
            use=self._meter.read(),
        )

    def layers_of(self, orders: Sequence[int]) -> BeforeLayer:
        """Return a function that waits until these orders have loaded the blocks of a layer.

        The function is for one step. It takes the number of a layer on the rank, counted from 0, and does not
        wait for orders that have failed. When a step has waited `AWAIT_S` seconds in all, the orders that it
        still waits for are answered as "late".
        """
        give_up_at = self._clock() + AWAIT_S

        def wait(layer: int) -> None:
            with self._lock:
                while behind := [number for number in orders if self._is_behind(number, layer)]:
                    left_s = give_up_at - self._clock()
                    if left_s <= 0:
                        self._answer(behind, "late")
                        return
                    self._lock.wait(left_s)

        return wait

    def _is_behind(self, number: int, layer: int) -> bool:
        open_order = self._open.get(number)
        return open_order is not None and open_order.num_layers <= layer

    def reset(self) -> None:
        """Drop all orders and answers, since the epoch is over.

        When it returns, no block is being copied, and none will be. Names of blocks to be removed from host
        memory stay queued.
        """
        # Copies into blocks and out of them hold this lock throughout, so that none is under way here.
        with self._lock:
            for waiting in (self._open, self._answers, self._waiting):
                waiting.clear()
            self._meter.forget_state()
            self._lock.notify_all()

    def close(self) -> None:
        """End the thread, and close the store; if the thread is stuck in the store, both are left alone."""
        self.reset()
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        self._thread.join(LEAVE_S)
        # Only if the thread has ended: it may still wait in a call of a store that does not answer.
        if not self._thread.is_alive():
            self._store.close()

    @torch.inference_mode()
    def _run(self) -> None:
        while (job := self._next()) is not None:
            job()

    def _next(self) -> Callable[[], None] | None:
        """Return what to do now, or None if the thread is to end."""
        with self._lock:
            while not self._is_closed:
                # Names come before orders: an order submitted after them may store one of these blocks anew.
                if self._given_up:
                    names, self._given_up = self._given_up, []
                    return functools.partial(self._forget, names)
                pause_s = self._waiting.due_in(self._clock())
                if pause_s <= 0:
                    return functools.partial(self._carry_out, self._waiting.take())
                self._lock.wait(None if math.isinf(pause_s) else pause_s)
            return None

    def _carry_out(self, orders: Sequence[TierOrder]) -> None:
        """Load or save; orders that fail as nobody expects are answered too, and later ones carried out."""
        try:
            (self._load if orders[0].is_load else self._save)(orders)
        except Exception as error:  # such as no memory for a copy: the rank itself goes on
            _logger.warning("blocks of the KV cache could not be copied: %r", error)
            with self._lock:
                self._answer([order.order for order in self._still_open(orders)], "failed")

    def _forget(self, names: Sequence[bytes]) -> None:
        if ALL_BLOCKS in names:
            self._store.discard_all()  # names beside it have nothing left to release
        else:
            self._store.release([key for name in names for key in self._all_keys(name)])

    def _load(self, orders: Sequence[TierOrder]) -> None:
        """Load layer by layer, so that a step can run the first layers while the others come."""
        for layer in range(len(self._kv)):
            for some in some_at_a_time(self._still_open(orders), LOAD_AT_ONCE):
                records = iter(
                    self._store.get([key for order in some for key in self._keys(order.name, layer)])
                )
                fetched = {order: list(itertools.islice(records, self._codec.num_records)) for order in some}
                with self._lock:
                    # Under the lock, and only for open orders: once an order is answered, its block is the
                    # core's again.
                    self._put_in(layer, {order: fetched[order] for order in self._still_open(some)})
                    self._lock.notify_all()
        loaded = self._still_open(orders)
        if loaded:
            self._store.used([key for order in loaded for key in self._all_keys(order.name)])
        with self._lock:
            self._answer([order.order for order in self._still_open(loaded)], "done")

    def _put_in(self, layer: int, fetched: Mapping[TierOrder, Sequence[bytes | None]]) -> None:
        """Copy a layer's records into the blocks of those orders for which all have come; fail the others."""
        size, kv = self._codec.record_bytes, self._kv[layer]
        whole = {
            order: [record for record in records if record is not None and len(record) == size]
            for order, records in fetched.items()
        }
        good = [order for order, records in whole.items() if len(records) == self._codec.num_records]
        bad = [order for order, records in whole.items() if len(records) < self._codec.num_records]
        self._answer([order.order for order in bad], "failed")
        self._codec.import_blocks(
            [(kv, order.block) for order in good], [record for order in good for record in whole[order]]
        )
        for order in good:
            self._open[order.order].num_layers = layer + 1

    def _save(self, orders: Sequence[TierOrder]) -> None:
        taken: list[TierOrder] = []
        records: dict[bytes, bytes] = {}
        for order in orders:
            with self._lock:
                # Under the lock until the block is copied: once an order is answered, its block is the core's
                # again.
                if self._is_open(order):
                    layer_blocks = [(kv, order.block) for kv in self._kv]
                    exported = self._codec.export_blocks(layer_blocks)
                    records |= zip(self._all_keys(order.name), exported, strict=True)
                    taken.append(order)
        self._waiting.saved(len(records) * self._codec.record_bytes, self._clock())
        status: OrderStatus = "done" if records and self._store.put(records) else "failed"
        with self._lock:
            self._answer([order.order for order in self._still_open(taken)], status)

    def _still_open(self, orders: Sequence[TierOrder]) -> list[TierOrder]:
        return [order for order in orders if self._is_open(order)]

    def _is_open(self, order: TierOrder) -> bool:
        """Return whether this very order is open.

        Numbers begin again with another core, and orders of an earlier core are not awaited any more.
        """
        open_order = self._open.get(order.order)
        return open_order is not None and open_order.order is order

    def _answer(self, orders: Sequence[int], status: OrderStatus) -> None:
        for order in orders:
            del self._open[order]
            self._answers.append(OrderResult(order, status))
        if orders:
            self._lock.notify_all()

    def _keys(self, name: bytes, layer: int) -> list[bytes]:
        """Return the keys of the records that this rank has of one layer of a block."""
        return [
            record_key(self._namespace, name, self._first_layer + layer, self._first_head + head)
            for head in range(self._codec.num_records)
        ]

    def _all_keys(self, name: bytes) -> list[bytes]:
        return [key for layer in range(len(self._kv)) for key in self._keys(name, layer)]
