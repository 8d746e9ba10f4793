"""Reports the server's state to the service manager that started it, and hands on all events for people.

`cli.serve` wraps its own reporter in a `ServiceReporter`. A systemd unit with `Type=notify` then counts as
started when all stages serve, and as stopping when the server drains.
"""

from __future__ import annotations

from penstock.engine.supervisor.reports import (
    Draining,
    EngineFailed,
    EngineReady,
    Event,
    FrontLost,
    FrontRecovered,
    Recovered,
    Reporter,
    StageLost,
    event_line,
)
from penstock.process.service_manager import ServiceNotifier

_SHOWN = (EngineReady, StageLost, Recovered, FrontLost, FrontRecovered, Draining, EngineFailed)


class ServiceReporter:
    """Gives each event to another reporter, and before that reports the server's state to the manager.

    Args:
        reporter: shows events to people.
        manager: sends messages to the service manager that has started this process.
    """

    def __init__(self, reporter: Reporter, manager: ServiceNotifier) -> None:
        self._reporter = reporter
        self._manager = manager

    def report(self, event: Event) -> None:
        if isinstance(event, EngineReady):
            self._manager.ready()
        elif isinstance(event, Draining):
            self._manager.stopping()
        if isinstance(event, _SHOWN):
            self._manager.status(event_line(event))
        self._reporter.report(event)
