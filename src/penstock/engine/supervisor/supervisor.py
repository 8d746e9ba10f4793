"""Starts the processes of an engine, watches them, and replaces those that are lost.

Torch-free: it runs no model code, and decides nothing about requests.
`Supervisor.run` starts the API process (none for an `LLM`), the core and the stages of its own host as its
children, reports their progress and waits. Agents start the stages of other hosts. SIGTERM, SIGINT and SIGHUP
drain; a second signal ends at once.

    loading ──all ready──▶ serving ──signal, or the caller is gone──▶ draining ──▶ ended (code 0)
       │                     │  ▲
       │             a child ended, or says nothing: it starts again
       │             (`engine.supervisor.pipeline_processes`, for core and stages)
       └──a child ended──▶ ended (the first cause gives the code)

Nothing that is made here has a name (memfd, eventfd, sockets without a path), and children die with the
thread that started them, so that a `kill -9` of the supervisor leaves nothing behind.

`penstock serve` runs one in its main thread. `python -m penstock.engine.supervisor.supervisor` is what `LLM`
starts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence, Set

import msgspec

from penstock import faults
from penstock.config.engine import EngineConfig
from penstock.config.server import ServerConfig
from penstock.engine.supervisor.auto_partition import settle_partition
from penstock.engine.supervisor.fronts import ApiProcessFront, CallingProgram, EngineUser
from penstock.engine.supervisor.launch import resolve_replicas, with_faults
from penstock.engine.supervisor.losses import BackOff, Heartbeats
from penstock.engine.supervisor.numeric_classes import unlike_replicas
from penstock.engine.supervisor.pipe_layout import PipeLayout
from penstock.engine.supervisor.pipeline_processes import PipelineProcesses, begin_together
from penstock.engine.supervisor.reports import (
    Caution,
    Draining,
    EngineFailed,
    EngineReady,
    Event,
    FrontLost,
    FrontRecovered,
    HostSaid,
    ModelFound,
    Notice,
    PlainReporter,
    Reporter,
    StageReady,
    SteadyReporter,
)
from penstock.engine.supervisor.spares import Spares
from penstock.engine.supervisor.standbys import standbys_of
from penstock.errors import ErrorInfo, PeerError, PenstockError, error_from_info
from penstock.hosts.launchers.backends import open_hosts
from penstock.hosts.launchers.engine_hosts import EngineHosts, Voices
from penstock.hosts.member import Member
from penstock.hosts.member_watch import MemberWatch
from penstock.process.child import Ready, StatusEvent, TextSideLoaded, show_threads_on_request
from penstock.process.readiness import Waitable
from penstock.process.signals import SignalSource, signals_of_the_end
from penstock.process.whole_lines import WholeLines

FRONT_GRACE_S = 3.0  # for the API process to end its streams with an error
STOP_GRACE_S = 5.0  # for core and stages to leave after the front
TICK_S = 1.0


class _Stop(Exception):
    """A signal came, or the user is gone: end in order."""


class _ChildEnded(Exception):
    """A child ended before all were ready."""

    def __init__(self, child: Member) -> None:
        super().__init__(child.name)
        self.child = child


class Supervisor:
    """The supervisor of an engine: starts, watches and ends its processes.

    Args:
        engine: what to serve.
        front: the user of the engine: an API process, or a calling program.
        reporter: gets every event; by default a line each on standard error.
        standby_stages: stages whose ranks have standbys with their weights (`engine.supervisor.standbys`).
    """

    def __init__(
        self,
        engine: EngineConfig,
        front: EngineUser,
        reporter: Reporter | None = None,
        *,
        standby_stages: Collection[int] = (),
    ) -> None:
        self._engine = engine
        self._standby_stages = standby_stages
        self._front = front
        self._reporter = SteadyReporter(reporter or PlainReporter())

    @classmethod
    def for_server(
        cls, engine: EngineConfig, server: ServerConfig, reporter: Reporter | None = None
    ) -> Supervisor:
        """Return a supervisor whose engine serves an API process, as `penstock serve` runs it."""
        return cls(engine, ApiProcessFront(engine, server), reporter)

    def run(self) -> int:
        """Start the engine, serve until told to stop, in the main thread, and return the exit code.

        No error of ours is raised: it is reported, and has an exit code of its own.
        """
        started = time.monotonic()
        gathered: EngineHosts | None = None
        try:
            self._front.open()
            gathered = open_hosts(self._engine, Voices(self._note, self._caution, self._show))
            gathered.gather(self._front.lifelines)
            hosts = gathered.hosts
            settled = settle_partition(self._engine, hosts, self._reporter)
            plans = resolve_replicas(settled, hosts.resources())
            self._reporter.report(ModelFound(directory=plans[0].model_path))
            wanted = faults.parse(os.environ.get(faults.ENVIRONMENT, ""))
            links = tuple(hosts.routes.links())
            plans = [msgspec.structs.replace(with_faults(plan, wanted), host_links=links) for plan in plans]
            layouts = [PipeLayout(plan, hosts, settled) for plan in plans]
            with signals_of_the_end() as signals:
                engine = _RunningEngine(
                    layouts, gathered, self._front, self._reporter, signals, started, self._standby_stages
                )
                try:
                    return engine.run()
                finally:
                    engine.close()
        except (PenstockError, OSError) as error:
            return self._refuse(error)
        finally:
            self._front.close()
            if gathered is not None:
                gathered.close()

    def _note(self, text: str) -> None:
        self._reporter.report(Notice(text=text))

    def _caution(self, text: str) -> None:
        self._reporter.report(Caution(text=text))

    def _show(self, host: str, process: str, text: str) -> None:
        self._reporter.report(HostSaid(host=host, process=process, text=text))

    def _refuse(self, error: PenstockError | OSError) -> int:
        """Report why nothing was started, and return the exit code."""
        if isinstance(error, OSError):  # no descriptors, no memory, no temporary directory
            error = PeerError(f"the engine cannot be started: {error}.", remedy="See `penstock doctor`.")
        self._reporter.report(EngineFailed(error=error.info()))
        return error.exit_code


class _RunningEngine:
    """The children of one engine, from start to end."""

    def __init__(
        self,
        layouts: Sequence[PipeLayout],
        gathered: EngineHosts,
        front: EngineUser,
        reporter: Reporter,
        signals: SignalSource,
        started: float,
        standby_stages: Collection[int] = (),
    ) -> None:
        plans = [layout.plan for layout in layouts]
        self._plan = plans[0]
        self._front = front
        self._reporter = reporter
        self._signals = signals
        self._started = started
        self._has_begun = False
        self._is_serving = False
        self._text_side = TextSideLoaded(prompt_form="messages")
        self._watch = MemberWatch(self._take)
        self._gathered, hosts = gathered, gathered.hosts
        self._replicas = [
            PipelineProcesses(
                layout, hosts, self._watch, reporter, standbys_of(standby_stages, hosts, reporter)
            )
            for layout in layouts
        ]
        self._heartbeats: Heartbeats[Member] = Heartbeats(self._plan.core.parallel.heartbeat_limit_s)
        self._front_losses = BackOff()
        ranks = [rank for plan in plans for rank in plan.ranks]
        self._spares = Spares(hosts, ranks if self._plan.core.parallel.warm_spare else [], reporter)

    @property
    def _fronts(self) -> set[Member]:
        return set(self._watch.members) - set(self._members)

    @property
    def _members(self) -> list[Member]:
        """The members of all replicas."""
        return [child for replica in self._replicas for child in replica.members]

    def run(self) -> int:
        try:
            self._start()
            while not all(child.is_ready for child in self._watch.members):
                self._raise_if_any(self._hear(TICK_S))
                self._has_begun = self._has_begun or begin_together(self._replicas)
                self._end_the_lifeless()
            self._announce()
            while True:
                self._serve_on()
        except _Stop:
            return self._drain()
        except _ChildEnded as ended:
            return self._fail(self._watch.first_cause(ended.child, self._watch.members))

    def close(self) -> None:
        self._watch.close()
        for replica in self._replicas:
            replica.close()

    def _start(self) -> None:
        for replica in self._replicas:
            replica.start()
        self._start_front()
        for source in (self._signals, *self._front.lifelines, *self._gathered.sources):
            self._watch.watch(source)

    def _start_front(self) -> None:
        self._front_losses.begin()
        self._front.start(self._watch, self._plan, [replica.client for replica in self._replicas])

    def _serve_on(self, leaving: Set[Member] = frozenset()) -> Set[Member]:
        """Wait for what comes next, and recover what is broken; return which of `leaving` have ended."""
        ended = self._hear(min(TICK_S, self._heartbeats.due_in(time.monotonic())))
        self._end_the_lifeless()
        self._mend_front((ended & self._fronts) - leaving)
        for replica in self._replicas:
            replica.recover()
            replica.keep_standbys(time.monotonic())
        self._spares.tend(time.monotonic(), is_whole=all(replica.is_whole for replica in self._replicas))
        return ended & leaving

    def _mend_front(self, ended: Set[Member]) -> None:
        now = time.monotonic()
        for child in ended:
            pause_s = self._front_losses.lose(now)
            self._reporter.report(FrontLost(error=child.end(), retry_s=pause_s))
            self._watch.reap(child)
        if self._front_losses.is_due(now):
            try:
                self._start_front()
            except OSError:  # no memory, no descriptors: perhaps later
                self._front_losses.lose(now)

    def _end_the_lifeless(self) -> None:
        """Kill children that were stopped, or hang: they are then lost as any other."""
        living = [child for child in self._watch.members if child.exit_code is None]
        loading = {child for child in living if not child.is_ready}
        silent = self._heartbeats.silent(
            {child: child.heard_at for child in living},
            time.monotonic(),
            loading,
            elsewhere={child for child in living if child.is_elsewhere},
            away={child for child in living if child.is_away},
        )
        for child, silence_s in silent.items():
            self._replica_of(child).kill(child, f"has given no sign of life for {silence_s:.1f} s")
        for replica in self._replicas:
            replica.kill_hung()
            replica.kill_slow_loaders()

    def _replica_of(self, child: Member) -> PipelineProcesses:
        """Return the replica of a member; the first one for a child that is not a member."""
        return next((replica for replica in self._replicas if child in replica.members), self._replicas[0])

    def _hear(self, timeout_s: float) -> set[Member]:
        """Wait for news and hear them; return the children that have ended.

        Raises `_Stop` for a signal, and when the user is gone.
        """
        children, sources = self._watch.wait(timeout_s)
        if sources.intersection(self._gathered.sources):
            self._gathered.admit()
        self._gathered.tend(time.monotonic())
        sources = sources.difference(self._gathered.sources)
        if sources:
            self._consume(sources)
            raise _Stop
        for child in children:
            self._watch.hear(child)
        return {child for child in children if child.exit_code is not None}

    def _take(self, child: Member, event: StatusEvent) -> None:
        if child in self._members:
            self._replica_of(child).take(child, event)
        elif isinstance(event, TextSideLoaded):
            self._text_side = event
        elif isinstance(event, Ready) and self._front_losses.is_pending:
            self._reporter.report(FrontRecovered(seconds=self._front_losses.succeed(time.monotonic())))

    def _consume(self, sources: Set[Waitable]) -> None:
        """Clear a signal, or stop watching a lifeline that was cut and stays cut."""
        for source in sources:
            if source is self._signals:
                self._signals.clear()
            else:
                self._watch.unwatch(source)

    def _raise_if_any(self, ended: set[Member]) -> None:
        if ended:
            raise _ChildEnded(min(ended, key=lambda child: child.stage is None))

    def _announce(self) -> None:
        self._is_serving = True
        for event in _once(event for replica in self._replicas for event in replica.startup_notices()):
            self._reporter.report(event)
        for text in unlike_replicas([replica.classes for replica in self._replicas]):
            self._reporter.report(Notice(text=text))
        for text in self._text_side.cautions:
            self._reporter.report(Caution(text=text))
        self._reporter.report(
            EngineReady(
                address=self._front.address(self._replicas[0].client),
                seconds=time.monotonic() - self._started,
                prompt_form=self._text_side.prompt_form,
            )
        )

    def _drain(self) -> int:
        """End in order: the front when its requests are done, then the core, which lets the stages go."""
        if not self._is_serving:
            return 0
        try:
            self._reporter.report(Draining(seconds=self._front.drain_s))
            fronts = self._fronts
            for child in fronts:
                child.ask_to_leave()
            deadline = time.monotonic() + self._front.drain_s + FRONT_GRACE_S
            while fronts and time.monotonic() < deadline:
                for child in self._serve_on(fronts):
                    fronts.discard(child)
                    self._watch.reap(child)
            # Only when the fronts have ended, or their time is up: until then requests need core and stages.
            for replica in self._replicas:
                replica.stop_all()
            self._await_end(self._members, STOP_GRACE_S)
        except _Stop:
            pass  # a second signal: at once
        return 0

    def _await_end(self, children: Sequence[Member], timeout_s: float) -> None:
        """Wait for children that were asked to end; those that do not in time are killed later."""
        deadline = time.monotonic() + timeout_s
        leaving = set(children)
        while leaving and (remaining := deadline - time.monotonic()) > 0:
            ended = self._hear(remaining) & leaving
            leaving -= ended
            for child in ended:
                self._watch.reap(child)

    def _fail(self, cause: ErrorInfo) -> int:
        """Report why the engine cannot start, and end all children."""
        traces = [child.trace for child in self._watch.members if child.failure is cause]
        self._reporter.report(EngineFailed(error=cause, trace="".join(traces)))
        self._watch.kill()
        return error_from_info(cause).exit_code


def _once(events: Iterable[Notice | StageReady]) -> Iterator[Notice | StageReady]:
    """Yield the events, with notices that several replicas have in common only once."""
    said: set[str] = set()
    for event in events:
        if not isinstance(event, Notice):
            yield event
        elif event.text not in said:
            said.add(event.text)
            yield event


class StatusReporter:
    """A reporter that sends events as JSON lines to the program that started this process.

    It never waits: events that the pipe has no room for are dropped.
    """

    def __init__(self, fd: int) -> None:
        self._lines = WholeLines(fd)

    def report(self, event: Event) -> None:
        self._lines.write(msgspec.json.encode(event) + b"\n")


class CallerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config that `LLM` writes as a line of JSON to a pipe, which then stays open as its lifeline.

    Attributes:
        caller_pid: process number of the program that uses `LLM`.
    """

    engine: EngineConfig
    caller_pid: int


def read_caller_config(fd: int) -> CallerConfig:
    """Read and return the config in the first line of the pipe `fd`, which stays open."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(fd, 65536)
        if not chunk:
            break
        line += chunk
    return msgspec.json.decode(line, type=CallerConfig)


def main() -> int:
    """Run the supervisor that an `LLM` starts, and return its exit code."""
    show_threads_on_request()
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-fd", type=int, required=True)
    parser.add_argument("--status-fd", type=int, required=True)
    arguments = parser.parse_args()
    config = read_caller_config(arguments.config_fd)
    front = CallingProgram(arguments.config_fd, config.caller_pid)
    return Supervisor(config.engine, front, StatusReporter(arguments.status_fd)).run()


if __name__ == "__main__":
    sys.exit(main())
