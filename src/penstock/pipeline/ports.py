"""The input and the output of a stage: the classes in which first, middle and last stages differ.

`rank.rank` chooses a source and a sink for each rank, once in an epoch; the loop in `pipeline.stage` is the
same for every rank.

                 source            sink
    first        EmbedSource       ForwardSink    hidden states to the next, samples from the last
    middle       LinkSource        ForwardSink
    last         LinkSource        SampleSink     samples to all earlier stages, results to the core
    only stage   EmbedSource       SampleSink     (to no earlier stage)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from penstock.batch import ScheduledBatch, encode
from penstock.distributed.group import SOLO, TensorGroup
from penstock.distributed.share import Share, even_share
from penstock.kernels.views import KeptViews
from penstock.models.intermediate import IntermediateTensors, StreamStart
from penstock.pipeline.links.channel import MessageChannel, send_of_step
from penstock.pipeline.links.frame import NUM_CARRIED, FrameHeader, FrameKind
from penstock.pipeline.links.link import AsyncIntermediateTensors, Link
from penstock.pipeline.token_return import SampleReceiver, TokenSender
from penstock.runner.forward_batch import ForwardBatch
from penstock.runner.model_runner import ModelRunner
from penstock.trace.phases import NOBODYS, Phase, PhaseClock


class Source(Protocol):
    """The port at which a stage gets its input of each step; the interface of all sources."""

    def take_tensors(self, batch: ForwardBatch) -> IntermediateTensors:
        """Return the input of the stage's first layer for this step.

        It may still be under way (`AsyncIntermediateTensors`): then the first access to it waits.
        """
        ...


class Sink(Protocol):
    """The port at which a stage's output of each step leaves, and at which sampled tokens come in.

    The tokens go to the row table, where the stage keeps the state of the running requests.
    """

    def consume_samples(self, plan: ScheduledBatch) -> None:
        """Bring the row table up to the sampled tokens that the plan consumes; wait until they have come."""
        ...

    def put_tensors(self, tensors: IntermediateTensors, batch: ForwardBatch) -> None:
        """Send the output of the stage's last layer to the next stage, or sample from it in the last stage.

        The last stage then sends the samples to all earlier stages, and the result to the core.
        """
        ...


class EmbedSource:
    """The source of the first stage: it embeds the step's token ids."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def take_tensors(self, batch: ForwardBatch) -> IntermediateTensors:
        return self._runner.embed(batch)


def carried_share(width: int, tp_rank: int, tp_size: int) -> Share:
    """Return the columns of the hidden states that a rank receives from the stage before.

    The ranks of a stage gather the other columns among themselves [C5]. The share is all columns where
    these cannot be divided equally.

    Args:
        width: number of all columns.
        tp_rank, tp_size: number of the rank in its stage, and how many ranks the stage has.
    """
    return even_share(width, tp_rank, tp_size) if width % tp_size == 0 else Share.all(width)


