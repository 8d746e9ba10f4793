"""The start of every child process of the supervisor, and its reports.

The supervisor writes a child's config to a pipe and reads JSON lines from another: the child's progress,
readiness or the first cause of its failure. Used by the entry points of ranks, spares, core, API process
and measuring processes, and for the decoding by the supervisor. Imports no torch, so that a rank can set its
environment before torch starts.
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
ROOM_LIMIT_S = 60.0  # for a supervisor to read what a rank has said
STUCK_S = 3.0  # a main loop that has not turned for so long stands still
_PR_SET_PDEATHSIG = 1
_PIPE_ATOMIC_BYTES = 4096  # PIPE_BUF: a line this short is written whole or not at all
_MAX_TEXT = 1500  # so that message and trace of a failure fit a line

Config = TypeVar("Config")

LoadPhase = Literal["fetching", "loading"]
PromptForm = Literal["messages", "text", "token_ids"]


class StartedByParent(Protocol):
    """The config of a process that dies with the process that has started it."""

    @property
    def parent_pid(self) -> int: ...


class LoadProgressed(msgspec.Struct, frozen=True, kw_only=True, tag="progress", tag_field="event"):
    """The tensor bytes loaded so far, of all that the rank will load; or fetched by its host before."""

    done: Count
    total: Count
    what: LoadPhase = "loading"


class TensorsRead(msgspec.Struct, frozen=True, kw_only=True, tag="read", tag_field="event"):
    """Digests of tensors that the rank has read: some records of a table of `weights.read_digests`."""

    digests: Annotated[bytes, msgspec.Meta(max_length=_PIPE_ATOMIC_BYTES)]


class WeightsLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded", tag_field="event"):
    """The weights are in memory, and all `TensorsRead` have been sent.

    Attributes:
        identity: identity of the sampled model (`kvstore.names.model_identity`).
    """

    bytes_read: Count
    seconds: Seconds
    identity: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class DrafterLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="drafter_loaded", tag_field="event"):
    """The model that drafts is in memory, in a process of the core."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready", tag_field="event"):
    """The child serves in this epoch.

    Attributes:
        rank: the facts that a rank has told the core of itself.
        numeric_classes: those of all ranks, stage by stage, as they have told the core.
    """

    epoch: Small = 0
    rank: RankLoaded | None = None
    numeric_classes: list[str] = []


class Abandoned(msgspec.Struct, frozen=True, kw_only=True, tag="abandoned", tag_field="event"):
    """The child could not go on because of others: it has left the epoch, and waits for the next.

    Attributes:
        leave_s: how long others may take to leave it as well, where the child knows.
    """

    epoch: Small
    error: ErrorInfo
    leave_s: Seconds | None = None


class LinkExchanged(msgspec.Struct, frozen=True, kw_only=True, tag="link_exchanged", tag_field="event"):
    """A rank receives over another link within an epoch; the one before is empty and unused.

    Attributes:
        number: number of the new link.
    """

    epoch: Small
    number: Small


class TextSideLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="text_side_loaded", tag_field="event"):
    """The API process has read the tokenizer and the chat template of the model.

    Attributes:
        prompt_form: richest form of prompt that the model takes.
        cautions: sentences for the user, about what will not work.
    """

    prompt_form: PromptForm
    cautions: list[str] = []


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag="alive", tag_field="event"):
    """The process is not stopped, and its main loop turns, where it has one. Once a second."""


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
        bytes_per_s: the most that it has carried while it was becoming slow.
        measured_bytes_per_s: what was measured before it was used.
    """

    sender: Word
    receiver: Word
    is_slow: bool
    bytes_per_s: Speed
    measured_bytes_per_s: Speed


class ChildFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed", tag_field="event"):
    """The child is about to exit. `trace` is for the log of a verbose supervisor."""

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
    """Return the line of an event.

    One that tells of an error is short enough to be written whole or not at all: its text may come from
    others and have any length.
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
    """Return the event that reports `error`; foreign exceptions bring the end of their trace."""
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
    """The sign of the main loop of a process to the thread that says `Alive` for it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beat_at: float | None = None

    def beat(self) -> None:
        """Note that the loop turns. From the first call on it must be called at least every second."""
        self._beat_at = self._clock()

    @property
    def is_alive(self) -> bool:
        return self._beat_at is None or self._clock() - self._beat_at < STUCK_S


def keep_saying_alive(status: StatusWriter) -> Pulse:
    """Report `Alive` from a thread of its own until the process ends, or its main loop stands still."""
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
    """Return the bytes that the supervisor writes to a child's config pipe, before it closes its end."""
    return msgspec.msgpack.encode(config)


def read_config(fd: int, config_type: type[Config]) -> Config:
    """Read the config from the inherited pipe `fd` until its end, and close it."""
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
    """Run a child process from start to end: its arguments, its config, `live`, the report of its failure.

    Args:
        program: name of the module, for usage errors.
        arguments: arguments of the command line; None takes the process' own.
        live: (config, status, arguments) -> exit code; its first act is `enter_child`.
        more: descriptors that it is given besides config and status, such as "--control-fd".

    Returns:
        The exit code: that of `live`, or of the error that it has raised.
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
        config: config of the process; names the parent.
    """
    bind_to_parent(config)
    name_child(title)


def bind_to_parent(config: StartedByParent) -> None:
    """Let the process die with the process that has started it.

    Args:
        config: config of the process; names the parent.
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
    """Bound the pools that torch's libraries make when they are loaded; call before torch is imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(count)


def leave(code: int) -> NoReturn:
    """End the process without taking the interpreter and torch apart, which takes longer than a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when the thread that created it ends, or has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
