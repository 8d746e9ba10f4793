"""The loop that every rank of every stage runs: take a plan, get its input, compute, pass the result on.

                    plans from the core
                            v
    source ──▶ [ prepare ▶ take ▶ forward ▶ put ] ──▶ sink

`rank.rank` builds a `Stage` and runs it. The loop decides nothing: it replays the core's plans in order. An
error ends the loop; the caller reports the error and ends the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from penstock.batch import MADE_UP, CoreToRank, EntryCall, ScheduledBatch, Shutdown, decode_to_rank
from penstock.distributed.group import SOLO, TensorGroup, meet
from penstock.errors import LinkClosedError, PeerError, PenstockError, ProtocolError, StageLostError
from penstock.faults import Fault, armed
from penstock.models.intermediate import IntermediateTensors
from penstock.pipeline.decision_log import DecisionLog
from penstock.pipeline.links.channel import MessageChannel
from penstock.pipeline.ports import Sink, Source
from penstock.pipeline.transfer_orders import NO_ORDERS, NoOrders, TransferOrders
from penstock.pipeline.void_steps import NOTHING_VOID, NoVoidSteps
from penstock.runner.forward_batch import ForwardBatch
from penstock.runner.model_runner import ModelRunner
from penstock.trace.phases import NOBODYS, Phase, PhaseClock, StageReporter


class Stage:
    """The loop of one rank (one process of a stage), which carries out the core's plans step by step.

    Args:
        stage: number of the stage, for errors.
        runner: the rank's layers, with its rows (a row holds the state of a running request).
        source, sink: where hidden states come from and go to, chosen by the place of the stage in the pipe.
        times: reports how long each step took; its clock is that of the source and the sink.
        faults: failures that a test has armed.
        orders: takes the orders of plans to copy KV blocks; a stand-in if plans have none.
        void_steps: knows which plans need not be computed, because they rest on a wrong guess.
        group: the ranks of this stage. Layers make them meet in every step; a plan without tokens, which runs
            no layers, makes them meet on purpose. Its result then proves that every rank has come to this
            plan, and not only one rank of each stage.
    """

    def __init__(
        self,
        stage: int,
        runner: ModelRunner,
        source: Source,
        sink: Sink,
        times: StageReporter | None = None,
        faults: Sequence[Fault] = (),
        orders: TransferOrders | NoOrders = NO_ORDERS,
        group: TensorGroup = SOLO,
        void_steps: NoVoidSteps = NOTHING_VOID,
    ) -> None:
        self._stage = stage
        self._group = group
        self._void_steps = void_steps
        self._runner = runner
        self._source = source
        self._sink = sink
        self._times = times or StageReporter(stage, NOBODYS)
        self._orders = orders
        self._compute = armed(faults, "stage.forward", stage, runner.forward, self._is_of_clients)
        self._pass_on = armed(faults, "stage.put", stage, sink.put_tensors, self._is_of_clients)

    @torch.inference_mode()
    def run(self, plans: Iterable[ScheduledBatch]) -> None:
        """Carry out the plans until there are no more. Errors name the stage and the step."""
        for plan in self._timed(plans):
            with blaming(self._stage, f"in step {plan.step_id}"):
                batch = self._prepare(plan)
                hidden = self._source.take_tensors(batch)
                hidden = self._forward(hidden, batch)
                self._put(hidden, batch)

    def _timed(self, plans: Iterable[ScheduledBatch]) -> Iterator[ScheduledBatch]:
        """Yield the plans, and report when the step of each begins and ends."""
        for plan in plans:
            self._times.step_begun(plan.step_id, plan.total_tokens, plan.prompt_tokens)
            yield plan
            self._times.step_done(plan.meta.wants_times)

    def _prepare(self, plan: ScheduledBatch) -> ForwardBatch:
        """Prepare a step: orders and rows, then all that needs no samples, then the samples.

        What needs no samples comes first, because the wait for them may be long.
        """
        self._orders.send_answers()
        self._orders.take_orders(plan.orders, plan.given_up)
        self._runner.admit(plan)
        # `admit` first: `begin` reads the rows that it enters. Samples are consumed after it, so that those
        # for rows which this plan frees or rewinds are dropped.
        batch = self._runner.begin(plan)
        self._sink.consume_samples(plan)
        return self._runner.complete(batch)

    def _forward(self, hidden: IntermediateTensors, batch: ForwardBatch) -> IntermediateTensors:
        """Run the own layers; if the step reads blocks that are being loaded, each layer waits for its part.

        The input of a void step is passed on uncomputed: nothing reads it, but the next stage waits for the
        frame.
        """
        # All ranks of a stage must decide alike here: if one skipped alone, the others would wait for it.
        if batch.is_void or self._void_steps.has(batch.plan.step_id):
            return self._runner.skip(hidden, batch)
        self._times.clock.begin(Phase.FORWARD)
        if batch.plan.total_tokens == 0:
            meet(self._group)
        return self._compute(hidden, batch, self._orders.layers_of(batch.plan.awaited))

    def _put(self, hidden: IntermediateTensors, batch: ForwardBatch) -> None:
        """Pass on what was computed."""
        self._times.clock.begin(Phase.PUT)
        self._pass_on(hidden, batch)

    def _is_of_clients(self, _: IntermediateTensors, batch: ForwardBatch, *__: object) -> bool:
        """Return whether the step has a request of a client; probes and measurements have none."""
        names = self._runner.rows.names_of(batch.plan)
        return any(not name.startswith(MADE_UP) for name in names)


def plans_from(
    channel: MessageChannel,
    clock: PhaseClock = NOBODYS,
    *,
    is_last: bool = False,
    log: DecisionLog | None = None,
    names_of: Callable[[ScheduledBatch], Sequence[str]] = lambda plan: [],
    orders: TransferOrders | NoOrders = NO_ORDERS,
    check: Callable[[ScheduledBatch], None] = lambda plan: None,
    void_steps: NoVoidSteps = NOTHING_VOID,
) -> Iterator[ScheduledBatch]:
    """Yield the core's plans until `Shutdown`; wait without end, since an idle engine sends nothing.

    Args:
        channel: channel from the core.
        clock: measures the waiting, by its cause.
        is_last: this is the last stage. On the others, the wait for a plan that the core held back because
            the pipe was full counts as a wait for the stages behind.
        log: the rank's log, with which each plan is checked; by default that of epoch 0 from step 0.
        names_of: returns the ids of the requests in a plan, for errors.
        orders: carries out the core's calls about the KV store, and sends due answers while no plan comes.
        check: called for each plan after the log has accepted it; raises `ProtocolError` if this rank cannot
            carry it out.
        void_steps: looks ahead, at plans that have arrived behind the next one.

    Raises:
        ProtocolError: a plan was lost, repeated or changed on the way, or the plans before differ from the
            core's.
        LinkClosedError: the core has gone.
    """
    log = log or DecisionLog()
    clock.begin(Phase.WAIT_PLAN)
    while (message := _receive(channel, log.next_step, orders, void_steps)) is not None:
        # The log comes first: nothing may act on a plan that is not its next one.
        log.append(message, names_of)
        check(message)
        void_steps.look_ahead(message, lambda: _polled(channel))
        clock.begin(Phase.TAKE, was=_cause(message, is_last))
        yield message
        clock.begin(Phase.WAIT_PLAN)


def _cause(plan: ScheduledBatch, is_last: bool) -> Phase:
    """Return the phase as which the wait for this plan counts.

    If the core held the plan back, it waited for a result. The last stage sends results itself, so that it
    waited for the core; every other stage waited for the stages behind it.
    """
    if plan.meta.starved:
        return Phase.NO_WORK
    return Phase.WAIT_NEXT if plan.meta.held and not is_last else Phase.WAIT_PLAN


def _receive(
    channel: MessageChannel, step_id: int, orders: TransferOrders | NoOrders, void_steps: NoVoidSteps
) -> ScheduledBatch | None:
    """Return the next plan, or None at `Shutdown`; pass calls about the KV store that come before it on."""
    due = f"the plan of step {step_id}"
    try:
        while isinstance(
            message := void_steps.next_message(lambda: _next_message(channel, orders)), EntryCall
        ):
            orders.take_call(message)
    except PeerError as error:
        raise type(error)(f"{error.message} The expected message was {due}.") from error
    if isinstance(message, ScheduledBatch):
        return message
    if not isinstance(message, Shutdown):
        raise ProtocolError(f"expected {due}, found {type(message).__name__}.")
    return None


def _next_message(channel: MessageChannel, orders: TransferOrders | NoOrders) -> CoreToRank:
    """Return the core's next message; send due answers to the core meanwhile."""
    frame = None
    while frame is None and orders.patience_s is not None:
        frame = channel.recv(orders.patience_s)
        orders.send_answers()
    frame = channel.recv(None) if frame is None else frame
    return Shutdown() if frame is None else decode_to_rank(frame)


def _polled(channel: MessageChannel) -> CoreToRank | None:
    """Return a message that has arrived already, if any.

    None is also returned if the core is lost: the next receive that waits raises that.
    """
    try:
        frame = channel.recv(0.0)
    except LinkClosedError:
        return None
    return None if frame is None else decode_to_rank(frame)


@contextmanager
def blaming(stage: int, when: str) -> Iterator[None]:
    """Add the number of the stage to any error that escapes the `with` block.

    An exception that is not a `PenstockError` becomes a `StageLostError`.

    Args:
        when: words for its message, such as "in step 7".
    """
    try:
        yield
    except PenstockError as error:
        error.stage = stage if error.stage is None else error.stage
        raise
    except Exception as error:
        raise StageLostError(
            f"stage {stage} failed {when}: {type(error).__name__}: {error}", stage=stage
        ) from error
