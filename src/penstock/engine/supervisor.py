"""The parent of all processes of an engine. Torch-free; runs no model code, decides nothing about requests.

`Supervisor.run` makes the wiring, starts API process (or none, for an `LLM`), core and ranks as its direct
children, reports their progress and waits. SIGTERM and SIGINT drain; a second one ends at once.

    loading ──all ready──▶ serving ──signal, or the caller is gone──▶ draining ──▶ ended (code 0)
       │                    │   ▲                                        │
       │       a stage ended│   │a step has crossed                      │
       │                    ▼   │                                        │
       └──a child ended──▶ recovering ──another child ended──────────────┴──▶ ended (its cause)

A lost stage ends the *epoch*: everybody gets new connections, only what was lost is started again, and the
other ranks keep their weights. When that fails again and again, running requests end, and it is tried with
growing pauses. Any other child's end is the engine's end: everybody else is ended, and the first cause is
reported and gives the exit code.

Nothing that is made here has a name (memfd, eventfd, sockets without a path), and children die with the
thread that started them, so that a `kill -9` of the supervisor leaves nothing behind.

`penstock serve` runs one in its main thread. `python -m penstock.engine.supervisor` is what `LLM` starts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

import msgspec

from penstock.batch import RankLoaded
from penstock.config import CoreProcessConfig, EngineConfig, RankConfig, RankProcessConfig, ServerConfig
from penstock.engine.auto_partition import settle_partition
from penstock.engine.children import Child, Family, spawn
from penstock.engine.endpoints import Endpoint
from penstock.engine.fronts import CallerFront, Front, HttpFront
from penstock.engine.launch import Host, LaunchPlan, resolve
from penstock.engine.losses import Losses
from penstock.engine.reports import (
    Draining,
    EngineReady,
    Event,
    Failed,
    LoadProgress,
    Notice,
    PlainReporter,
    Recovered,
    Reporter,
    StageLoaded,
    StageLost,
    StageReady,
    stage_parts,
)
from penstock.engine.wiring import Wiring
from penstock.errors import ErrorInfo, PeerError, PenstockError, StageLostError, error_from_info
from penstock.executor import child as child_process
from penstock.executor.base import first_cause
from penstock.executor.control import ControlSocket, EpochLost, PipelineLost, Stop

CAUSE_GRACE_S = 0.5  # for the rank behind a failure of the core or the front to say why
CORE_GRACE_S = 1.0  # for the core to tell its clients
FRONT_GRACE_S = 3.0  # for the API process to end its streams with an error
STOP_GRACE_S = 5.0  # for core and ranks to leave after the front
POLL_S = 0.01
COMPANY_S = 0.05  # after a loss: what ends one stage often ends others
TICK_S = 1.0


class _Stop(Exception):
    """A signal came, or the user is gone: end in order."""


class _ChildEnded(Exception):
    """A child ended although nobody asked it to."""

    def __init__(self, child: Child) -> None:
        super().__init__(child.name)
        self.child = child


class Supervisor:
    """Args:
    engine: what to serve.
    front: who uses it.
    reporter: gets every event; by default a line each on standard error.
    """

    def __init__(self, engine: EngineConfig, front: Front, reporter: Reporter | None = None) -> None:
        self._engine = engine
        self._front = front
        self._reporter = reporter or PlainReporter()

    @classmethod
    def for_server(
        cls, engine: EngineConfig, server: ServerConfig, reporter: Reporter | None = None
    ) -> Supervisor:
        """The supervisor of `penstock serve`."""
        return cls(engine, HttpFront(engine, server), reporter)

    def run(self) -> int:
        """Serve until told to stop, in the main thread. Returns the exit code; raises nothing of ours."""
        started = time.monotonic()
        try:
            host = Host.detect()
            self._front.open()
            plan = resolve(settle_partition(self._engine, host, self._reporter), host)
            with _signals() as signal_fd:
                engine = _RunningEngine(plan, self._front, self._reporter, signal_fd, started)
                try:
                    return engine.run()
                finally:
                    engine.close()
        except (PenstockError, OSError) as error:
            return self._refuse(error)
        finally:
            self._front.close()

    def _refuse(self, error: PenstockError | OSError) -> int:
        """Report why nothing was started; the exit code."""
        if isinstance(error, OSError):  # no descriptors, no memory, no temporary directory
            error = PeerError(f"the engine cannot be started: {error}.", remedy="See `penstock doctor`.")
        self._reporter.report(Failed(error=error.info()))
        return error.exit_code


class _RunningEngine:
    """The children of one engine, from start to end."""

    def __init__(
        self, plan: LaunchPlan, front: Front, reporter: Reporter, signal_fd: int, started: float
    ) -> None:
        self._plan = plan
        self._front = front
        self._reporter = reporter
        self._signal_fd = signal_fd
        self._started = started
        self._client = Endpoint()
        self._wiring = Wiring(plan)
        self._family = Family()
        self._ready: set[Child] = set()
        self._is_serving = False
        self._loaded: dict[int, RankLoaded] = {}
        self._ranks: list[Child] = []
        self._control: dict[Child, ControlSocket] = {}  # of the core and of ranks that live
        self._losses = Losses(
            heartbeat_limit_s=plan.core.parallel.heartbeat_limit_s,
            leave_s=plan.ranks[0].wait_timeout_s / plan.num_stages,  # as long as a step may take
        )

    @property
    def _fronts(self) -> list[Child]:
        return [child for child in self._family.children if child not in self._control]

    def run(self) -> int:
        try:
            self._start()
            while not self._ready.issuperset(self._family.children):
                self._raise_if_any(self._watch())
            self._announce()
            self._is_serving = True
            while True:
                self._serve_on()
        except _Stop:
            return self._drain()
        except _ChildEnded as ended:
            return self._fail(self._first_cause(ended.child))

    def close(self) -> None:
        self._family.close()
        for control in self._control.values():
            control.close()
        self._wiring.close()
        self._client.close()

    def _start(self) -> None:
        """Ranks first: they take longest."""
        self._ranks += [self._spawn_rank(rank) for rank in self._plan.ranks]
        core = CoreProcessConfig(
            core=self._plan.core, parent_pid=os.getpid(), client_address=self._client.bind_address
        )
        self._core = self._spawn("penstock.engine.core_process", core, "core", [self._client.listen_fd])
        self._tell_ends()
        self._front.start(self._family, self._plan, self._client)
        self._client.close_listener()
        for fd in (self._signal_fd, *self._front.lifeline_fds):
            self._family.watch(fd)

    def _spawn_rank(self, rank: RankConfig) -> Child:
        config = RankProcessConfig(rank=rank, parent_pid=os.getpid())
        return self._spawn("penstock.executor.worker", config, f"stage {rank.stage}", stage=rank.stage)

    def _spawn(
        self,
        module: str,
        config: msgspec.Struct,
        name: str,
        inherit: Sequence[int] = (),
        stage: int | None = None,
    ) -> Child:
        control = ControlSocket()
        child = self._family.add(
            spawn(
                module,
                child_process.encode_config(config),
                name=name,
                stage=stage,
                inherit=[*inherit, control.child_fd],
                arguments=["--control-fd", str(control.child_fd)],
            )
        )
        control.close_child_end()
        self._control[child] = control
        return child

    def _tell_ends(self) -> None:
        """Core and ranks learn where they meet in this epoch."""
        self._control[self._core].send(self._wiring.core())
        for stage, child in enumerate(self._ranks):
            self._control[child].send(self._wiring.rank(stage))
        self._wiring.close_sockets()

    def _serve_on(self, leaving: Set[Child] = frozenset()) -> Set[Child]:
        """Wait for what comes next, and mend the pipe if it is broken; who of `leaving` has ended."""
        ended, losses = self._watch(TICK_S), self._losses
        self._end_the_lifeless()
        if losses.causes and not ended:
            ended = self._await_culprit()
        self._raise_if_any(ended - set(self._ranks) - leaving)
        if ended - leaving or losses.causes:
            time.sleep(COMPANY_S)
            self._end_epoch({child for child in self._living_ranks() if child.exit_code is not None})
        if losses.is_due(time.monotonic()):
            try:
                self._begin_epoch()
            except OSError as error:  # no memory, no descriptors: perhaps later
                self._lose(PeerError(f"no new epoch could begin: {error}.").info(), ended=set())
        return ended & leaving

    def _living_ranks(self) -> list[Child]:
        """Those that have not been buried."""
        return [child for child in self._ranks if child in self._control]

    def _await_culprit(self) -> set[Child]:
        """A child has left the epoch because of another: that one may be about to end."""

        def ended() -> set[Child]:
            for child in self._living_ranks():
                if child.failure is not None:  # it has said so, and is about to leave
                    child.send_signal(signal.SIGKILL)
            return {child for child in self._family.children if child.exit_code is not None}

        self._hear_until(ended, CAUSE_GRACE_S)
        return ended()

    def _end_epoch(self, ended: set[Child]) -> None:
        """Everybody leaves it; those that have ended are to be started again, at once at first."""
        causes = self._losses.causes
        self._lose(self._first_cause(min(ended, key=_stage_of)) if ended else first_cause(causes), ended)

    def _lose(self, cause: ErrorInfo, ended: set[Child]) -> None:
        losses, epoch = self._losses, self._losses.epoch
        gone = {stage for stage, child in enumerate(self._ranks) if child not in self._control}
        lost = sorted(gone | set(map(_stage_of, ended)))
        pause_s = losses.end(set(lost), time.monotonic())
        self._reporter.report(StageLost(error=cause, epoch=epoch, restarts=lost, retry_s=pause_s))
        self._control[self._core].send(EpochLost(cause, restarts=lost, is_final=losses.is_repeated))
        self._wiring.end()
        for child in ended:
            self._bury(child)

    def _begin_epoch(self) -> None:
        """New processes for those that are missing, and new connections for all."""
        for stage in self._losses.begin():
            self._ranks[stage] = self._spawn_rank(
                _replacement(self._plan.ranks[stage], self._loaded.values())
            )
        self._wiring = Wiring(self._plan, self._losses.epoch)
        self._tell_ends()

    def _bury(self, child: Child) -> None:
        self._control.pop(child).close()
        self._ready.discard(child)
        self._family.reap(child)

    def _end_the_lifeless(self) -> None:
        """Kill ranks that were stopped, or hang: they are then lost as any other."""
        now = time.monotonic()
        living = {_stage_of(child): child for child in self._living_ranks() if child.exit_code is None}
        ready = {stage for stage, child in living.items() if child in self._ready}
        heard_at = {stage: child.heard_at for stage, child in living.items()}
        for stage, silence_s in self._losses.silent(heard_at, now, set(living) - ready).items():
            _kill(living[stage], f"has given no sign of life for {silence_s:.1f} s")
        for stage in self._losses.hung(ready, now):
            _kill(living[stage], f"has not left epoch {self._losses.epoch - 1}")

    def _watch(self, timeout_s: float | None = None) -> set[Child]:
        """Wait for news and hear them; the children that have ended. Raises `_Stop` for what is no child."""
        children, descriptors = self._family.wait(timeout_s)
        if descriptors:
            self._consume(descriptors)
            raise _Stop
        for child in children:
            self._hear(child)
        return {child for child in children if child.exit_code is not None}

    def _consume(self, descriptors: set[int]) -> None:
        """A signal is taken; a lifeline that was cut stays cut and is not watched any more."""
        for fd in descriptors:
            if fd == self._signal_fd:
                os.read(fd, 64)
            else:
                self._family.unwatch(fd)

    def _raise_if_any(self, ended: set[Child]) -> None:
        if ended:
            raise _ChildEnded(min(ended, key=lambda child: child.stage is None))

    def _hear(self, child: Child) -> None:
        events = child.read_status()
        if child.status_ended:
            self._family.silence(child)
        for event in events:
            if isinstance(event, child_process.Ready):
                self._ready.add(child)
                is_present = event.epoch == self._losses.epoch and self._losses.missing is None
                if child is self._core and is_present and event.epoch > 0:
                    seconds = self._losses.recovered(time.monotonic())
                    self._reporter.report(Recovered(epoch=event.epoch, seconds=seconds))
            elif isinstance(event, child_process.Abandoned):
                self._losses.leave(event.epoch, event.error, child.stage)
            elif isinstance(event, child_process.Progress):
                told = LoadProgress(stage=_stage_of(child), done_bytes=event.done, total_bytes=event.total)
                self._reporter.report(told)
            elif isinstance(event, child_process.Loaded):
                self._loaded[event.rank.stage] = event.rank
                self._reporter.report(
                    StageLoaded(
                        stage=event.rank.stage,
                        pid=child.pid,
                        bytes_read=event.rank.bytes_read,
                        seconds=event.rank.load_seconds,
                    )
                )

    def _announce(self) -> None:
        for event in _what_is_there(self._plan, self._loaded, [child.pid for child in self._ranks]):
            self._reporter.report(event)
        seconds = time.monotonic() - self._started
        self._reporter.report(EngineReady(address=self._front.address(self._client), seconds=seconds))

    def _drain(self) -> int:
        """End in order: the front when its requests are done, then the core, which lets the ranks go."""
        try:
            if self._is_serving:
                self._reporter.report(Draining(seconds=self._front.drain_s))
                for child in self._fronts:
                    child.send_signal(signal.SIGTERM)
                fronts, deadline = set(self._fronts), time.monotonic() + self._front.drain_s + FRONT_GRACE_S
                while fronts and time.monotonic() < deadline:
                    for child in self._serve_on(fronts):
                        fronts.discard(child)
                        self._family.reap(child)
                for child, control in self._control.items():
                    control.send(Stop())
                    if child in set(self._ranks) - self._ready:
                        child.send_signal(signal.SIGKILL)  # it loads, and looks at nothing until it has
                self._await_end(list(self._control), STOP_GRACE_S)
        except _Stop:
            pass  # a second signal: at once
        except _ChildEnded as ended:
            return self._fail(self._first_cause(ended.child))
        return 0

    def _await_end(self, children: Sequence[Child], timeout_s: float) -> None:
        """Reap children that were asked to leave; those that have not after this long are killed later."""
        deadline = time.monotonic() + timeout_s
        leaving = set(children)
        while leaving and (remaining := deadline - time.monotonic()) > 0:
            ended = self._watch(remaining)
            self._raise_if_any(ended - leaving)
            for child in ended:
                leaving.discard(child)
                self._family.reap(child)

    def _fail(self, cause: ErrorInfo) -> int:
        """It is over: let the core tell its clients and the front its users, end all, say why."""
        self._control[self._core].send(PipelineLost(cause))
        traces = [child.trace for child in self._family.children if child.failure is cause]
        self._reporter.report(Failed(error=cause, trace="".join(traces)))
        if self._is_serving:
            self._let_go([self._core], CORE_GRACE_S)
            for child in self._fronts:
                child.send_signal(signal.SIGTERM)
            self._let_go(self._fronts, FRONT_GRACE_S)
        self._family.kill()
        return error_from_info(cause).exit_code

    def _first_cause(self, ended: Child) -> ErrorInfo:
        """What explains the end of this child: its own words, or those of a rank that brought it down."""
        if ended.stage is None or not _is_cause(ended):
            self._wait_for_cause()
        guilty = [child for child in (*self._living_ranks(), ended) if _explains(child)]
        return first_cause([child.failure or _describe(child) for child in guilty or [ended]])

    def _wait_for_cause(self) -> None:
        """Give the ranks a moment to say why."""
        self._hear_until(lambda: any(map(_is_cause, self._living_ranks())), CAUSE_GRACE_S)

    def _let_go(self, children: Sequence[Child], timeout_s: float) -> None:
        """Give these a moment to end."""
        self._hear_until(lambda: all(child.exit_code is not None for child in children), timeout_s)

    def _hear_until(self, condition: Callable[[], object], timeout_s: float) -> None:
        """Hear everybody until the condition holds; for this long at most."""
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline:
            time.sleep(POLL_S)
            for child in self._family.children:
                self._hear(child)


def _what_is_there(
    plan: LaunchPlan, loaded: Mapping[int, RankLoaded], pids: Sequence[int]
) -> Iterator[Notice | StageReady]:
    """What was decided, and a line for each stage, once all have loaded."""
    kernels = dict.fromkeys(rank.kernels for rank in loaded.values())
    texts = [*plan.notes, *(f"kernels: {found}" for found in kernels)]
    on_cpu = [rank.kernels for stage, rank in loaded.items() if plan.ranks[stage].device_type == "cpu"]
    if len({found.startswith("none") for found in on_cpu}) > 1:
        texts.append("stages differ in kernels: tokens may differ from those of other runs; start again.")
    yield from (Notice(text=text) for text in texts)
    num_blocks = min((rank.max_blocks for rank in loaded.values()), default=0)
    for pid, config in zip(pids, plan.ranks, strict=True):
        rank = loaded[config.stage]
        yield StageReady(
            stage=config.stage,
            pid=pid,
            parts=stage_parts(config.stage, config.num_stages, config.start_layer, config.end_layer),
            tensor_bytes=rank.tensor_bytes,
            num_blocks=num_blocks,
            stranded_bytes=(rank.max_blocks - num_blocks) * rank.block_bytes,
        )


def _replacement(rank: RankConfig, loaded: Iterable[RankLoaded]) -> RankConfig:
    """As at the start, but for what the others have settled: they hold their KV cache, and their head."""
    num_blocks = min(message.max_blocks for message in loaded)
    return msgspec.structs.replace(rank, num_blocks=num_blocks, num_sharers=1, tied_head="load")


def _stage_of(rank: Child) -> int:
    assert rank.stage is not None
    return rank.stage


def _kill(child: Child, reason: str) -> None:
    """End a child that cannot be asked to."""
    if child.failure is None:
        message = f"{child.name} (pid {child.pid}) {reason}, and was killed."
        child.failure = StageLostError(message, stage=child.stage).info()
    child.send_signal(signal.SIGKILL)


def _explains(child: Child) -> bool:
    """Whether it has failed, and not merely left."""
    return child.failure is not None or bool(child.exit_code)


def _is_cause(child: Child) -> bool:
    """Whether it has failed by itself, and not because another one has."""
    if child.failure is not None:
        some_failure = ErrorInfo(kind="PenstockError", message="")  # ranks before what is but a consequence
        return first_cause([child.failure, some_failure]) is child.failure
    return (child.exit_code or 0) < 0


def _describe(child: Child) -> ErrorInfo:
    """The end of a child that said nothing, in words."""
    message = f"{child.name} (pid {child.pid}) {child.end()}."
    return StageLostError(message, stage=child.stage).info()


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """A descriptor that becomes readable when SIGTERM, SIGINT or SIGHUP comes, in place of their actions."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    former = {number: signal.signal(number, lambda *_: None) for number in numbers}
    former_fd = signal.set_wakeup_fd(writer.fileno())
    try:
        yield reader.fileno()
    finally:
        signal.set_wakeup_fd(former_fd)
        for number, action in former.items():
            signal.signal(number, action)
        reader.close()
        writer.close()


class StatusReporter:
    """Sends events as JSON lines to the program that started this process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        os.set_blocking(fd, False)

    def report(self, event: Event) -> None:
        with contextlib.suppress(BrokenPipeError, BlockingIOError):  # the program has gone, or does not read
            os.write(self._fd, msgspec.json.encode(event) + b"\n")


class CallerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What `LLM` writes to the config pipe, as one line of JSON; the pipe then stays open as its lifeline."""

    engine: EngineConfig
    caller_pid: int


def read_caller_config(fd: int) -> CallerConfig:
    """Read the line, and leave the pipe open."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(fd, 65536)
        if not chunk:
            break
        line += chunk
    return msgspec.json.decode(line, type=CallerConfig)


def main() -> int:
    """Entry point of the supervisor that an `LLM` starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-fd", type=int, required=True)
    parser.add_argument("--status-fd", type=int, required=True)
    arguments = parser.parse_args()
    config = read_caller_config(arguments.config_fd)
    front = CallerFront(arguments.config_fd, config.caller_pid)
    return Supervisor(config.engine, front, StatusReporter(arguments.status_fd)).run()


if __name__ == "__main__":
    sys.exit(main())
