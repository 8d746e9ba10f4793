"""The process that keeps a network namespace alive, and opens sockets in it for others.

    python namespace_keeper.py DESCRIPTOR

The descriptor is a Unix socket. The keeper says that it is there with one byte. Each request is two bytes, family
and kind of a socket; the answer is that socket as a descriptor. The keeper ends when the other end is closed, and so
with the process that has it, however that ends; its namespace ends with it.
"""

from __future__ import annotations

import signal
import socket
import sys


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests close us when they end
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        asked.sendall(b"+")
        while request := asked.recv(2):
            with socket.socket(request[0], request[1]) as opened:
                socket.send_fds(asked, [b"+"], [opened.fileno()])


if __name__ == "__main__":
    main()
