"""Carries packets between hosts: a program with a TUN device in each that delays or loses what they send.

    python packet_shaper.py '{"seed": 1, "device": "eth0", "hosts": [HOST, …]}'

A host is `{"namespace": PATH, "addresses": [ADDRESS, …]}`. The program runs with the rights of root in the
namespaces, in which `network` starts it. Orders come as lines of JSON on standard input, and each is answered
by a line when it is in force; the end of the input ends the program. One thread moves all packets; what
happens to each is decided in `packet_paths`. See docs/test-bed.md for its limits.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from time import monotonic
from typing import Any

from packet_paths import Paths

# Of <linux/if_tun.h>, <sched.h> and <sys/prctl.h>.
_TUNSETIFF = 0x400454CA
_TUNSETCARRIER = 0x400454E2
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_PR_SET_TIMERSLACK = 29

_BATCH = 64  # packets that are read from one host before the others have their turn
_MAX_PACKET = 65535
_libc = ctypes.CDLL(None, use_errno=True)


def enter_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter a network namespace: {os.strerror(number)}")


def open_devices(namespaces: Sequence[str], name: str) -> list[int]:
    """Make a TUN device of this name in each namespace, and return their descriptors."""
    devices = []
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    for path in namespaces:
        namespace = os.open(path, os.O_RDONLY)
        enter_namespace(namespace)
        os.close(namespace)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
        devices.append(device)
    enter_namespace(own)
    os.close(own)
    return devices


def packed(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)


class Shaper:
    """Moves packets between devices by the decisions of `paths`, and follows orders."""

    def __init__(self, devices: Sequence[int], paths: Paths) -> None:
        self._devices = devices
        self._paths = paths
        self._unread = b""

    def run(self) -> None:
        """Carry packets until the standard input ends."""
        hosts = {device: host for host, device in enumerate(self._devices)}
        watched = [0, *self._devices]
        while True:
            due = self._paths.due()
            ready = select.select(watched, [], [], None if due == math.inf else max(0.0, due - monotonic()))[
                0
            ]
            for descriptor in ready:
                if descriptor in hosts:
                    self._read(descriptor, hosts[descriptor])
                elif not self._follow_orders():
                    return
            self._write()

    def _read(self, device: int, host: int) -> None:
        now = monotonic()
        for _ in range(_BATCH):
            try:
                packet = os.read(device, _MAX_PACKET)
            except OSError:  # no more for now, or the device is down
                return
            self._paths.enter(host, packet, now)

    def _write(self) -> None:
        for host, packet in self._paths.leave(monotonic()):
            try:
                os.write(self._devices[host], packet)
            except OSError:  # the device is down: the packet is lost, as it would be on a wire
                continue

    def _follow_orders(self) -> bool:
        """Follow the orders that have come; return whether more may come."""
        read = os.read(0, 1 << 16)
        *lines, self._unread = (self._unread + read).split(b"\n")
        for line in lines:
            answer = self._follow(**json.loads(line))
            os.write(1, json.dumps(answer).encode() + b"\n")
        return bool(read)

    def _follow(self, order: str, host: int, direction: str = "both", **values: float) -> dict[str, Any]:
        link = self._paths.links[host]
        directions = link.directions(direction)
        match order:
            case "shape":
                for one in directions:
                    one.conditions = replace(one.conditions, **values)
            case "hold":
                for one in directions:
                    one.hold(monotonic() + values["seconds"])
            case "pull":
                fcntl.ioctl(self._devices[host], _TUNSETCARRIER, struct.pack("i", 0))
                for one in directions:
                    one.cut()
            case "plug":
                for one in directions:
                    one.mend()
                fcntl.ioctl(self._devices[host], _TUNSETCARRIER, struct.pack("i", 1))
        return {"out": asdict(link.out.counts), "in": asdict(link.into.counts)}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests close us when they end
    _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # waits end within microseconds, and not 50 of them later
    plan = json.loads(sys.argv[1])
    hosts = plan["hosts"]
    devices = open_devices([host["namespace"] for host in hosts], plan["device"])
    places = {packed(address): number for number, host in enumerate(hosts) for address in host["addresses"]}
    os.write(1, b"{}\n")
    Shaper(devices, Paths(plan["seed"], places, len(hosts))).run()


if __name__ == "__main__":
    main()
