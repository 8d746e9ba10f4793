"""The messages between a head and its Ray driver: one order as JSON on standard input, then lines of JSON.

The driver is a process of its own (`ray_driver`). When a part of Ray dies, Ray ends the process that is
connected to it, and that must not be the supervisor of the ranks. When its input ends, the driver cleans up
and ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.config.ray import RayOptions


class PlaceWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """The order of a head to its Ray driver: to start the workers that it waits for.

    Attributes:
        engine: a name that no other engine of the Ray cluster has.
        number: how many workers are wanted; the head itself is not counted.
        host, port: where they join; an empty host stands for this node's address, as Ray knows it.
        token_file: path of a file with the join token, if the nodes share files; other nodes have the token
            in their environment.
        words: words of the command line of each worker, besides those that `ray_worker` adds.
        options: the user's options for Ray.
    """

    engine: str
    number: int
    host: str
    port: int
    token_file: str
    words: Sequence[str]
    options: RayOptions = RayOptions()


class Said(msgspec.Struct, frozen=True, tag="said"):
    """A report of the driver: a line to be shown to the user."""

    text: str


class Warned(msgspec.Struct, frozen=True, tag="warned"):
    """A report of the driver: a warning to be shown to the user."""

    text: str


class CannotPlace(msgspec.Struct, frozen=True, tag="cannot_place"):
    """A report of the driver that no worker will come any more.

    Attributes:
        remedy: what the user can do; may be empty.
    """

    text: str
    remedy: str = ""


class LostWorker(msgspec.Struct, frozen=True, tag="lost"):
    """A report of the driver that Ray has lost a worker, and starts it again.

    Attributes:
        host: name of the worker's host in the engine; empty if it has never run.
        text: a line for the user.
    """

    host: str
    text: str


DriverReport = Said | Warned | LostWorker | CannotPlace