class LinkSource:
    """The source of every stage but the first: receives hidden states into a buffer that stays put [C7].

    Args:
        link: link from the stage before.
        max_num_tokens: tokens of the largest step.
        width, dtype: elements of one token's hidden state, and their type.
        group: the ranks of this stage, each of which gets a share of the columns.
        clock: clock of the rank, which measures waiting and copying.
    """

    def __init__(
        self,
        link: Link,
        *,
        max_num_tokens: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        group: TensorGroup = SOLO,
        clock: PhaseClock = NOBODYS,
    ) -> None:
        self._link, self._group, self._clock = link, group, clock
        self._share = carried_share(width, group.rank, group.size)
        self._buffer = torch.empty((max_num_tokens, width), dtype=dtype, device=device)
        own = 0 if self._share.is_whole else max_num_tokens * self._share.size
        self._received = torch.empty(own, dtype=dtype, device=device)
        self._start = StreamStart(width, dtype=dtype, device=device)
        self._start.of(max_num_tokens)
        self._views: KeptViews[int, tuple[torch.Tensor, torch.Tensor]] = KeptViews(self._first)

    def _first(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the whole tensor, [num_tokens, width], and what is received of it, [num_tokens, columns]."""
        whole = self._buffer[:num_tokens]
        if self._share.is_whole:
            return whole, whole
        size = num_tokens * self._share.size
        return whole, self._received[:size].view(num_tokens, self._share.size)

    def take_tensors(self, batch: ForwardBatch) -> IntermediateTensors:
        whole, received = self._views.of(batch.num_tokens)
        header = _header(batch, received)
        handle = self._link.receive_frame(header, [received], batch.addressed.request_ids, self._clock)
        tensors = {"hidden_states": whole, "residual": self._start.of(batch.num_tokens)}
        # The gather runs when the tensors are read. It needs all ranks of the stage: each of them must read
        # its tensors in every step, in one that it skips, too.
        gather = [] if self._share.is_whole else [lambda: self._gather(whole, received)]
        return AsyncIntermediateTensors(tensors, handle, gather)

    def _gather(self, whole: torch.Tensor, received: torch.Tensor) -> None:
        if received.numel():
            torch.cat(self._group.all_gather(received), dim=1, out=whole)


class ForwardSink:
    """The sink of every stage but the last: sends hidden states on, and takes the last stage's samples.

    Args:
        links: links to ranks of the next stage, each with the columns of the hidden states that it carries.
        tokens: receives the samples of the last stage.
        clock: clock of the rank, which measures waiting and copying.
    """

    def __init__(
        self,
        links: Sequence[tuple[Share, Link]],
        tokens: SampleReceiver,
        clock: PhaseClock = NOBODYS,
    ) -> None:
        self._links = list(links)
        self._tokens = tokens
        self._clock = clock

    def consume_samples(self, plan: ScheduledBatch) -> None:
        before = self._clock.begin(Phase.WAIT_TOKEN)
        self._tokens.consume_samples(plan.consume_through)
        self._clock.begin(before)

    def put_tensors(self, tensors: IntermediateTensors, batch: ForwardBatch) -> None:
        for columns, link in self._links:
            carried = tensors["hidden_states"]  # with the residual stream, which the stage has added
            if not columns.is_whole:
                carried = carried[:, columns.start : columns.end]
            header = _header(batch, carried)
            link.send_frame(header if tensors.failure is None else header.as_failed, [carried], self._clock)
        # Noted step by step, in order: `consume_samples` takes what is pending from the front.
        self._tokens.expect_samples(batch.plan, batch.sampled)


class SampleSink:
    """The sink of the last stage: samples, and sends samples to the earlier stages and results to the core.

    If ranks share the stage, all of them sample, from the same bits; the first one sends.

    Args:
        runner: samples, and writes the ids to this rank's row table.
        tokens: sends samples to the earlier stages.
        results: channel to the core; None: another rank of the stage sends samples and results.
        clock: clock of the rank, which measures the sampling.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokens: TokenSender,
        results: MessageChannel | None,
        clock: PhaseClock = NOBODYS,
    ) -> None:
        self._runner = runner
        self._tokens = tokens
        self._results = results
        self._clock = clock

    def consume_samples(self, plan: ScheduledBatch) -> None:
        """Do nothing, since this stage has written its own samples to its row table already."""

    def put_tensors(self, tensors: IntermediateTensors, batch: ForwardBatch) -> None:
        before = self._clock.begin(Phase.SAMPLE)
        result = self._runner.sample(tensors, batch)
        self._clock.begin(before)
        # Samples leave before anything below is computed: earlier stages may be waiting for them.
        if self._results is not None:
            self._tokens.send_samples(batch.plan, result)
        if batch.plan.scored:
            self._clock.begin(Phase.SAMPLE)
            result = self._runner.with_scores(result, tensors, batch)
            self._clock.begin(before)
        if batch.plan.mtp:
            self._clock.begin(Phase.SAMPLE)
            result = self._runner.with_guesses(result, tensors, batch)
            self._clock.begin(before)
        if self._results is not None:
            send_of_step(self._results, encode(result), "the result", result.step_id)


def _header(batch: ForwardBatch, tensor: torch.Tensor) -> FrameHeader:
    return FrameHeader(
        epoch=batch.plan.epoch,
        step_id=batch.plan.step_id,
        kind=FrameKind.HIDDEN,
        num_tokens=batch.num_tokens,
        width=tensor.shape[1],
        dtype=str(tensor.dtype).removeprefix("torch."),
        num_tensors=NUM_CARRIED,
        digest=batch.plan.digest,
    )
