"""Where a process meets the others in one epoch, as it is told over its control socket.

Frozen values, made by `engine.supervisor.wiring` from the connections of an epoch.
"""

from __future__ import annotations

import msgspec


class RingHandle(msgspec.Struct, frozen=True, kw_only=True):
    """A ring in shared memory as inherited file descriptors; nothing of it has a name."""

    memory_fd: int
    data_fd: int  # eventfd semaphore: frames written and not yet read
    space_fd: int  # eventfd semaphore: frames free to write
    frame_bytes: int
    num_frames: int

    @property
    def fds(self) -> tuple[int, int, int]:
        return self.memory_fd, self.data_fd, self.space_fd


class MeetingHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks of a stage meet in one epoch, as inherited descriptors (`distributed.meeting`)."""

    memory_fd: int
    store_fd: int


class RankEndpoints(msgspec.Struct, frozen=True, kw_only=True, tag="rank_endpoints"):
    """Where the neighbours of a rank are in one epoch. Descriptors are the receiver's own."""

    epoch: int
    plan_fd: int  # handle of the socket that the core listens on (`hosts.local_socket`)
    tokens: list[RingHandle]  # output rank: to each rank of earlier stages, in order; those: from it
    results: RingHandle | None = None  # output rank: to the core
    incoming: RingHandle | None = None
    outgoing: list[RingHandle] = []  # to each of `RankConfig.receivers`
    meeting: MeetingHandle | None = None  # of the ranks of the stage, if there are several


class Restarts(msgspec.Struct, frozen=True, kw_only=True):
    """How often processes were started again."""

    stages: list[int] = []  # [num_stages]
    core: int = 0


NO_RESTARTS = Restarts()


class CoreEndpoints(msgspec.Struct, frozen=True, kw_only=True, tag="core_endpoints"):
    """Where the core meets the ranks in one epoch. Descriptors are the receiver's own."""

    epoch: int
    plan_fds: list[int]  # listening sockets, one per rank, stage by stage
    stages: list[int]  # of each rank
    results: RingHandle  # from the output rank
    restarts: Restarts = Restarts()  # up to this epoch
