"""Measures how much memory the largest step of a rank takes beside weights, before the KV cache is sized.

    weights ─▶ small KV cache, runner ─▶ prompts that fill a plan ─▶ every row decodes and is sampled ─▶ peak

Every rank measures by itself, without waiting. If ranks share a stage, each computes without the tensors of
the others (`TensorGroup.rehearsing`). The small cache stands for the large one that comes: all rows read its
blocks again and again.

- On a GPU the whole plan runs, and torch's allocator says how much memory that took.
- On a CPU a whole plan would take too long. One layer runs, since all layers use the same memory in turn:
  over as many tokens of prompts as it can compute in `REHEARSAL_S`, then over all rows that decode. The
  resident memory of the process says how much that took. Where our kernels run, their outputs lie in memory
  that is allocated at the start, for the largest plan; it is counted as a whole. Where torch makes outputs
  for each step, what was measured is scaled to the tokens of the largest plan.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.batch import KNOWN, LogitChanges, NewRow, RowSampling, ScheduledBatch
from penstock.errors import NotEnoughMemoryError
from penstock.kernels.candidates import HeadOutput, HeadRequest
from penstock.kernels.pages import counted_bytes
from penstock.models.decoder import Decoder
from penstock.models.intermediate import IntermediateTensors
from penstock.process.config import RankConfig
from penstock.process.host_memory import forget_peak, give_back_freed_pages, peak_resident_bytes
from penstock.rank.loading import LoadedRank, available_bytes, build_runner, dtype_of
from penstock.runner.forward_batch import ForwardBatch
from penstock.runner.mtp_guesser import NORMED, NoGuesser
from penstock.sample.sampler import rows_at_once

REHEARSAL_S = 0.05  # for prompts, and again for samples, on a CPU; the fewest tokens may take longer
_NUM_BLOCKS = 64  # of the small cache
_FEWEST_TOKENS, _FEWEST_ROWS = 64, 4  # of the first two runs on a CPU; the second one is timed
_KERNEL_CONTEXT = 512  # tokens that rows attend to: with more our kernels use no more memory
_LOGIT_BYTES = 4
_NUM_LOGPROBS = 20  # the most that a client may ask for

_ANY_SAMPLING = RowSampling(  # takes most memory: whole logits, with penalties and log-probabilities
    temperature=1.0,
    top_k=0,
    top_p=0.9,
    min_p=0.0,
    seed=0,
    min_tokens=0,
    suppressed_ids=[],
    num_logprobs=_NUM_LOGPROBS,
    changes=LogitChanges(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
)


class PeakMeter(Protocol):
    """A meter of memory: it measures by how much the bytes in use rise above their number at `begin`."""

    def begin(self) -> None:
        """Begin to measure: growth counts from the memory that is in use now."""
        ...

    def growth(self) -> int:
        """Return the peak since the last call (or `begin`), in bytes above what was in use at `begin`."""
        ...

    def end(self) -> None:
        """Give freed memory back to the system or the device, so that it is seen to be free."""
        ...


class ResidentMeter:
    """A meter of the resident memory of this process, for a rank on a CPU.

    Args:
        peak: returns the most bytes that were resident since `forget` was last called.
        forget: forgets the peak so far.
    """

    def __init__(
        self, peak: Callable[[], int] = peak_resident_bytes, forget: Callable[[], None] = forget_peak
    ) -> None:
        self._peak, self._forget = peak, forget
        self._begun = 0

    def begin(self) -> None:
        self._forget()
        self._begun = self._peak()

    def growth(self) -> int:
        grown = max(0, self._peak() - self._begun)
        self._forget()
        return grown

    def end(self) -> None:
        give_back_freed_pages()


class DeviceMeter:
    """A meter of the bytes that torch's allocator has reserved on a GPU, gaps between tensors included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun = 0

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self._begun = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def growth(self) -> int:
        torch.cuda.synchronize(self._device)
        grown = max(0, torch.cuda.max_memory_reserved(self._device) - self._begun)
        torch.cuda.reset_peak_memory_stats(self._device)
        return grown

    def end(self) -> None:
        torch.cuda.empty_cache()


def meter_of(config: RankConfig) -> PeakMeter:
    """Return a meter for the memory in which a rank computes.

    On a GPU it measures what torch has reserved there, on a CPU the resident memory of this process.
    """
    if config.device_type == "cuda":
        return DeviceMeter(torch.device(config.device))
    return ResidentMeter()


class NoProbe:
    """A probe that measures nothing, and the interface of probes of a rank's memory.

    It serves a rank that takes the place of a lost one, because such a rank gets as many KV blocks as the
    lost one had. It also serves ranks that are threads on a CPU: nothing says how much of the memory of the
    process one thread takes.
    """

    def peak_bytes(self, config: RankConfig, loaded: LoadedRank) -> int:
        """Return 0, which means that the peak is not known.

        Other probes return the most bytes that the rank's largest plan has in use beside weights and KV
        cache.
        """
        return 0


