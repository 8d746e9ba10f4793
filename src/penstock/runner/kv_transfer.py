"""Copies blocks between a rank's KV cache and the store, beside its steps.

    plan with orders ──submit──▶ thread: export + put, or get + import ──▶ answers ──collect──▶ core

The stage loop submits the orders of a plan when all steps before it have run, so a block that is to be stored
is filled. The core holds every block of an order until all ranks have answered, so nobody writes to it, and
nobody reads what is being loaded. A store that does not work makes orders fail, and nothing else; one that
does not answer at all makes them fail in the end: then the block is the core's again, and is not touched any
more, whatever the store still says.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from penstock.attention.block_codec import BlockCodec
from penstock.attention.metadata import AnyKV
from penstock.batch import OrdersDone, TierOrder
from penstock.kvstore.guard import GuardedStore
from penstock.kvstore.meter import StoreMeter
from penstock.kvstore.names import record_key

AT_ONCE = 8  # blocks that are asked of the store together
DEADLINE_S = 10.0  # of an order; those before it count
LEAVE_S = 2.0  # for the thread to end


class KVTransfer:
    """Args:
    store: where to; closed with this.
    codec, kv: of the rank's own layers, the first of which is `first_layer` of the model.
    first_head: of the model's key-value heads, the first that this rank has.
    namespace: of all its records.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._meter = StoreMeter(store)
        self._codec, self._kv = codec, list(kv)
        self._first_layer, self._first_head, self._namespace = first_layer, first_head, namespace
        self._clock = clock
        self._orders: queue.SimpleQueue[list[TierOrder] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of what follows, and of blocks that are being copied
        self._open: dict[TierOrder, float] = {}  # until when
        self._answers: deque[tuple[int, bool]] = deque()
        self._thread = threading.Thread(target=self._run, name="kv transfer", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether answers are still to come, or to be collected."""
        return bool(self._open or self._answers)

    def submit(self, orders: list[TierOrder]) -> None:
        with self._lock:
            self._open.update(dict.fromkeys(orders, self._clock() + DEADLINE_S))
        for first in range(0, len(orders), AT_ONCE):
            self._orders.put(orders[first : first + AT_ONCE])

    def collect(self) -> OrdersDone | None:
        """What has been answered since the last call, or is too late by now."""
        if not self.is_busy:
            return None
        with self._lock:
            now = self._clock()
            for order in [order for order, deadline in self._open.items() if now > deadline]:
                self._answer(order, False)
            found, self._answers = self._answers, deque()
        if not found:
            return None
        return OrdersDone(
            done=[order for order, is_done in found if is_done],
            failed=[order for order, is_done in found if not is_done],
            use=self._meter.read(),
        )

    def reset(self) -> None:
        """Nobody waits for the answers any more. When it returns no block is being copied, nor will be."""
        with self._lock:
            self._open.clear()
            self._answers.clear()
            self._meter.forget_state()

    def close(self) -> None:
        """Leaves a store alone that does not answer."""
        self.reset()
        self._orders.put(None)
        self._thread.join(LEAVE_S)
        if not self._thread.is_alive():
            self._store.close()

    @torch.inference_mode()
    def _run(self) -> None:
        while (orders := self._orders.get()) is not None:
            wanted = [order for order in orders if order in self._open]
            self._load([order for order in wanted if order.is_load])
            self._save([order for order in wanted if not order.is_load])

    def _load(self, orders: Sequence[TierOrder]) -> None:
        keys = [self._keys(order.name) for order in orders]
        records = iter(self._store.get([key for own in keys for key in own]) if orders else ())
        for order, own in zip(orders, keys, strict=True):
            found = [next(records) for _ in own]
            with self._lock:
                if order in self._open:
                    self._answer(order, self._put_in(order.block, found))

    def _put_in(self, block: int, records: Sequence[bytes | None]) -> bool:
        """Whether all were there, and of the right size; the block holds them then."""
        size = self._codec.record_bytes
        whole = [record for record in records if record is not None and len(record) == size]
        if len(whole) < len(records):
            return False
        self._codec.import_block(self._kv, block, whole)
        return True

    def _save(self, orders: Sequence[TierOrder]) -> None:
        taken: list[TierOrder] = []
        records: dict[bytes, bytes] = {}
        for order in orders:
            with self._lock:
                if order in self._open:
                    records |= self._taken_out(order)
                    taken.append(order)
        is_stored = bool(records) and self._store.put(records)
        with self._lock:
            for order in taken:
                if order in self._open:
                    self._answer(order, is_stored)

    def _taken_out(self, order: TierOrder) -> dict[bytes, bytes]:
        return dict(zip(self._keys(order.name), self._codec.export_block(self._kv, order.block), strict=True))

    def _answer(self, order: TierOrder, is_done: bool) -> None:
        del self._open[order]
        self._answers.append((order.order, is_done))

    def _keys(self, name: bytes) -> list[bytes]:
        """Of the records of a block on this rank, layer by layer."""
        return [
            record_key(self._namespace, name, self._first_layer + layer, self._first_head + head)
            for layer in range(len(self._kv))
            for head in range(self._codec.num_records)
        ]
