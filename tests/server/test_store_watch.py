"""The log tells that the KV store fails, and why, and not too often."""

from __future__ import annotations

from io import StringIO
from typing import Any

from fake_engine import stats
from fakes import FakeClock
from penstock.server.http.request_log import RequestLog
from penstock.server.routes.store_watch import QUIET_S, StoreWatch


class Rig:
    def __init__(self) -> None:
        self.clock, self._out = FakeClock(), StringIO()
        self.watch = StoreWatch(RequestLog(out=self._out), self.clock)

    def look(self, **changes: Any) -> str:
        """What it says of these numbers, without the time."""
        self._out.seek(0)
        self._out.truncate()
        self.watch.look(stats(**changes))
        return self._out.getvalue().partition(" ")[2]


def test_r9_failures_are_told_once_a_minute_with_the_reason_of_the_last() -> None:
    rig = Rig()
    rig.watch.look(None)
    assert rig.look() == ""
    assert rig.look(store_call_failures=1, store_failure="StoreError: no room") == (
        "WARNING api KV store fails failed_calls=1 bad_records=0 processes_without_it=0 "
        'error="StoreError: no room"\n'
    )
    rig.clock.advance(QUIET_S - 1)
    assert rig.look(store_call_failures=3, store_verify_failures=2, store_failure="late") == ""
    rig.clock.advance(1)
    assert "failed_calls=2 bad_records=2 processes_without_it=0 error=late\n" in rig.look(
        store_call_failures=3, store_verify_failures=2, store_failure="late"
    )
    rig.clock.advance(QUIET_S)
    assert rig.look(store_call_failures=3, store_verify_failures=2, store_failure="late") == ""


def test_r9_it_is_told_at_once_that_a_process_leaves_it_alone_and_that_none_does() -> None:
    rig = Rig()
    assert rig.look(store_call_failures=1)
    assert "failed_calls=4 bad_records=0 processes_without_it=1" in rig.look(
        store_call_failures=5, store_switched_off=1
    )
    assert "failed_calls=5 bad_records=0 processes_without_it=2" in rig.look(
        store_call_failures=10, store_switched_off=2
    )
    assert rig.look(store_call_failures=10, store_switched_off=1) == ""
    assert rig.look(store_call_failures=10) == "INFO api KV store is in use again\n"
    assert rig.look(store_call_failures=10) == ""
