"""A rank without a model: answers plans at a fixed cadence, so that core and API process are measured alone.

Started by `core_step_cost.py` in place of `penstock.rank.process`, with the same arguments and config;
speaks the same messages over the same channels, as the only stage and through one epoch. Needs no torch. From
the environment:

    STUB_RANK_CADENCE_MS   milliseconds from one answered plan to the next; 0 answers at once
    STUB_RANK_COUNTER      a file of 8 bytes: the number of answered plans that had rows
"""

from __future__ import annotations

import argparse
import mmap
import os
import time

from penstock.batch import (
    AllocateKV,
    RankLoaded,
    RankReady,
    ScheduledBatch,
    Shutdown,
    StepResult,
    decode_to_rank,
    encode,
)
from penstock.pipeline.links.channel import MessageChannel
from penstock.pipeline.links.channel_carriers import open_channel
from penstock.process.child import (
    Ready,
    StatusWriter,
    WeightsLoaded,
    enter_child,
    keep_saying_alive,
    leave,
    run_child,
)
from penstock.process.config import RankConfig, RankProcessConfig
from penstock.process.control import CONTROL_OPTION, ControlReader
from penstock.process.endpoints import RankEndpoints

BLOCK_BYTES = 4096
COUNTER_BYTES = 8
NUM_IDS = 256  # sampled ids are below this; any served vocabulary is larger


class StepCounter:
    """A number that another process can read while it grows."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR)
        try:
            self._memory = mmap.mmap(fd, COUNTER_BYTES)
        finally:
            os.close(fd)

    def read(self) -> int:
        return int.from_bytes(self._memory[:COUNTER_BYTES], "little")

    def add(self) -> None:
        self._memory[:COUNTER_BYTES] = (self.read() + 1).to_bytes(COUNTER_BYTES, "little")


class Cadence:
    """Lets a plan pass at most every `period_s`; plans that come late are not made up for."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._next_s = 0.0

    def wait(self) -> None:
        time.sleep(max(0.0, self._next_s - time.monotonic()))
        self._next_s = time.monotonic() + self._period_s


def answer(plan: ScheduledBatch) -> StepResult:
    """An id for every row that wants one; different for each row and step."""
    ids = [[(13 * plan.step_id + 7 * row) % NUM_IDS] for row in plan.sampled_rows]
    return StepResult(
        step_id=plan.step_id,
        epoch=plan.epoch,
        digest=plan.digest,
        token_ids=ids,
        num_rejected=[0] * len(ids),
        logprobs=[None] * len(ids),
    )


def start(config: RankConfig, plans: MessageChannel, status: StatusWriter) -> None:
    """The handshake of a rank that has loaded nothing."""
    blocks = config.num_blocks or config.max_num_seqs * -(-config.max_model_len // config.block_size)
    rank = RankLoaded(
        stage=config.stage,
        max_blocks=blocks,
        block_bytes=BLOCK_BYTES,
        tensor_bytes=0,
        bytes_read=0,
        load_seconds=0.0,
        is_invariant=False,
    )
    plans.send(encode(rank))
    frame = plans.recv(None)
    assert frame is not None
    assert isinstance(decode_to_rank(frame), AllocateKV)
    status.write(Ready(rank=rank))
    plans.send(encode(RankReady(stage=config.stage)))


def serve(plans: MessageChannel, results: MessageChannel, cadence: Cadence, counter: StepCounter) -> None:
    """Answer plans until told to stop."""
    while (frame := plans.recv(None)) is not None:
        plan = decode_to_rank(frame)
        if isinstance(plan, Shutdown):
            return
        assert isinstance(plan, ScheduledBatch)
        if plan.rows:
            cadence.wait()
        results.send(encode(answer(plan)))
        if plan.rows:
            counter.add()


def live(config: RankProcessConfig, status: StatusWriter, options: argparse.Namespace) -> int:
    """From the first word to the end of the only epoch, as `penstock.rank.process` does it."""
    assert config.rank.num_stages == 1
    enter_child("penstock stub stage 0", config)
    keep_saying_alive(status)
    status.write(WeightsLoaded(bytes_read=0, seconds=0.0))
    ends = ControlReader.inherited(options).receive()
    if not isinstance(ends, RankEndpoints):  # it is over before it has begun
        return 0
    assert ends.results is not None
    plans = open_channel(ends.plans, "core - stub stage 0")
    results = open_channel(ends.results, "results")
    cadence = Cadence(float(os.environ.get("STUB_RANK_CADENCE_MS", "0")) / 1000)
    try:
        start(config.rank, plans, status)
        serve(plans, results, cadence, StepCounter(os.environ["STUB_RANK_COUNTER"]))
    finally:
        plans.close()
        results.close()
    return 0


if __name__ == "__main__":
    leave(run_child("stub_rank", None, RankProcessConfig, live, more=[CONTROL_OPTION]))
