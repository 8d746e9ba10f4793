"""The common start of all child processes of the supervisor, and the reports that they send it.

The parent writes a child's config to a pipe. From another pipe it reads JSON lines: the child's progress,
its readiness, or the first cause of its failure. The entry points of ranks, spares, core, API process,
drafting and measuring processes call this module, and `hosts.local_process` decodes the lines with it. It
imports no torch, so that a rank can set its environment before torch is imported.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NoReturn, Protocol, TypeVar

import msgspec
import setproctitle

from penstock.batch import RankLoaded
from penstock.bounds import Count, Seconds, Small, Speed, Word
from penstock.errors import ErrorInfo, PenstockError, UsageError, describe
from penstock.process.rhythm import next_beat
from penstock.process.whole_lines import WholeLines

ALIVE_INTERVAL_S = 1.0
ROOM_LIMIT_S = 60.0  # so long a rank waits for its parent to make room in a full status pipe
STUCK_S = 3.0  # a main loop that has not turned for so long counts as standing still
_PR_SET_PDEATHSIG = 1
_PIPE_ATOMIC_BYTES = 4096  # PIPE_BUF: a line this short is written whole or not at all
_MAX_TEXT = 1500  # characters: so that message and trace of a failure fit into one line

Config = TypeVar("Config")

LoadPhase = Literal["fetching", "loading"]
PromptForm = Literal["messages", "text", "token_ids"]


class StartedByParent(Protocol):
    """The config of a process that dies with the process that has started it."""

    @property
    def parent_pid(self) -> int: ...


class LoadProgressed(msgspec.Struct, frozen=True, kw_only=True, tag="progress", tag_field="event"):
    """The tensor bytes that the rank has loaded, or that its host has fetched for it, of all there are."""

    done: Count
    total: Count
    what: LoadPhase = "loading"


class TensorsRead(msgspec.Struct, frozen=True, kw_only=True, tag="read", tag_field="event"):
    """Digests (checksums) of tensors that the rank has read: a part of a table of `weights.read_digests`."""

    digests: Annotated[bytes, msgspec.Meta(max_length=_PIPE_ATOMIC_BYTES)]


class WeightsLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded", tag_field="event"):
    """The weights are in memory, and all `TensorsRead` have been sent.

    Attributes:
        bytes_read: bytes of tensor data that the rank has read from files.
        seconds: duration of the load.
        identity: hash over samples of the model's files (`kvstore.names.model_identity`).
    """

    bytes_read: Count
    seconds: Seconds
    identity: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class DrafterLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="drafter_loaded", tag_field="event"):
    """The draft model is in memory, in a process of the core."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready", tag_field="event"):
    """The child serves in this epoch.

    Attributes:
        rank: what the rank has reported of itself to the core; None if the child is not a rank.
        numeric_classes: if the child is a core, the numeric class of each rank, stage by stage.
    """

    epoch: Small = 0
    rank: RankLoaded | None = None
    numeric_classes: list[str] = []


class Abandoned(msgspec.Struct, frozen=True, kw_only=True, tag="abandoned", tag_field="event"):
    """The child could not go on because of other processes: it has left the epoch, and waits for the next.

    Attributes:
        error: why it has left the epoch.
        leave_s: seconds that other processes may take to leave the epoch too; None: the child cannot tell.
    """

    epoch: Small
    error: ErrorInfo
    leave_s: Seconds | None = None


class LinkExchanged(msgspec.Struct, frozen=True, kw_only=True, tag="link_exchanged", tag_field="event"):
    """A rank receives over a new link within an epoch; the old link is empty and no longer used.

    Attributes:
        number: number of the new link.
    """

    epoch: Small
    number: Small


class TextSideLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="text_side_loaded", tag_field="event"):
    """The API process has read the tokenizer and the chat template of the model.

    Attributes:
        prompt_form: the richest form of prompt that the model takes; messages are richest, token ids poorest.
        cautions: sentences for the user, about what will not work.
    """

    prompt_form: PromptForm
    cautions: list[str] = []


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag="alive", tag_field="event"):
    """A sign of life, once a second: the process runs, and its main loop turns, if it has one."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="measured", tag_field="event"):
    """The costs of a rank's steps, as `planner.stage_costs.StageCosts` in JSON."""

    costs: msgspec.Raw


