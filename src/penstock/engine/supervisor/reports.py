"""The events that a supervisor reports while it works, and a plain way to print them.

A `Reporter` is an interface with one method; the command line has an implementation with bars and colours.
Events are plain values. A supervisor that an `LLM` has started sends them as JSON lines over its status pipe.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from typing import ClassVar, Protocol, TextIO

import msgspec

from penstock.errors import ErrorInfo
from penstock.process.child import LoadPhase, PromptForm
from penstock.process.config import RankConfig

PROGRESS_EVERY_S = 5.0

_LOG = logging.getLogger("penstock")


class _OfRank(msgspec.Struct, frozen=True, kw_only=True):
    """An event about a rank.

    Attributes:
        stage: number of the rank's stage.
        tp_rank: number of the rank within its stage; None: it is the only one.
        replica: number of the rank's replica; None: there is only one replica.
    """

    stage: int
    tp_rank: int | None = None
    replica: int | None = None

    @property
    def name(self) -> str:
        tp = "" if self.tp_rank is None else f" tp {self.tp_rank}"
        return of_replica(self.replica, f"stage {self.stage}{tp}")


class LoadProgress(_OfRank, frozen=True, kw_only=True, tag_field="event", tag="progress"):
    """An event on how much of its weights a rank has read, or its host has fetched; `what` says which."""

    done_bytes: int
    total_bytes: int
    what: LoadPhase = "loading"


class StageLoaded(_OfRank, frozen=True, kw_only=True, tag_field="event", tag="stage_loaded"):
    """An event when a rank has loaded its weights.

    Attributes:
        bytes_read: bytes of tensor data that the rank has read from files.
    """

    process: str  # by which people find it on its host, such as "pid 4711"
    bytes_read: int
    seconds: float


class ModelFound(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="model_found"):
    """An event when the model is found and the settings fit together; processes are started next.

    Attributes:
        directory: where the model's files are.
    """

    directory: str


class Notice(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="notice"):
    """A note about what was decided for the user, such as which kernels compute."""

    text: str


class Caution(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="caution"):
    """A warning about what will not work as the user may expect, and what to do about it."""

    text: str


class PartitionChosen(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="partition_chosen"):
    """An event when `--partition auto` has divided the model's layers among the stages.

    Attributes:
        layers: number of layers of each stage.
        table: lines of text with the chosen split and those it was compared with.
    """

    layers: list[int]
    table: list[str]


class StageReady(_OfRank, frozen=True, kw_only=True, tag_field="event", tag="stage_ready"):
    """An event when a rank is ready to serve, with the use of its memory.

    Attributes:
        parts: the parts of the model that the rank holds, such as "embed, layers 0-3".
        tensor_bytes: bytes of its weights.
        num_blocks: number of KV blocks, the same on all ranks.
        kv_bytes: bytes of its KV cache.
        peak_bytes: bytes that its largest plan takes beside weights and KV cache, as measured; 0: not
            measured.
        margin_bytes: bytes that it leaves free on purpose.
        stranded_bytes: bytes that are unused, since all ranks have as many KV blocks as the one with the
            least memory.
    """

    process: str  # by which people find it on its host, such as "pid 4711"
    parts: str
    tensor_bytes: int
    num_blocks: int
    stranded_bytes: int
    kv_bytes: int = 0
    peak_bytes: int = 0
    margin_bytes: int = 0


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="engine_ready"):
    """An event when all stages are ready, and the API process too, if there is one.

    Attributes:
        address: URL of the server; for a program with `LLM`, the address of the core's socket.
        seconds: time since the start.
        prompt_form: the richest form of prompt that the model takes: messages, else text, else token ids.
    """

    address: str
    seconds: float
    prompt_form: PromptForm = "messages"


class StageLost(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="stage_lost"):
    """An event when the pipe is broken, because a rank or the core is lost or has left the epoch.

    Running requests wait for the next epoch. They fail if the pipe has broken too often.

    Attributes:
        error: the first cause.
        epoch: number of the epoch that has ended.
        restarts: names of ranks that are started again.
        restarts_core: the engine core is started again too.
        retry_s: seconds until they are started again.
        others: errors of further processes that have ended.
        trace: stack traces of processes that have ended with an internal error.
    """

    error: ErrorInfo
    epoch: int
    restarts: list[str]
    replica: int | None = None
    restarts_core: bool = False
    retry_s: float = 0.0
    others: list[str] = []
    trace: str = ""


class Recovered(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="recovered"):
    """An event when a step has crossed all stages again; `seconds` have passed since the loss was noticed.

    Attributes:
        epoch: number of the new epoch.
        notes: sentences for the user about numeric classes that have changed or are mixed.
    """

    epoch: int
    seconds: float
    replica: int | None = None
    notes: list[str] = []

    @property
    def name(self) -> str:
        """The name of the epoch in messages, such as "epoch 3"; of several replicas "replica 1 epoch 3"."""
        return of_replica(self.replica, f"epoch {self.epoch}")


class SpareReady(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="spare_ready"):
    """An event when a host has a process ready in which a lost rank can start again quickly.

    Attributes:
        own_bytes: bytes of memory that this process holds and shares with no other.
    """

    host: str
    own_bytes: int

    @property
    def line(self) -> str:
        """The event as a line of a log."""
        return f"a spare process is ready on {self.host}; it holds {megabytes(self.own_bytes)} of memory"


class HostSaid(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="host_said"):
    """An event for a line of text that was printed on another host.

    Attributes:
        process: name of the process that has printed the line, such as "stage 1"; "": the worker itself.
    """

    host: str
    process: str
    text: str

    @property
    def line(self) -> str:
        """The event as a line of a log."""
        return f"{self.host} {self.process}".rstrip() + f": {self.text}"


class FrontLost(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="front_lost"):
    """An event when the API process has ended.

    Its connections are reset, and it starts again after `retry_s`.
    """

    error: ErrorInfo
    retry_s: float = 0.0


class FrontRecovered(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="front_recovered"):
    """An event when the API process answers again; `seconds` have passed since the loss was noticed."""

    seconds: float
    name: ClassVar[str] = "API process"


class Draining(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="draining"):
    """An event when a signal to stop has come; running requests may finish within `seconds`."""

    seconds: float


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="engine_failed"):
    """An event when the engine cannot start or go on.

    `error` is the first cause, `trace` has stack traces.
    """

    error: ErrorInfo
    trace: str = ""


Event = (
    LoadProgress
    | StageLoaded
    | ModelFound
    | Notice
    | Caution
    | PartitionChosen
    | StageReady
    | EngineReady
    | StageLost
    | Recovered
    | SpareReady
    | HostSaid
    | FrontLost
    | FrontRecovered
    | Draining
    | EngineFailed
)


class Reporter(Protocol):
    """A receiver of events as they happen, on the supervisor's thread. It must not block."""

    def report(self, event: Event) -> None: ...


