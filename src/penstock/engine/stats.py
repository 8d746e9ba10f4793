"""The engine core's numbers for clients, metrics and the readiness check. Plain data."""

from __future__ import annotations

import msgspec

from penstock.batch import StageTimes
from penstock.errors import ErrorInfo
from penstock.process.config import Restarts


class CoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of now, and totals since the start. Rates and histograms are made where they are shown."""

    paused: bool = False  # an administrator has asked for it (`penstock.operations`)
    plan_interval_ms: int = 0  # an administrator has slowed the engine down; 0: not
    open_operations: int = 0  # of administrators, accepted and not complete
    num_running: int
    num_waiting: int  # preempted requests included
    num_blocks: int
    free_blocks: int
    num_preemptions: int
    step_id: int  # of the next plan
    inflight: int  # plans submitted, result not settled
    last_result_age_s: float  # since a result last came, infinite before the first; probes keep it near 1
    stalled_s: (
        float  # since a result came or the oldest plan in flight was submitted; 0 when none is in flight
    )
    stall_limit_s: float  # beyond it the pipe is not ready: seconds, more for a plan of many tokens
    epoch: int
    loss: ErrorInfo | None = None  # why the pipe is broken, until a step has crossed it again
    restarts: Restarts = Restarts()
    recovered_requests: int = 0  # that a lost stage has interrupted, counted once for each loss
    generated_tokens: int
    prompt_tokens: int  # of requests that have yielded their first token
    prefix_tokens: int = 0  # of requests that have started, or started again
    prefix_hit_tokens: int = 0  # of these, found in the prefix cache
    cached_blocks: int = 0  # that a request could find, held ones included
    evicted_blocks: int = 0  # that something else has taken the place of
    stored_blocks: int = 0  # all parts of which the ranks have put into the store
    loaded_blocks: int = 0  # and got from it
    failed_blocks: int = 0  # that could not be stored or loaded
    store_bytes_read: int = 0  # by ranks and core together, as in `batch.StoreUse`
    store_bytes_written: int = 0
    store_records_read: int = 0
    store_verify_failures: int = 0
    store_call_failures: int = 0
    host_bytes_read: int = 0  # of ranks' host tiers
    host_records_read: int = 0
    host_bytes_written: int = 0
    host_bytes_used: int = 0  # now
    store_switched_off: int = 0  # processes that leave the store alone now
    store_failure: str = ""  # why a call of the store has failed, the last one
    num_sessions: int = 0  # open ones (`kvcache.sessions`)
    session_blocks: int = 0  # that they keep
    reaped_sessions: int = 0  # closed because nobody used them
    micro_batches: int = 0  # that the decoding requests were split into for the last plan
    stage_times: list[StageTimes] = []  # the newest report of each stage that has sent one