class Warm(msgspec.Struct, frozen=True, kw_only=True, tag="warm", tag_field="event"):
    """A spare process has imported what a rank needs, and waits to become one.

    Attributes:
        own_bytes: bytes of memory that it holds and shares with no other process.
    """

    own_bytes: Count


class LinkJudged(msgspec.Struct, frozen=True, kw_only=True, tag="link_judged", tag_field="event"):
    """A link between two hosts has become slow while it was in use, or is well again.

    Attributes:
        sender, receiver: names of the hosts.
        bytes_per_s: the most that the link has carried while it was becoming slow.
        measured_bytes_per_s: the speed that was measured before the link was used.
    """

    sender: Word
    receiver: Word
    is_slow: bool
    bytes_per_s: Speed
    measured_bytes_per_s: Speed


class ChildFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed", tag_field="event"):
    """The child has failed and is about to exit.

    Attributes:
        error: the cause.
        trace: the end of the stack trace, if the cause is an exception that is not ours.
    """

    error: ErrorInfo
    trace: str = ""


StatusEvent = (
    LoadProgressed
    | TensorsRead
    | WeightsLoaded
    | DrafterLoaded
    | TextSideLoaded
    | Ready
    | Abandoned
    | LinkExchanged
    | Alive
    | Measured
    | Warm
    | LinkJudged
    | ChildFailed
)

_events: msgspec.json.Decoder[StatusEvent] = msgspec.json.Decoder(StatusEvent)


def decode_status(line: bytes) -> StatusEvent:
    """Return the event in one line of a status pipe."""
    return _events.decode(line)


def _status_line(event: StatusEvent) -> bytes:
    """Return an event as a line.

    If the event has an error, its texts are cut until the line is written whole or not at all: they may come
    from other processes and have any length.
    """
    line = msgspec.json.encode(event) + b"\n"
    limit = _MAX_TEXT
    while len(line) > _PIPE_ATOMIC_BYTES and isinstance(event, ChildFailed | Abandoned) and limit:
        limit //= 2
        event = _shortened(event, limit)
        line = msgspec.json.encode(event) + b"\n"
    return line


def _shortened(event: ChildFailed | Abandoned, limit: int) -> ChildFailed | Abandoned:
    error = event.error
    short = msgspec.structs.replace(error, message=error.message[:limit], remedy=error.remedy[:limit])
    if isinstance(event, ChildFailed):
        return msgspec.structs.replace(event, error=short, trace=event.trace[-limit:] if limit else "")
    return msgspec.structs.replace(event, error=short)


def failure(error: BaseException) -> ChildFailed:
    """Return the event that reports `error`, with the end of its stack trace if it is not an error of ours.

    An error of ours brings the trace of the exception that caused it, if there is one.
    """
    info = describe(error)
    cause = error.__cause__ if isinstance(error, PenstockError) else error
    trace = "".join(traceback.format_exception(cause))[-_MAX_TEXT:] if cause else ""
    return ChildFailed(error=msgspec.structs.replace(info, message=info.message[:_MAX_TEXT]), trace=trace)


class StatusWriter:
    """The child's end of its status pipe. Never fails: the supervisor may be slow or gone.

    Waits, for a while, only for what a rank reports once it has loaded, of which there may be more than the
    pipe holds, and for lines that the pipe may take in part. Other lines are dropped if there is no room.
    """

    def __init__(self, fd: int) -> None:
        self._lines = WholeLines(fd)
        self._percent = -1

    def write(self, event: StatusEvent) -> None:
        """Write one line; write progress only if the percentage changes."""
        if isinstance(event, LoadProgressed) and not self._is_news(event):
            return
        line = _status_line(event)
        waits = isinstance(event, TensorsRead | WeightsLoaded) or len(line) > _PIPE_ATOMIC_BYTES
        self._lines.write(line, ROOM_LIMIT_S if waits else 0.0)

    def move_to(self, fd: int) -> None:
        """Write to another pipe from now on; `fd` stays the caller's."""
        self._lines.move_to(fd)

    def _is_news(self, progress: LoadProgressed) -> bool:
        percent = 100 * progress.done // max(progress.total, 1)
        is_news, self._percent = percent != self._percent, percent
        return is_news


