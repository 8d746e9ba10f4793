"""The process that keeps a network namespace alive, and opens sockets in it for others.

    python namespace_keeper.py DESCRIPTOR OUTSIDE

OUTSIDE is the inode of the namespace that we must not be in. The descriptor is a Unix socket. The keeper says
that it is there with one byte. Each request is two bytes, family and kind of a socket; the answer is that
socket as a descriptor. The keeper ends when the other end is closed, and so with the process that has it,
however that ends. Before it ends it kills what still runs in its namespace, which vanishes with it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests close us when they end
    own = own_namespace()
    if own == int(sys.argv[2]):  # before its end a keeper kills whatever shares its namespace
        sys.exit("the keeper of a namespace was started outside of one")
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        asked.sendall(b"+")
        while request := asked.recv(2):
            with socket.socket(request[0], request[1]) as opened:
                socket.send_fds(asked, [b"+"], [opened.fileno()])
    kill_the_others(own)


def own_namespace() -> int:
    return os.stat("/proc/self/ns/net").st_ino


def kill_the_others(own: int) -> None:
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        with suppress(OSError):  # it has ended, or is not ours
            if pid != os.getpid() and os.stat(f"/proc/{pid}/ns/net").st_ino == own:
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
