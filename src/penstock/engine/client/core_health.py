"""Tracks whether an engine's core runs and the stages work, by the core's messages and its silence."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.config.engine import Pooling
from penstock.engine.ipc import AWAY_S, SILENCE_S, silence_limit_s
from penstock.engine.stats import CoreStats
from penstock.errors import PenstockError, UnavailableError, WaitTimeoutError, error_from_info
from penstock.process.config import ApiProcessConfig
from penstock.process.pipe_hosts import NO_PIPE_HOSTS, PipeHosts
from penstock.request import VectorShape

CORE_AWAY = UnavailableError("the engine core ended; another one starts.", remedy="Try again in a second.")


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a client must know of the engine before its core answers.

    Attributes:
        vector: lengths of the vectors that the model gives.
        max_model_len: the most tokens of prompt and output together.
        vocab_size: token ids are below this.
        pooling: which hidden states a vector is made of, if the request does not say so.
        max_num_seqs, max_waiting_requests: the most requests that run, and that wait, at once.
        stale_after_s: if the core has sent nothing for so many seconds, not even a heartbeat, the engine
            counts as not ready.
        silence_limit_s: if the core has sent nothing for so many seconds, all streams end.
    """

    max_model_len: int
    vocab_size: int
    vector: VectorShape = VectorShape(size=0)
    pooling: Pooling = "last"
    max_num_seqs: int = 64
    max_waiting_requests: int = 1024
    stale_after_s: float = 5.0
    silence_limit_s: float = SILENCE_S

    @classmethod
    def from_config(cls, config: ApiProcessConfig, vector: VectorShape) -> EngineInfo:
        """Return the facts from the configuration of an API process, and from the lengths of vectors."""
        return cls(
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            vector=vector,
            pooling=config.pooling,
            max_num_seqs=config.max_num_seqs,
            max_waiting_requests=config.max_waiting_requests,
            silence_limit_s=silence_limit_s(config.heartbeat_limit_s),
        )


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the engine: whether its stages return tokens now, and if not, why.

    Attributes:
        ready: the stages return tokens, or would if there were requests.
        stage: number of the stage at fault; None if no single stage is known to be at fault.
        reason: why the engine is not ready; "" if it is ready.
        since: Unix time of the last change of `ready`.
        stats: the core's statistics as of its last message; None if there are none to show.
        is_full: as many requests wait as may wait: one more would be refused.
        is_recovering: the engine is not ready, but accepts requests; they wait until the core or the stages
            that were lost have started again.
        hosts: hosts that the stages run on, as far as the core has reported them.
    """

    ready: bool
    stage: int | None
    reason: str
    since: float
    stats: CoreStats | None
    is_full: bool = False
    is_recovering: bool = False
    hosts: PipeHosts = NO_PIPE_HOSTS


class CoreHealth:
    """The health of the core, judged by its messages and by how long it has been silent.

    The core's statistics say how long a result of the stages has been due, and how long is too long for the
    plan that they compute. An idle core sends a probe through every stage once a second, so that a stage
    which does not answer is soon noticed.

    Attributes:
        stats: the core's statistics as of its last message; None while there is no core.
        hosts: hosts that the stages run on, by the core's last report; they are kept when the core is lost.
    """

    def __init__(self, info: EngineInfo, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self._info = info
        self._clock = clock
        self._wall_clock = wall_clock
        self._checked_at = clock()
        self._heard_at: float | None = None
        self._gone_at: float | None = None  # when the core was lost; None while, or before, there is a core
        self._has_lost_core = False  # whether a core was ever lost
        self._end: PenstockError | None = None  # why no core will come any more
        self.stats: CoreStats | None = None
        self.hosts = NO_PIPE_HOSTS
        self._was_ready = False
        self._since = wall_clock()

    def heard_from_core(self) -> None:
        """Record that a core has answered this client's `Hello`: from now on there is a core."""
        self._heard_at, self._gone_at = self._clock(), None

    def beat(self, stats: CoreStats) -> None:
        """Record the core's newest statistics, and that a message of the core has come just now."""
        self._heard_at = self._clock()
        self.stats = stats

    def core_gone(self) -> None:
        """Record that the connection to the core is lost: there is no core until another one answers."""
        if self._gone_at is None and self._heard_at is not None:
            self._gone_at, self.stats, self._has_lost_core = self._clock(), None, True

    def end(self, error: PenstockError) -> None:
        """Record that no core will come any more, because of this error; the first one counts."""
        self._end = self._end or error

    @property
    def has_core(self) -> bool:
        """Whether a core has answered this client and is still connected."""
        return self._heard_at is not None and self._gone_at is None

    def silence_s(self) -> float:
        """Return the seconds since the core was last heard; 0 before its first message."""
        return 0.0 if self._heard_at is None else self._clock() - self._heard_at

    def gave_up(self) -> PenstockError | None:
        """Return the error with which all streams should end now; None while they should wait for the core.

        There is an error if the core has been lost or silent for too long. To be called once a second. If the
        last call is `SILENCE_S` or more ago, this process itself was stopped, and None is returned.
        """
        unchecked_s, self._checked_at = self._clock() - self._checked_at, self._clock()
        if unchecked_s >= SILENCE_S:
            return None  # this process was stopped: what the core said meanwhile may still be in the kernel
        if self._gone_at is not None:
            away_s = self._clock() - self._gone_at
            if away_s < AWAY_S:
                return None
            return UnavailableError(f"the engine core has been down for {away_s:.0f} s.")
        if self.silence_s() < self._info.silence_limit_s:
            return None
        return WaitTimeoutError(f"the engine core has sent nothing for {self.silence_s():.0f} s.")

    def require_core(self) -> None:
        """Raise an error that says why, if nothing can be asked of the core now."""
        self.require_hope()
        if self._gone_at is not None:
            raise error_from_info(CORE_AWAY.info())
        self.require_prospects()

    def require_hope(self) -> None:
        """Raise the error that `end` was called with, if it was: there is nothing to wait for."""
        if self._end is not None:
            raise error_from_info(self._end.info())

    def require_prospects(self) -> None:
        """Raise an error that says why, if a new request must be refused now.

        While a core or a stage is being started again, requests wait and are not refused, unless that has
        failed for too long.
        """
        refusal = self._refusal()
        if refusal is not None:
            raise refusal

    def _refusal(self) -> PenstockError | None:
        if self._end is not None:
            return error_from_info(self._end.info())
        if self._heard_at is None:
            return UnavailableError("the engine is still loading.", remedy="Try again in a few seconds.")
        if self._gone_at is not None and self._clock() - self._gone_at >= AWAY_S:
            return error_from_info(CORE_AWAY.info())
        if self.stats is not None and self.stats.loss is not None and self.stats.is_loss_lasting:
            loss = self.stats.loss
            return UnavailableError(loss.message, remedy=loss.remedy, stage=loss.stage)
        return None

    def status(self) -> EngineStatus:
        """Return whether the engine is ready, and if not, why, with the statistics that the core sent last.

        The core is not asked.
        """
        reason = self._reason()
        ready = not reason
        if ready != self._was_ready:
            self._was_ready, self._since = ready, self._wall_clock()
        stats = self.stats
        cause = stats.loss if stats is not None else None
        return EngineStatus(
            ready=ready,
            stage=cause.stage if cause is not None else None,
            reason=reason,
            since=self._since,
            stats=stats,
            is_full=stats is not None and stats.scheduler.num_waiting >= self._info.max_waiting_requests,
            is_recovering=not ready and self._refusal() is None,
            hosts=self.hosts,
        )

    def _reason(self) -> str:
        if self._end is not None:
            return self._end.message
        if self.stats is None:  # a core that has just welcomed this client says next how its stages are
            return CORE_AWAY.message if self._has_lost_core else "the engine is loading"
        if self.silence_s() > self._info.stale_after_s:
            return f"the engine core has been silent for {self.silence_s():.1f} s"
        if self.stats.loss is not None:
            return self.stats.loss.message
        if self.stats.stalled_s > self.stats.stall_limit_s:
            return f"the stages have returned no result for {self.stats.stalled_s:.1f} s"
        return ""
