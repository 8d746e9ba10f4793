"""Makes several pipelines look like one engine: each request goes to one of them and stays there [I4].

The whole is ready as long as one pipeline is. Its statistics are those of all pipelines together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TypeVar

import msgspec

from penstock.batch import StageSpans, StageTimes
from penstock.engine.client.async_engine import AsyncEngine
from penstock.engine.client.core_health import EngineStatus
from penstock.engine.client.routing import Load, Router
from penstock.engine.client.streams import RequestStream
from penstock.engine.stats import CoreStats, summed
from penstock.errors import NotFoundError, OverloadedError, PenstockError, UnavailableError
from penstock.kvcache.sessions import unknown_session
from penstock.operations import CloseSession, OpenSession, Operation, OperationDone
from penstock.process.config import HostLink
from penstock.process.endpoints import Restarts
from penstock.process.pipe_hosts import NO_PIPE_HOSTS, PipeHosts
from penstock.request import PoolingParams, SamplingParams

Started = TypeVar("Started")


class Replicas:
    """An engine of several replicas (whole pipelines), used like a single `AsyncEngine`.

    Args:
        engines: the client of each replica, at least one.
        has_prefix_cache: whether each replica keeps the KV blocks of prompts for later prompts.
    """

    def __init__(self, engines: Sequence[AsyncEngine], *, has_prefix_cache: bool = False) -> None:
        self._engines = list(engines)
        self._starts: list[asyncio.Task[None]] = []
        self._router = Router[int](has_cache=has_prefix_cache)  # knows replicas by their numbers

    async def start(self, timeout_s: float | None = None) -> None:
        """Connect to all replicas and wait until one is ready; the others may come later.

        Raises the first error if all have failed.
        """
        self._starts = [asyncio.create_task(engine.start(timeout_s)) for engine in self._engines]
        failed: list[BaseException] = []
        for start in asyncio.as_completed(self._starts):
            try:
                return await start
            except PenstockError as error:
                failed.append(error)
        raise failed[0]

    @property
    def max_model_len(self) -> int:
        """The most tokens of prompt and output together that every replica takes."""
        return min(engine.max_model_len for engine in self._engines)

    def add(self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams) -> RequestStream:
        """Start one sequence as `add_all` does, and return its stream; `sampling.n` must be 1."""
        (stream,) = self.add_all(request_id, prompt_token_ids, sampling)
        return stream

    def add_all(
        self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams
    ) -> list[RequestStream]:
        """Start `sampling.n` sequences in the replica that has the least to compute before them.

        - If that replica is full, has no core, or starts none as its host is short of memory, the next best
          replica takes them.
        - If the core itself refuses them, because its queue has filled meanwhile, no other is tried.
        - Sequences of a session go to the replica that has the session. If that one has no room in this
          sense, another one takes them without the session.

        Returns:
            The streams of the sequences.

        Raises:
            NotFoundError: no replica has the session.
            OverloadedError, UnavailableError: no replica takes the sequences, or one that may have the
                session has not reported its sessions yet.
            PenstockError: whatever else `AsyncEngine.add_all` raises.
        """
        home = self._home(sampling.session_id)
        away = msgspec.structs.replace(sampling, session_id="")

        def start(engine: AsyncEngine) -> list[RequestStream]:
            is_home = home is None or engine is self._engines[home]
            return engine.add_all(request_id, prompt_token_ids, sampling if is_home else away)

        return self._start(prompt_token_ids, start, home)

    def embed(self, request_id: str, prompt_token_ids: list[int], params: PoolingParams) -> RequestStream:
        """Start to pool a prompt into a vector, in the replica that has the least to compute before it.

        Returns the stream of the vector, and raises what `AsyncEngine.embed` does.
        """
        return self._start(
            prompt_token_ids, lambda replica: replica.embed(request_id, prompt_token_ids, params)
        )

    def _start(
        self,
        prompt_token_ids: list[int],
        start: Callable[[AsyncEngine], Started],
        home: int | None = None,
    ) -> Started:
        """Start a request in the first replica that takes it.

        Args:
            start: starts the request in a replica, or raises `OverloadedError` or `UnavailableError`.
            home: number of the replica that is tried first if it is ready and has room; None: no replica.
        """
        loads = {
            index: Load(engine.tokens_ahead, _has_room(status))
            for index, (engine, status) in enumerate(zip(self._engines, self.statuses(), strict=True))
        }
        refusals: list[PenstockError] = []
        order = self._router.order(prompt_token_ids, loads)
        if home is not None and loads[home].has_room:
            order = [home, *(index for index in order if index != home)]
        for index in order:
            try:
                started = start(self._engines[index])
            except (OverloadedError, UnavailableError) as error:
                refusals.append(error)
                continue
            self._router.routed(prompt_token_ids, index)
            return started
        raise refusals[0]

    def _home(self, session_id: str) -> int | None:
        """Return the number of the replica that has this session; None if `session_id` is empty.

        Raises:
            NotFoundError: no replica has the session.
            UnavailableError: no replica is known to have it, but one has not reported its sessions yet.
        """
        if not session_id:
            return None
        known = [engine.sessions for engine in self._engines]
        for index, sessions in enumerate(known):
            if session_id in (sessions or ()):
                return index
        if None in known:
            raise UnavailableError(
                f"replica {known.index(None)} has not reported yet whether it has session {session_id!r}.",
                remedy="Try again in a second.",
            )
        raise unknown_session(session_id)

    def status(self) -> EngineStatus:
        """Return one status for all replicas: ready if any is ready, full if all that are ready are full.

        `reason` names the replicas that are not ready.
        """
        statuses = self.statuses()
        is_ready = any(status.ready for status in statuses)
        broken = [(index, status) for index, status in enumerate(statuses) if not status.ready]
        return EngineStatus(
            ready=is_ready,
            stage=None if is_ready else broken[0][1].stage,
            reason="; ".join(f"replica {index}: {status.reason.rstrip('.')}" for index, status in broken),
            since=(min if is_ready else max)(status.since for status in statuses if status.ready == is_ready),
            stats=merged_stats([engine.status().stats for engine in self._engines]),
            is_full=is_ready and all(status.is_full for status in statuses if status.ready),
            is_recovering=not is_ready and any(status.is_recovering for status in statuses),
            hosts=merged_hosts([status.hosts for status in statuses]),
        )

    def statuses(self) -> list[EngineStatus]:
        """Return the status of each replica; the status of one without a core has no statistics."""
        return [status for engine in self._engines for status in engine.statuses()]

    async def trace(self) -> list[StageSpans]:
        """Return the timed work of each stage in the last seconds, of every replica that answers.

        Raises the first error if none answers.
        """
        return await self._traces(engine.trace() for engine in self._engines)

    async def news(self, seen: Collection[StageSpans]) -> list[StageSpans]:
        """Return each rank's timed work since its last report in `seen`, of every replica that answers.

        Raises the first error if none answers.
        """
        return await self._traces(
            engine.news([report for report in seen if report.replica == replica])
            for replica, engine in enumerate(self._engines)
        )

    async def _traces(self, asked: Iterable[Awaitable[list[StageSpans]]]) -> list[StageSpans]:
        answers = await asyncio.gather(*asked, return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if len(errors) == len(answers):
            raise errors[0]
        return [
            msgspec.structs.replace(spans, replica=replica)
            for replica, answer in enumerate(answers)
            if not isinstance(answer, BaseException)
            for spans in answer
        ]

    async def operate(self, operation: Operation, timeout_s: float) -> list[OperationDone]:
        """Ask every replica to carry out an administrator's operation; wait, and return the result of each.

        A replica without a core carries it out when it has one again. An operation on a session goes to a
        single replica. This is the one that has the session or was asked to open or close it; a new session
        goes to a ready replica with the fewest sessions. Raises what `AsyncEngine.operate` raises for any
        replica; the other replicas have carried out the operation all the same.
        """
        if isinstance(operation, OpenSession | CloseSession):
            index = self._replica_for(operation)
            (done,) = await self._engines[index].operate(operation, timeout_s)
            return [msgspec.structs.replace(done, replica=index)]
        answers = await asyncio.gather(
            *(engine.operate(operation, timeout_s) for engine in self._engines), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [
            msgspec.structs.replace(done, replica=replica)
            for replica, answer in enumerate(answers)
            if not isinstance(answer, BaseException)
            for done in answer
        ]

    def _replica_for(self, operation: OpenSession | CloseSession) -> int:
        """Return the number of the replica that has the session, or is to have it.

        Raises:
            NotFoundError: no replica has the session that is to be closed.
            UnavailableError: a replica that has not reported its sessions to this process yet may have the
                session. If another replica opened it, it would be open twice.
        """
        try:
            home = self._home(operation.session_id)
            assert home is not None, "a session has a name"
            return home
        except (NotFoundError, UnavailableError) as error:
            for index, engine in enumerate(self._engines):
                if operation.session_id in engine.sessions_asked:
                    return index  # even if it has no core now: the next core will be asked again
            if isinstance(operation, CloseSession):
                raise
            if isinstance(error, UnavailableError) and not operation.is_new:
                raise
        is_ready = [status.ready for status in self.statuses()]
        counts = [len(engine.sessions or ()) for engine in self._engines]
        return min(range(len(counts)), key=lambda index: (not is_ready[index], counts[index]))

    def close(self) -> None:
        """Close the connections to all replicas; streams that are open end with an error."""
        for start in self._starts:
            start.cancel()
        for engine in self._engines:
            engine.close()


def _has_room(status: EngineStatus) -> bool:
    """Return whether a replica takes requests, and starts them: it does not while memory is short there."""
    starts = status.stats is None or not status.stats.scheduler.held_back
    return status.ready and not status.is_full and starts


def merged_hosts(each: Sequence[PipeHosts]) -> PipeHosts:
    """Return the hosts of all replicas as of one; a replica only finds out which of its own links are slow.

    The stages are those of the first replica that has reported its hosts.
    """
    first = next((hosts for hosts in each if hosts.stages), NO_PIPE_HOSTS)
    links: dict[tuple[str, str], HostLink] = {}
    for link in (link for hosts in each for link in hosts.links):
        known = links.setdefault(link.hosts, link)
        links[link.hosts] = msgspec.structs.replace(
            known,
            reduced_bytes_per_s_out=known.reduced_bytes_per_s_out or link.reduced_bytes_per_s_out,
            reduced_bytes_per_s_in=known.reduced_bytes_per_s_in or link.reduced_bytes_per_s_in,
        )
    clocks = {clock.host: clock for hosts in reversed(each) for clock in hosts.clocks}
    return msgspec.structs.replace(first, links=list(links.values()), clocks=list(clocks.values()))


def merged_stats(replica_stats: Sequence[CoreStats | None]) -> CoreStats | None:
    """Return the statistics of all replicas as of one engine: sums, and the worst of what cannot be added.

    Args:
        replica_stats: the statistics of each replica; None: it has none now.

    Returns:
        The statistics; None if no replica has any.
    """
    known = [(replica, stats) for replica, stats in enumerate(replica_stats) if stats is not None]
    if not known:
        return None
    each = [stats for _, stats in known]
    times: list[StageTimes] = [
        msgspec.structs.replace(of_stage, replica=replica)
        for replica, stats in known
        for of_stage in stats.stage_times
    ]
    drafts = [stats.scheduler.speculation for stats in each]
    schedulers, uses = [stats.scheduler for stats in each], [stats.store.use for stats in each]
    failure = next((use.failure for use in uses if use.failure), "")
    return CoreStats(
        scheduler=summed(
            schedulers,
            paused=any(part.paused for part in schedulers),
            held_back=next((part.held_back for part in schedulers if part.held_back), ""),
            micro_batches=max(part.micro_batches for part in schedulers),
            fill_plans=max(part.fill_plans for part in schedulers),
            wire_s=max(part.wire_s for part in schedulers),
            speculation=summed(
                drafts, drafter=drafts[0].drafter, is_exact=all(part.is_exact for part in drafts)
            ),
        ),
        cache=summed([stats.cache for stats in each]),
        store=summed([stats.store for stats in each], use=summed(uses, failure=failure)),
        sessions=summed([stats.sessions for stats in each]),
        plan_interval_ms=max(stats.plan_interval_ms for stats in each),
        open_operations=sum(stats.open_operations for stats in each),
        step_id=sum(stats.step_id for stats in each),
        inflight=sum(stats.inflight for stats in each),
        last_result_age_s=max(stats.last_result_age_s for stats in each),
        stalled_s=max(stats.stalled_s for stats in each),
        stall_limit_s=max(stats.stall_limit_s for stats in each),
        epoch=max(stats.epoch for stats in each),
        loss=next((stats.loss for stats in each if stats.loss is not None), None),
        is_loss_lasting=any(stats.is_loss_lasting for stats in each),
        restarts=Restarts(
            stages=[sum(counts) for counts in zip(*(stats.restarts.stages for stats in each), strict=True)],
            core=sum(stats.restarts.core for stats in each),
        ),
        stage_times=times,
        stage_memory=[
            msgspec.structs.replace(of_stage, replica=replica)
            for replica, stats in known
            for of_stage in stats.stage_memory
        ],
        numeric_classes=[name for stats in each for name in stats.numeric_classes],
    )
