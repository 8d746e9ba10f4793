"""The process that speaks to Ray for a head: `python -m penstock.hosts.launchers.ray_driver`.

    order (standard input) ──▶ placement group ──▶ an actor for each worker ──▶ penstock worker --join HEAD
    end of the input       ──▶ the actors end, the placement group is given back

Ray has no part in what the engine does: it decides where workers run, and starts them again elsewhere after a
loss. Actors and placement group are *detached*: they outlive this process, which Ray ends when Ray's part on
this node is gone. If no driver has given an actor work for a while, the actor gives back what was reserved
(`ray_worker.UNUSED_S`).

This is the only module that imports ray. Ray itself finds its cluster (RAY_ADDRESS): one that runs on this
node, or one that is started here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import msgspec
import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.hosts.launchers.ray_bundles import bundles, strategy_of, why_not_placed
from penstock.hosts.launchers.ray_messages import (
    CannotPlace,
    DriverReport,
    LostWorker,
    PlaceWorkers,
    Said,
    Warned,
)
from penstock.hosts.launchers.ray_worker import RayWorker, WorkerOrder
from penstock.hosts.network.joining_address import shown

NAMESPACE = "penstock"
LOOK_S = 1.0  # between two looks at a placement group, and between two tries of a worker
CONNECT_S = 2.0  # for a connection to a part of Ray
SAY_EVERY_S = 10.0  # between two lines about hosts that are not placed yet
MAX_SHORT_LIVES, SHORT_LIFE_S = 3, 20.0  # a worker is given up after so many short lives in a row

GCS_IS_GONE = (
    "Ray's control service (GCS) is lost; the engine keeps running. If it does not return, Ray ends its "
    "nodes and their workers after a minute"
)

Report = Callable[[DriverReport], None]


class Placed:
    """The workers of an engine that Ray starts, from `place` until `close`.

    Args:
        order: the head's order: how many workers, and how they are started.
        report: sends a report to the head; any thread may call it.
    """

    def __init__(self, order: PlaceWorkers, report: Report) -> None:
        self._order = order
        self._report = report
        self._is_over = threading.Event()
        self._own_group = not order.options.placement_group
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []

    def place(self) -> None:
        """Wait until Ray has placed all hosts, and start the workers; give up if `close` is called."""
        order = self._order
        own_address = ray.util.get_node_ip_address()
        self._group = group = self._reserved(own_address)
        if not self._await_placement(group):
            return
        join = shown(order.host or own_address, order.port)
        worker = WorkerOrder(join, order.token_file, list(order.words))
        for number in range(1, order.number + 1):
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=group,
                placement_group_bundle_index=number,
                placement_group_capture_child_tasks=False,
            )
            actor = (
                ray.remote(RayWorker)
                .options(
                    name=f"{order.engine}-worker-{number}",
                    namespace=NAMESPACE,
                    lifetime="detached",
                    max_restarts=-1,
                    scheduling_strategy=strategy,
                    runtime_env=dict(order.options.runtime_env) or None,
                    **_reserved_options(group.bundle_specs[number]),
                )
                .remote(order.engine, number, worker, partial(give_back, self._own_group * order.engine))
            )
            self._actors.append(actor)
            threading.Thread(target=self._watch, args=(number, actor), daemon=True).start()

    def close(self) -> None:
        """End the workers, and give back what was reserved."""
        self._is_over.set()
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        if self._group is not None and self._own_group:
            remove_placement_group(self._group)

    def _reserved(self, own_address: str) -> PlacementGroup:
        order = self._order
        if order.options.placement_group:
            return PlacementGroup(ray.PlacementGroupID.from_hex(order.options.placement_group))
        return placement_group(
            bundles(order.number, order.options.resources, ray.nodes(), own_address),
            strategy=strategy_of(order.options.placement),
            name=order.engine,
            lifetime="detached",
        )

    def _await_placement(self, group: PlacementGroup) -> bool:
        """Wait until the hosts are placed; return False if `close` is called before."""
        said_at = -SAY_EVERY_S
        while not self._is_over.is_set():
            if group.wait(LOOK_S):
                return True
            if time.monotonic() - said_at >= SAY_EVERY_S:
                said_at = time.monotonic()
                self._report(
                    Said(why_not_placed(self._order.number + 1, self._order.options.placement, ray.nodes()))
                )
        return False

    def _watch(self, number: int, actor: Any) -> None:
        """Run a worker again whenever it has ended, and report its ends and losses."""
        num_short_lives, is_lost, host = 0, False, ""
        host_name = actor.host_name.options(max_task_retries=-1)  # it waits for an actor that Ray restarts
        while not self._is_over.is_set():
            began = time.monotonic()
            try:
                host = cast(str, ray.get(host_name.remote()))
                is_lost = False
                code, lines = cast(tuple[int, str], ray.get(actor.run.remote()))
            except RayTaskError as error:
                self._report(
                    CannotPlace(f"worker {number} cannot be started on its node: {_one_line(error.cause)}")
                )
                return
            except ActorDiedError as error:
                if not self._is_over.is_set():
                    self._report(Warned(f"Ray has given up worker {number}: {_one_line(error)}"))
                return
            except RayError as error:
                if is_lost:
                    self._is_over.wait(LOOK_S)
                elif not self._is_over.is_set():
                    is_lost = True
                    told = f"Ray has lost worker {number} and restarts it: {_one_line(error)}"
                    self._report(LostWorker(host, told))
                continue
            if self._is_over.is_set():
                return
            is_short = time.monotonic() - began < SHORT_LIFE_S
            num_short_lives = num_short_lives + 1 if is_short else 0
            ended = f"the worker {host} has ended with code {code}: {_last(lines)}"
            if num_short_lives >= MAX_SHORT_LIVES:
                self._report(CannotPlace(ended, "Read its output in Ray's log of the node, and restart."))
                return
            self._report(Warned(f"{ended} Ray restarts it."))
            if is_short:
                self._is_over.wait(LOOK_S)


def _reserved_options(bundle: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of an actor that takes a whole bundle."""
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "resources": others}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _last(lines: str) -> str:
    printed = [line for line in lines.splitlines() if line.strip()]
    return printed[-1].strip() if printed else "it printed nothing."