class SteadyReporter:
    """Gives events to another reporter, and ignores its I/O errors.

    A full disk or a closed terminal must not stop the service [R16].
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def report(self, event: Event) -> None:
        with contextlib.suppress(OSError):
            self._reporter.report(event)


class LogReporter:
    """A reporter for programs that use the engine as a library: it logs events.

    It logs every event that has a line (`event_line`), except progress of loads: cautions and losses as
    WARNING, which Python shows to programs that have not set up logging, and all else as INFO.
    """

    def report(self, event: Event) -> None:
        if not isinstance(event, LoadProgress) and (line := event_line(event)):
            is_warning = isinstance(event, Caution | StageLost | FrontLost)
            _LOG.log(logging.WARNING if is_warning else logging.INFO, "%s", line)


class PlainReporter:
    """A reporter that prints events as plain lines (`event_line`), without colours or cursor movement.

    Args:
        stream: where to print; standard error by default.
        clock: monotonic seconds; progress of a rank is printed at most every `PROGRESS_EVERY_S`.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._started = clock()
        self._progress_at: dict[str, float] = {}

    def report(self, event: Event) -> None:
        line = self._progress(event) if isinstance(event, LoadProgress) else event_line(event)
        if line:
            print(line, file=self._stream, flush=True)

    def _progress(self, event: LoadProgress) -> str:
        now = self._clock()
        if now - self._progress_at.get(event.name, self._started) < PROGRESS_EVERY_S:
            return ""
        self._progress_at[event.name] = now
        return event_line(event)


