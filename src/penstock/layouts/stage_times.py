"""The time that a stage takes for a step: by the figures of a device, or by measurements of this machine.

    seconds = overhead                                                     of the step and of each layer
            + max(read weights, multiply tokens)                           a roofline (CACM 2009)
            + max(read keys and values, multiply with them)                attention
            + max(read head, multiply samples)                             if the step samples
            + 2 x layers x (latency + hidden states / rate)                sums, if there are several ranks

A device reaches only a share of the rates on its data sheet. The shares and overheads below are rough, and of
the size that is usual for serving; for this machine, `--devices here` measures instead. Predictions and
simulations ask a `StageTimes`. The costs that the core learns (`scheduler.cost_model.StageCost`) are one too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.layouts.devices import Device, Link
from penstock.layouts.model_sizes import RankSizes
from penstock.planner.stage_costs import StageCosts, interpolate
from penstock.scheduler.cost_model import StageCost, StepShape


class StageTimes(Protocol):
    """The times of one stage, in seconds."""

    def seconds(self, shape: StepShape) -> float:
        """Return the seconds for which the stage computes a step of this shape."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The share of its data sheet's figures that a type of device reaches, and its overheads.

    Attributes:
        reads, multiplies: the share of the memory bandwidth, and of the rate of matrix products.
        step_s, layer_s: seconds that each step takes besides, and each of its layers.
    """

    reads: float
    multiplies: float
    step_s: float
    layer_s: float


EFFICIENCY = {
    "cpu": Efficiency(reads=0.8, multiplies=0.5, step_s=200e-6, layer_s=10e-6),
    "cuda": Efficiency(reads=0.7, multiplies=0.5, step_s=200e-6, layer_s=30e-6),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """The times of a stage, by the figures of its devices.

    Attributes:
        sizes: the sizes of one of its ranks; for the time of the whole stage, of the rank that holds most.
        device: the device of each rank; all are alike.
        num_ranks: number of ranks of the stage.
        link: the link between these ranks.
        hidden_bytes: bytes of the hidden state of one token.
        chosen_share: share of a layer's experts that one token goes through; 1 without experts.
    """

    sizes: RankSizes
    device: Device
    num_ranks: int
    link: Link
    hidden_bytes: int
    chosen_share: float = 1.0

    def seconds(self, shape: StepShape) -> float:
        own = EFFICIENCY[self.device.type]
        sizes, tokens = self.sizes, shape.tokens
        read_s = self._weight_bytes_read(tokens) / self._read_rate
        flops_s = 2.0 * sizes.token_parameters * tokens / self._flop_rate
        seconds = own.step_s + sizes.num_layers * own.layer_s + max(read_s, flops_s)
        seconds += self._attention_s(shape)
        if shape.samples and sizes.head_parameters:
            head_flops_s = 2.0 * sizes.head_parameters * shape.samples / self._flop_rate
            seconds += max(sizes.head_bytes / self._read_rate, head_flops_s)
        return seconds + self.all_reduce_s(tokens) + self.all_reduce_latency_s

    def all_reduce_s(self, num_tokens: int) -> float:
        """Return the seconds that the sums over the ranks take at the link's rate, without latency [I9]."""
        if self.num_ranks == 1:
            return 0.0
        return 2 * self.sizes.num_layers * num_tokens * self.hidden_bytes / self.link.bytes_per_s

    @property
    def all_reduce_latency_s(self) -> float:
        """The seconds that the sums of a step take besides, however few bytes they have."""
        return 0.0 if self.num_ranks == 1 else 2 * self.sizes.num_layers * self.link.latency_s

    def _weight_bytes_read(self, num_tokens: int) -> float:
        """Return the bytes of the layers' weights that a step reads, on average.

        An expert is read if a token of the step goes through it. Each token is taken to go through experts
        that are chosen at random.
        """
        untouched = (1.0 - self.chosen_share) ** num_tokens
        return self.sizes.layer_bytes - untouched * self.sizes.expert_bytes

    def _attention_s(self, shape: StepShape) -> float:
        """Return the seconds of attention.

        A request reads its keys and values once for all its tokens in the step. How many requests there are
        follows from the shape only roughly: it is taken to be the number of samples, and at least one.
        """
        if not shape.tokens:
            return 0.0
        positions_read = shape.attended / shape.tokens * max(1, shape.samples)
        read_s = positions_read * self.sizes.kv_bytes_per_token / self._read_rate
        return max(read_s, shape.attended * self.sizes.attended_flops / self._flop_rate)

    @property
    def _read_rate(self) -> float:
        return self.device.read_bytes_per_s * EFFICIENCY[self.device.type].reads

    @property
    def _flop_rate(self) -> float:
        return self.device.flops_per_s * EFFICIENCY[self.device.type].multiplies


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimes:
    """The times of a stage of this machine, by its costs, which were measured at one length of context.

    Attributes:
        num_layers: number of layers of the stage.
    """

    costs: StageCosts
    num_layers: int

    def seconds(self, shape: StepShape) -> float:
        """Return the seconds of a step, from its numbers of tokens and samples.

        If each token is sampled after, all are decodes. Otherwise one sample ends a prompt, the other samples
        are decodes of one token, and all other tokens are prefilled.
        """
        if shape.samples >= shape.tokens:
            return self.costs.decode_step_s(self.num_layers, shape.tokens)
        decodes = max(0, shape.samples - 1)  # one of the rows that sample may end its prompt
        prompt = shape.tokens - decodes
        prefill_s = prompt * self.costs.prefill_token_s(self.num_layers)
        if not decodes:
            return max(prefill_s, self.costs.decode_step_s(self.num_layers, 1))
        return prefill_s + self.costs.decode_step_s(self.num_layers, decodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedTimes:
    """The times of a stage whose steps were observed.

    The observed times themselves are kept: between two numbers of tokens, a straight line through them is
    nearer to the truth than the roofline of the learnt cost. That cost says how much more or less a step
    takes that has more tokens, or fewer, than any that was observed.

    Attributes:
        cost: what the scheduler's cost model has learnt, for all that was not observed.
        per_attended: seconds for each position that a decode attends to.
        decodes: by rising number of rows, this number and the seconds of a step of so many decodes, without
            the seconds of `per_attended`.
        per_chunk_attended: seconds for each position that a token of a prompt attends to.
        chunks: by rising number of tokens, this number and the seconds of a step of so many tokens with a
            chunk of a prompt, without those of the output head and of attention.
    """

    cost: StageCost
    per_attended: float
    decodes: tuple[tuple[int, float], ...]
    per_chunk_attended: float = 0.0
    chunks: tuple[tuple[int, float], ...] = ()

    def seconds(self, shape: StepShape) -> float:
        is_decodes = shape.samples >= shape.tokens
        times = self.decodes if is_decodes else self.chunks
        if not times:
            return self.cost.seconds(shape)
        if is_decodes:
            return self._observed_s(times, shape.tokens, all_sample=True) + self.per_attended * shape.attended
        seconds = self._observed_s(times, shape.tokens, all_sample=False)
        return seconds + self._head_s(shape.samples) + self.per_chunk_attended * shape.attended

    def _head_s(self, num_samples: int) -> float:
        return self.cost.seconds(StepShape(1, 0, num_samples)) - self.cost.seconds(StepShape(1, 0, 0))

    def _observed_s(self, times: Sequence[tuple[int, float]], num_tokens: int, *, all_sample: bool) -> float:
        """Return the seconds of a step of so many tokens by these times, without those of attention.

        Args:
            all_sample: each token is sampled after, else none is.
        """
        tokens = min(max(num_tokens, times[0][0]), times[-1][0])
        seconds = interpolate(times, tokens)
        if tokens == num_tokens:
            return seconds
        beyond = self.cost.seconds(StepShape(num_tokens, 0, num_tokens * all_sample))
        return max(0.0, seconds + beyond - self.cost.seconds(StepShape(tokens, 0, tokens * all_sample)))


def learnt_cost(times: StageTimes) -> StageCost | None:
    """Return the cost by which the scheduler would size plans; None: it would size them by plain rules."""
    if isinstance(times, ObservedTimes):
        return times.cost
    return times if isinstance(times, StageCost) else None