def watch_gcs(address: str, report: Report) -> None:
    """Report when Ray's control service is gone, and when it is back. Never returns.

    Args:
        address: address of the service, as HOST:PORT.
        report: sends a report to the head.
    """
    host, _, port = address.rpartition(":")
    while True:
        _await_end(host.strip("[]"), int(port))
        report(Warned(GCS_IS_GONE))
        while not _is_reached(host.strip("[]"), int(port)):
            time.sleep(LOOK_S)
        report(Said("Ray's control service (GCS) is back"))


def end_with_raylet(node: Mapping[str, Any]) -> None:
    """Wait until the raylet (Ray's process) of this node has ended, and end this process, which needs it.

    Args:
        node: the entry of this process's node in `ray.nodes()`.
    """
    _await_end(node["NodeManagerAddress"], node["NodeManagerPort"])
    os._exit(1)


def _await_end(host: str, port: int) -> None:
    """Wait until nothing listens at this address; an open connection shows the end without polling."""
    while True:
        try:
            with socket.create_connection((host, port), CONNECT_S) as connection:
                connection.settimeout(None)
                while connection.recv(1 << 10):
                    pass
        except OSError:
            if not _is_reached(host, port):
                return
        time.sleep(LOOK_S)


def _is_reached(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError:
        return False
    return True


def give_back(engine: str) -> None:
    """End the process of the actor that calls this, and give back what was reserved for its engine.

    Args:
        engine: name of the engine; empty: nothing is given back, since another party has reserved it.
    """
    if engine:
        with contextlib.suppress(Exception):  # another actor was faster, or Ray is gone
            remove_placement_group(get_placement_group(engine))
    os._exit(0)  # the only way to end an actor from a thread that is not Ray's


def main() -> None:
    """Read the head's order from standard input, carry it out, and end the workers when the input ends."""
    report = reports()
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=PlaceWorkers)
    try:
        ray.init(
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address=order.options.node_address or None,  # in the documentation of `ray.init`
        )
    except Exception as error:
        remedy = "Start Ray with `ray start`, or set RAY_ADDRESS to its address."
        report(CannotPlace(f"Ray cannot be reached: {_one_line(error)}", remedy))
        return
    placed = Placed(order, report)
    threading.Thread(target=_place, args=(placed, report), daemon=True).start()
    context = ray.get_runtime_context()
    threading.Thread(target=watch_gcs, args=(context.gcs_address, report), daemon=True).start()
    own = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    threading.Thread(target=end_with_raylet, args=(own,), daemon=True).start()
    while sys.stdin.buffer.read(1 << 10):
        pass
    placed.close()
    ray.shutdown()


def reports() -> Report:
    """Return a function that writes reports to standard output; what Ray prints goes to standard error."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    lock = threading.Lock()

    def report(what: DriverReport) -> None:
        with lock:
            output.write(msgspec.json.encode(what) + b"\n")
            output.flush()

    return report


def _place(placed: Placed, report: Report) -> None:
    try:
        placed.place()
    except Exception as error:
        report(CannotPlace(f"Ray cannot start the workers: {_one_line(error)}"))


if __name__ == "__main__":
    main()