class Pulse:
    """Tells the thread that reports `Alive` whether the main loop of its process still turns."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beat_at: float | None = None

    def beat(self) -> None:
        """Record that the loop turns; after the first call, more calls must come, at least one a second."""
        self._beat_at = self._clock()

    @property
    def is_alive(self) -> bool:
        return self._beat_at is None or self._clock() - self._beat_at < STUCK_S


def keep_saying_alive(status: StatusWriter) -> Pulse:
    """Start a thread that reports `Alive` each second, except while the main loop stands still.

    Returns:
        The pulse that the main loop beats. Until its first beat the loop counts as turning.
    """
    pulse = Pulse()

    def run() -> None:
        while True:
            if pulse.is_alive:
                status.write(Alive())
            now = time.monotonic()
            time.sleep(next_beat(now, ALIVE_INTERVAL_S) - now)

    threading.Thread(target=run, name="heartbeat", daemon=True).start()
    return pulse


def encode_config(config: msgspec.Struct) -> bytes:
    """Return the bytes of a config, which the parent writes to the child's config pipe and then closes it."""
    return msgspec.msgpack.encode(config)


def read_config(fd: int, config_type: type[Config]) -> Config:
    """Read the config from the inherited pipe `fd` until the pipe ends, and close the pipe."""
    with os.fdopen(fd, "rb") as pipe:
        raw = pipe.read()
    try:
        return msgspec.msgpack.decode(raw, type=config_type)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"the config on descriptor {fd} is not a {config_type.__name__}: {error}."
        ) from error


def run_child(
    program: str,
    arguments: Sequence[str] | None,
    config_type: type[Config],
    live: Callable[[Config, StatusWriter, argparse.Namespace], int],
    *,
    more: Sequence[str] = (),
) -> int:
    """Run a child process from start to end: read its arguments and config, call `live`, report a failure.

    Args:
        program: name of the module, for usage errors.
        arguments: arguments of the command line; None: those of this process.
        live: takes config, status writer and arguments, and returns the exit code. It first calls
            `enter_child`; a spare calls the two parts of that at moments of its own choice.
        more: options with further descriptors besides config and status, such as "--control-fd".

    Returns:
        The exit code that `live` has returned, or that of the error which it has raised.
    """
    parser = argparse.ArgumentParser(prog=program)
    for name in ("--config-fd", "--status-fd", *more):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args(arguments)
    status = StatusWriter(options.status_fd)
    try:
        return live(read_config(options.config_fd, config_type), status, options)
    except Exception as error:
        status.write(failure(error))
        return error.exit_code if isinstance(error, PenstockError) else PenstockError.exit_code


def enter_child(title: str, config: StartedByParent) -> None:
    """Name the process, make it die with its parent, and let signals print where every thread is.

    Args:
        title: name of the process, as `ps` shows it.
        config: config of the process, which names the parent.
    """
    bind_to_parent(config)
    name_child(title)


def bind_to_parent(config: StartedByParent) -> None:
    """Let this process die with the process that has started it.

    Args:
        config: config of this process, which names the parent.
    """
    die_with_parent(config.parent_pid)


def name_child(title: str) -> None:
    """Name the process, and let signals print where every thread is."""
    setproctitle.setproctitle(title)
    show_threads_on_request()


def show_threads_on_request() -> None:
    """Print where every thread is, on standard error, when SIGUSR1 or a fatal signal comes."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def bound_thread_pools(count: int) -> None:
    """Set the thread pools of torch's libraries to `count` threads; call it before torch is imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(count)


def leave(code: int) -> NoReturn:
    """End the process without taking the interpreter and torch apart, which takes longer than a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when the thread that created it ends; it dies at once if it has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