class MemoryProbe(NoProbe):
    """A probe that runs what the largest plan may have (prompts, decoding, sampling), and measures memory.

    Args:
        meter: measures the memory; None: the meter of the rank's device (`meter_of`).
        clock: seconds.
    """

    def __init__(
        self, meter: PeakMeter | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._meter, self._clock = meter, clock

    def peak_bytes(self, config: RankConfig, loaded: LoadedRank) -> int:
        """Return the most bytes that the rank's largest plan has in use beside weights and KV cache.

        Raises:
            NotEnoughMemoryError: the device has no room for such a plan, even without a KV cache.
        """
        meter = self._meter or meter_of(config)
        gc.freeze()  # the collection below skips older objects: to search them takes a tenth of a second
        try:
            with torch.inference_mode(), loaded.group.rehearsing():
                peak_bytes = _Rehearsal(config, loaded, meter, self._clock).peak_bytes()
            gc.collect()  # the runner and its rows hold each other
        finally:
            gc.unfreeze()
        meter.end()
        return peak_bytes


def probe_of(config: RankConfig) -> NoProbe:
    """Return the probe that measures a rank's largest plan.

    It measures nothing for a rank that takes the place of a lost one, and for threads on a CPU (`NoProbe`).
    """
    are_cpu_threads = config.are_threads and config.device_type == "cpu"
    return NoProbe() if are_cpu_threads or config.first_load.identity else MemoryProbe()


@dataclass(frozen=True, slots=True)
class _Growth:
    """The bytes by which memory has grown for `few` tokens or rows, and for `count` of them.

    A part of the growth for the few, such as loaded code and buffers, does not grow with their number. So the
    growth for another number is computed from the difference between the two.
    """

    count: int
    num_bytes: int
    few: int
    bytes_of_few: int

    def at(self, count: int) -> int:
        """Return the growth for `count` tokens or rows, on the straight line through both measurements.

        If both have the same number, the growth is in proportion to the number.
        """
        if self.count == self.few:
            return self.num_bytes * count // self.count
        of_each = (self.num_bytes - self.bytes_of_few) / (self.count - self.few)
        return self.num_bytes + round(of_each * (count - self.count))


class _EnoughError(Exception):
    """A signal that the first layer has run, which ends the forward pass."""


class _HeadAlone(NoGuesser):
    """A stand-in for a guesser, so that sampling runs the head alone, over states that the probe has made.

    If the tensors have states for a guesser (`mtp_guesser.states_of`), the runner samples from those, and
    needs no output of the layers.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def candidates(self, states: Tensor, request: HeadRequest) -> HeadOutput:
        return self._model.candidates(states, request)


class _Rehearsal:
    """The state of one measurement; its cache and runner are freed with it."""

    def __init__(
        self, config: RankConfig, loaded: LoadedRank, meter: PeakMeter, clock: Callable[[], float]
    ) -> None:
        self._config, self._loaded, self._meter, self._clock = config, loaded, meter, clock
        self._on_gpu = loaded.device.type == "cuda"
        kv = loaded.storage.allocate(_NUM_BLOCKS)
        pages = counted_bytes()
        meter.begin()
        self._runner = build_runner(config, loaded, kv)
        if isinstance(loaded.model, Decoder):
            self._runner.guesser = _HeadAlone(loaded.model)
        self._pages = counted_bytes() - pages  # of our kernels' outputs, made for the largest plan at once
        shape = config.max_num_batched_tokens, loaded.spec.hidden_size
        self._received = torch.zeros(shape, dtype=dtype_of(config), device=loaded.device)
        self._longest = self._longest_context()

    def peak_bytes(self) -> int:
        """Run prompts, then rows that decode, then, on the last stage, samples; return the peak in bytes."""
        most, largest = self._config.max_num_seqs, self._config.max_num_batched_tokens
        prefill = self._grown(self._prefill, _FEWEST_TOKENS, largest)
        decode = self._layers_of_decodes(min(most, largest))
        sampled = 0
        if self._config.is_last:
            sampled = self._of_all_samples(self._grown(self._sample, _FEWEST_ROWS, min(most, largest)))
        if not (self._on_gpu or self._config.is_first):  # received hidden states, and the zeros beside them
            sampled += 2 * self._received.nbytes
        if self._pages:
            touched = self._pages * prefill.count // largest
            return self._pages + max(0, prefill.num_bytes - touched, decode - touched) + sampled
        return max(prefill.at(largest), decode + sampled)

    def _of_all_samples(self, sampled: _Growth) -> int:
        """Return the bytes that a plan with the most samples takes for them.

        The logits of all samples are there at once, and copies of a few of them (`rows_at_once`).
        """
        vocab_size, most = self._loaded.spec.vocab_size, self._config.max_num_samples
        num_copied = max(sampled.count, min(most, rows_at_once(vocab_size)))
        return sampled.at(num_copied) + (most - num_copied) * vocab_size * _LOGIT_BYTES

    def _grown(self, run: Callable[[int], None], fewest: int, most: int) -> _Growth:
        """Run a few tokens or rows, then as many as there is time for; return the growth of memory for both.

        Args:
            fewest, most: numbers of tokens or rows; on a GPU the most are run, and nothing else.
        """
        few = most if self._on_gpu else min(fewest, most)
        run(few)
        by_few = self._meter.growth()
        if few == most:
            return _Growth(few, by_few, few, by_few)
        started = self._clock()
        run(few)  # once more, for the time: the first run also loads code
        spent = max(1e-9, self._clock() - started)
        count = max(few, min(most, int(few * REHEARSAL_S / spent)))
        if count > few:
            run(count)
        return _Growth(count, max(by_few, self._meter.growth()), few, by_few)

    def _longest_context(self) -> int:
        """Return the most tokens that all rows of a plan together attend to here.

        It is small where our kernels run, whose memory does not depend on it; else the free memory decides.
        """
        if self._loaded.has_kernels and not self._on_gpu:
            return _KERNEL_CONTEXT
        of_token = max(1, self._loaded.storage.block_bytes // self._config.block_size)
        free = available_bytes(self._loaded.device) // self._config.num_sharers
        return max(2, min(free // of_token, self._config.max_num_seqs * self._config.max_model_len))

    def _prefill(self, num_tokens: int) -> None:
        """Run prompts in chunks as long as a chunk may be; together they have at most `num_tokens` tokens."""
        longest = self._config.max_model_len - 1  # behind a chunk that is not sampled, the prompt goes on
        per_row = min(self._config.prefill_chunk or longest, longest, num_tokens)
        counts = [per_row] * min(self._config.max_num_seqs, num_tokens // per_row)
        self._run_layers(counts, is_sampled=False)

    def _layers_of_decodes(self, num_rows: int) -> int:
        self._run_layers([1] * num_rows, is_sampled=True)
        return self._meter.growth()

    def _run_layers(self, counts: Sequence[int], *, is_sampled: bool) -> None:
        """Run the layers over rows, with the longest contexts that there is memory for.

        Args:
            counts: tokens of each row.

        Raises:
            NotEnoughMemoryError: there is no memory for the plan even with the shortest contexts.
        """
        context = min(self._config.max_model_len - 1, max(self._longest // len(counts), *counts))
        while True:
            batch = self._begin(counts, context, is_sampled=is_sampled)
            tensors = self._inputs(batch)
            with contextlib.suppress(_EnoughError):
                tensors = self._runner.forward(tensors, batch, None if self._on_gpu else _first_layer_only)
            if tensors.failure is None:
                return
            if context // 2 < max(counts):
                raise NotEnoughMemoryError(
                    f"{self._config.name} lacks memory for a plan of {batch.num_tokens} tokens besides its "
                    "weights.",
                    remedy="Lower --max-num-batched-tokens or --max-num-seqs, or use more stages.",
                )
            self._meter.growth()  # forget the peak of this attempt
            # Shorter contexts are enough: real ones fit the KV cache, which gets less than what is free now.
            context //= 2

    def _sample(self, num_rows: int) -> None:
        """Sample one token of each of `num_rows` rows."""
        batch = self._begin(
            [1] * num_rows, min(_KERNEL_CONTEXT, self._config.max_model_len - 1), is_sampled=True
        )
        states = self._received[:num_rows]
        tensors = IntermediateTensors({"hidden_states": states, NORMED: states})
        if not isinstance(self._loaded.model, Decoder):  # only its layers can make the input of its head
            tensors = self._runner.forward(self._inputs(batch), batch)
        result = self._runner.sample(tensors, batch)
        if result.error is not None:
            raise NotEnoughMemoryError(
                f"{self._config.name} lacks memory to sample {num_rows} rows besides its weights.",
                remedy="Lower --max-num-seqs, or use more stages.",
            )

    def _begin(self, counts: Sequence[int], context: int, *, is_sampled: bool) -> ForwardBatch:
        """Return the inputs of a step over new rows.

        Args:
            counts: tokens of each row that are run, the last ones of its context.
            context: tokens in the context of each row; the row has blocks for their keys and values.
        """
        runner, block_size = self._runner, self._config.block_size
        runner.reset()
        ids = [token % self._loaded.spec.vocab_size for token in range(context + 1)]
        blocks = [block % _NUM_BLOCKS for block in range(math.ceil(context / block_size))]
        rows = list(range(len(counts)))
        plan = ScheduledBatch(
            step_id=0,
            rows=rows,
            num_tokens=list(counts),
            start_positions=[context - count for count in counts],
            new_blocks=[blocks] * len(rows),
            need_sampled=[is_sampled] * len(rows),
            token_from=[KNOWN] * len(rows),
            new_rows=[
                NewRow(row, 0, str(row), context, ids[: context + (not is_sampled)], _ANY_SAMPLING)
                for row in rows
            ],
        )
        runner.admit(plan)
        return runner.complete(runner.begin(plan))

    def _inputs(self, batch: ForwardBatch) -> IntermediateTensors:
        """Return the input of the rank's first layer: embeddings, or zeros as if from the stage before."""
        if self._config.is_first:
            return self._runner.embed(batch)
        received = self._received[: batch.num_tokens]
        return IntermediateTensors({"hidden_states": received, "residual": torch.zeros_like(received)})


def _first_layer_only(layer: int) -> None:
    if layer:
        raise _EnoughError
