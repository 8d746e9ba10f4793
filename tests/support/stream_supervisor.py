"""A supervisor whose processes are joined by streams, as ranks of several hosts are.

Run as `python -m stream_supervisor` in place of the supervisor that an `LLM` starts. All processes are on
this machine and meet over loopback. `PENSTOCK_TEST_STREAMS` says whether with TLS.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, cast

from carriers import plain_text, stream, tls
from penstock.engine.supervisor import supervisor
from penstock.hosts.local_connections import KINDS
from penstock.hosts.rank_host import ChannelNeed, HostEnd, LinkNeed, PlanNeed
from penstock.hosts.stream_ends import StreamNeed

MODULE = "stream_supervisor"
ENVIRONMENT = "PENSTOCK_TEST_STREAMS"
SECURITIES = {"tcp": plain_text, "tls": tls}


class BothEnds:
    """Both ends of a stream, in the hands of one host; the invitation is the endpoint of who joins."""

    def __init__(self, need: StreamNeed, security: str) -> None:
        self._closing = ExitStack()
        self._joining, self._accepting = stream(
            need, self._closing, SECURITIES[security], joining_dials=isinstance(need, LinkNeed)
        )
        self.endpoint, self.invitation = self._accepting.endpoint, self._joining.endpoint

    def delivered(self) -> None:
        for end in (self._joining, self._accepting):
            end.delivered()

    def end(self) -> None:
        for end in (self._joining, self._accepting):
            end.end()
        self.close()

    def close(self) -> None:
        self._closing.close()


def offer_streams(security: str) -> None:
    """Have the local host offer streams, and nothing else, for all that streams can carry."""
    kinds = cast(dict[type, Mapping[str, Callable[[Any], HostEnd]]], KINDS)
    for need in (LinkNeed, ChannelNeed, PlanNeed):
        kinds[need] = {security: lambda need: BothEnds(need, security)}


if __name__ == "__main__":
    offer_streams(os.environ[ENVIRONMENT])
    sys.exit(supervisor.main())