def event_line(event: Event) -> str:
    """Return an event as text: mostly one line, sometimes more; empty for an event that needs no line."""
    match event:
        case LoadProgress():
            share = min(100, 100 * event.done_bytes // max(1, event.total_bytes))
            return f"{event.name}  {event.what} {share} % of {megabytes(event.total_bytes)}"
        case Notice() | Caution():
            return f"{'note' if isinstance(event, Notice) else 'warning'}: {event.text}"
        case PartitionChosen():
            return "\n".join(event.table)
        case StageReady():
            return (
                f"{event.name}  {event.process}  {event.parts}  {megabytes(event.tensor_bytes)}  "
                f"{event.num_blocks} KV blocks{_plans(event)}{_stranded(event.stranded_bytes)}"
            )
        case EngineReady():
            return f"ready in {event.seconds:.1f} s   {event.address}"
        case StageLost():
            names = ["the core"] * event.restarts_core + event.restarts
            again = "".join(f", {name} starts again" for name in names)
            words = " ".join([event.error.message, *event.others])
            epoch = of_replica(event.replica, f"epoch {event.epoch}")
            line = f"lost: {words} {epoch[0].upper()}{epoch[1:]} is over{again}{_pause(event.retry_s)}"
            return f"{line}\n{event.trace}".rstrip()
        case Recovered() | FrontRecovered():
            notes = event.notes if isinstance(event, Recovered) else []
            return "\n".join(
                [f"recovered in {event.seconds:.1f} s   {event.name}", *(f"note: {text}" for text in notes)]
            )
        case SpareReady() | HostSaid():
            return event.line
        case FrontLost():
            return f"lost: {event.error.message} It starts again{_pause(event.retry_s)}"
        case Draining():
            return f"draining: running requests have {event.seconds:g} s; a second signal ends at once"
        case EngineFailed():
            return f"error: {event.error.message} {event.error.remedy}".rstrip()
        case _:
            return ""


def of_replica(replica: int | None, name: str) -> str:
    """Return a name such as "replica 1 stage 0"; the name alone if `replica` is None."""
    return name if replica is None else f"replica {replica} {name}"


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _pause(seconds: float) -> str:
    return f" in {seconds:.0f} s" if seconds else ""


def _plans(event: StageReady) -> str:
    """Return the memory of the KV cache, the largest plan and the margin as text; empty if not measured."""
    if not event.peak_bytes:
        return ""
    parts = megabytes(event.kv_bytes), megabytes(event.peak_bytes), megabytes(event.margin_bytes)
    return " of {}, peak of a plan {}, margin {}".format(*parts)


def _stranded(count: int) -> str:
    return f"  ({megabytes(count)} of KV memory stranded)" if count else ""


def rank_parts(config: RankConfig) -> str:
    """Return what a rank holds of the model, as text such as "1/2 of embed, layers 0-3"."""
    start, last = config.start_layer, config.end_layer - 1
    layers = f"layers {start}-{last}" if last > start else f"layer {start}"
    parts = ["embed"] * config.is_first + [layers] + ["norm", "head"] * config.is_last
    share = f"1/{config.tp_size} of " if config.tp_size > 1 else ""
    return share + ", ".join(parts)
