"""Measures the steps of one rank on its own device, part by part, as `pipeline.stage` would run them.

The weights are those of the checkpoint, in the form in which the rank will hold them. Hidden states are
random, and sampling is greedy. A case is a decode step with some number of rows, or a step with one chunk of
a prompt. All ranks time the cases in the same order, in turns of the same length, so that they load the
machine together, as in service. The time of a case is the lower quartile of its steps: other ranks slow all
steps of a case, while other programs slow only some of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import torch

from penstock.attention.metadata import AnyKV, kv_tensors
from penstock.batch import GREEDY, KNOWN, NewRow, ScheduledBatch
from penstock.models.intermediate import IntermediateTensors, StreamStart
from penstock.pipeline.links.frame import FrameHeader, FrameKind, frame_bytes
from penstock.pipeline.links.link_carriers import open_meeting
from penstock.pipeline.links.ring import SharedMemoryLink
from penstock.pipeline.links.ring_memory import close_handle, create_ring
from penstock.planner.stage_costs import StageCosts, StepCosts
from penstock.process.config import MeasureConfig, RankConfig
from penstock.process.endpoints import MeetingEndpoint
from penstock.rank.loading import (
    available_bytes,
    build_runner,
    device_of,
    dtype_of,
    load_rank,
)
from penstock.rank.memory_probe import MemoryProbe
from penstock.weights.loader import held_bytes

_MAX_KV_BYTES = 256 << 20  # if more is needed, rows share blocks; no processor caches so much
_LINK_TIMEOUT_S = 60.0
_ROUNDS = 2  # turns that each case gets
_MAX_LATE_S = 10.0  # so much later than planned, turns are skipped; but every case gets at least one step

_Step = tuple[float, ...]  # seconds of inputs, embedding, layers, link (both ways) and head


class TimedRank:
    """A rank with some of its layers in memory, ready to be timed.

    Args:
        config: the rank with the layers to load, and the cases to time.
    """

    def __init__(self, config: MeasureConfig) -> None:
        rank = config.rank
        self._config, self._rank = config, rank
        self._device = device_of(rank)
        self._available = available_bytes(self._device)
        self._loaded = loaded = load_rank(rank, lambda done, total: None)
        tokens = max(config.prefill_tokens, config.num_rows[-1] * (config.context + rank.block_size))
        fitting = _MAX_KV_BYTES // loaded.storage.block_bytes
        self._peak_bytes = MemoryProbe().peak_bytes(rank, loaded)
        self._num_blocks = max(1, min(tokens // rank.block_size + 1, fitting))
        kv = loaded.storage.allocate(self._num_blocks)
        _make_resident(kv)
        self._runner = build_runner(rank, loaded, kv)
        width, num_tokens = loaded.spec.hidden_size, rank.max_num_batched_tokens
        hidden_states = torch.randn((num_tokens, width)).to(self._device, dtype_of(rank))
        stream = StreamStart(width, dtype=dtype_of(rank), device=self._device).of(num_tokens)
        # What the stage before would send in the largest step; smaller steps take a slice of it.
        self._received = IntermediateTensors({"hidden_states": hidden_states, "residual": stream})
        self._link = _Loop(rank, self._received)

    @torch.inference_mode()
    def measure(self, meeting: MeetingEndpoint | None) -> StageCosts:
        """Time all cases, in turns, and return the costs.

        A rank skips turns if its steps take so long that it is late. The other ranks of its stage skip the
        same turns, since all ranks of a stage must run the same steps.

        Args:
            meeting: where the ranks of the stage meet to add up tensors; None: the stage has one rank.
        """
        if meeting is not None:
            self._loaded.group.join(open_meeting(meeting, f"stage {self._config.rank.stage}"))
        config, model = self._config, self._loaded.model
        plans = [self._plan([config.context] * count, is_decode=True) for count in config.num_rows]
        plans.append(self._plan([config.prefill_tokens], is_decode=False))
        steps: list[list[_Step]] = [[] for _ in plans]
        late_at = time.monotonic() + config.case_s * len(plans) + _MAX_LATE_S
        for _ in range(_ROUNDS):
            for plan, of_plan in zip(plans, steps, strict=True):
                if self._agree(not of_plan or time.monotonic() < late_at):
                    of_plan += self._steps(plan, config.case_s / _ROUNDS, late_at)
        *decode, prefill = (self._costs(plan, of_plan) for plan, of_plan in zip(plans, steps, strict=True))
        num_layers, storage = self._rank.num_layers, self._loaded.storage
        layer_bytes = held_bytes(model.layers[self._rank.start_layer])
        return StageCosts(
            decode=decode,
            prefill=prefill,
            layer_bytes=layer_bytes,
            end_bytes=held_bytes(model) - num_layers * layer_bytes,
            kv_block_bytes=storage.block_bytes // storage.num_layers,
            block_size=self._rank.block_size,
            available_bytes=self._available,
            num_sharers=self._rank.num_sharers,
            num_ranks=1 if self._device.type == "cuda" else self._rank.tp_size,
            has_kernels=self._loaded.has_kernels,
            peak_bytes=self._peak_bytes,
        )

    def decode_step_s(self) -> float:
        """Return the seconds of one step with a single decode row, without the link. Benchmarks call it."""
        plan = self._plan([self._config.context], is_decode=True)
        inputs, embedding, layers, _, head = self._timed_step(plan)
        return inputs + embedding + layers + head

    def _plan(self, lengths: Sequence[int], *, is_decode: bool) -> ScheduledBatch:
        """Return a plan whose input tokens are all known.

        Args:
            lengths: for each row, the number of tokens that it has after the step.
            is_decode: each row computes its last token, and a token is sampled after it. If false, each row
                computes all its tokens as a chunk of a prompt, and nothing is sampled.
        """
        rows = list(range(len(lengths)))
        num_tokens = [1 if is_decode else length for length in lengths]
        per_row = [-(-length // self._rank.block_size) for length in lengths]
        ids = [index * 7919 % self._loaded.spec.vocab_size for index in range(max(lengths) + 1)]
        known = [length + (not is_decode) for length in lengths]  # a prompt has a token after the chunk
        return ScheduledBatch(
            step_id=0,
            rows=rows,
            num_tokens=num_tokens,
            start_positions=[length - count for length, count in zip(lengths, num_tokens, strict=True)],
            new_blocks=[
                [(row * count + block) % self._num_blocks for block in range(count)]
                for row, count in zip(rows, per_row, strict=True)
            ],
            need_sampled=[is_decode] * len(rows),
            token_from=[KNOWN] * len(rows),
            mtp=dict.fromkeys(rows, int(is_decode)) if self._rank.has_mtp else {},
            new_rows=[
                NewRow(row, 0, str(row), length, ids[:length], GREEDY)
                for row, length in zip(rows, known, strict=True)
            ],
        )

    def _steps(self, plan: ScheduledBatch, seconds: float, late_at: float) -> list[_Step]:
        """Take one turn: run the same step again and again; at least twice, unless the rank is late.

        The first step does not count if others follow, because it does not find its data in the CPU's caches.

        Args:
            seconds: length of the turn.
            late_at: from this time on, the rank is late.
        """
        until = time.monotonic() + seconds
        steps = [self._timed_step(plan)]
        while self._agree(time.monotonic() < until or (len(steps) == 1 and time.monotonic() < late_at)):
            steps.append(self._timed_step(plan))
        return steps[1:] or steps

    def _agree(self, goes_on: bool) -> bool:
        """Return `goes_on` of the stage's first rank, so that all ranks of the stage run the same steps."""
        return bool(self._loaded.group.all_gather(torch.tensor([goes_on], device=self._device))[0])

    def _costs(self, plan: ScheduledBatch, steps: Sequence[_Step]) -> StepCosts:
        """Return the costs of one step of this plan, from the times of all its steps."""
        fixed, embed, layers, link, head = (sorted(part)[len(part) // 4] for part in zip(*steps, strict=True))
        rank = self._rank
        return StepCosts(
            num_tokens=plan.total_tokens,
            layer_s=layers / rank.num_layers,
            fixed_s=fixed,
            embed_s=embed if rank.is_first else 0.0,
            head_s=head if rank.is_last else 0.0,
            link_s=link * (2 - rank.is_first - rank.is_last) / 2,
        )

    def _timed_step(self, plan: ScheduledBatch) -> _Step:
        """Carry out the plan, and return the seconds of each part of the step."""
        runner, rank = self._runner, self._rank
        runner.admit(plan)  # every step admits its rows again, unlike in service; so this is not timed
        runner.rows.append_blocks(plan)
        running = msgspec.structs.replace(plan, new_rows=[], new_blocks=[[]] * len(plan.rows))
        instants = [self._now()]
        batch = runner.complete(runner.begin(running))
        instants.append(self._now())
        tensors = runner.embed(batch) if rank.is_first else self._received[: batch.num_tokens]
        instants.append(self._now())
        tensors = runner.forward(tensors, batch)
        instants.append(self._now())
        self._link.carry(tensors)
        instants.append(self._now())
        if rank.is_last:
            result = runner.sample(tensors, batch)
            if running.mtp:
                runner.with_guesses(result, tensors, batch)
        instants.append(self._now())
        return tuple(after - before for before, after in pairwise(instants))

    def _now(self) -> float:
        """Return the time once the device has done all its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class _Loop:
    """A link from the rank to itself, which carries frames as a link between two stages of a host does.

    Args:
        largest: tensors of the largest step that the link will carry.
    """

    def __init__(self, rank: RankConfig, largest: IntermediateTensors) -> None:
        num_tokens, width = largest["hidden_states"].shape
        size = frame_bytes(max_num_tokens=num_tokens, width=width, itemsize=dtype_of(rank).itemsize)
        handle = create_ring(size, 1)
        self._sender = SharedMemoryLink(handle, "out", _LINK_TIMEOUT_S)
        self._receiver = SharedMemoryLink(handle, "in", _LINK_TIMEOUT_S)
        close_handle(handle)
        self._out = largest.empty_like()["hidden_states"]
        self._dtype = rank.dtype

    def carry(self, tensors: IntermediateTensors) -> None:
        """Send a step's tensors and receive them."""
        carried = tensors["hidden_states"]
        num_tokens, width = carried.shape
        header = FrameHeader(
            epoch=0,
            step_id=0,
            kind=FrameKind.HIDDEN,
            num_tokens=num_tokens,
            width=width,
            dtype=self._dtype,
            num_tensors=1,
            digest=0,
        )
        self._sender.send_frame(header, [carried])
        self._receiver.receive_frame(header, [self._out[:num_tokens]]).wait()


def _make_resident(kv: Sequence[AnyKV]) -> None:
    """Write to all pages of the KV cache, so that each is a page of memory of its own.

    The system maps all pages that were never written to one page of zeros, which is faster to read.
    """
    for layer in kv:
        for memory in kv_tensors(layer):
            memory.zero_()
