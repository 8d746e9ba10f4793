"""A server is replaced by another on the same port, again and again, and no client notices [R12]."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from served import Served, wait_until

FLAGS = ("demo", "--threads-per-rank", "1", "--dtype", "float32", "--reuse-port")
REQUEST: dict[str, Any] = {
    "model": "demo",
    "prompt": "O",
    "max_tokens": 40,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


class Client:
    """Asks without end, streamed and whole in turns, as the openai package does by default."""

    def __init__(self, port: int) -> None:
        self.num_done = 0
        self.errors: list[Exception] = []
        self.texts: set[str] = set()
        self._port = port
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Client:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{self._port}/v1", api_key="x") as client:
            while not self._over.is_set():
                try:
                    self.texts.add(self._ask(client, streamed=self.num_done % 2 == 0))
                    self.num_done += 1
                except Exception as error:
                    self.errors.append(error)
                    return

    def _ask(self, client: openai.OpenAI, *, streamed: bool) -> str:
        if not streamed:
            return client.completions.create(**REQUEST).choices[0].text
        chunks = client.completions.create(**REQUEST, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


@pytest.mark.soak
def test_r12_a_few_restarts() -> None:
    restart(2)


@pytest.mark.soak
def test_r12_twenty_restarts() -> None:
    restart(20)


def restart(count: int) -> None:
    with free_port() as port, contextlib.ExitStack() as stack:
        server = stack.enter_context(Served(*FLAGS, "--pp", "2", port=port))
        clients = [stack.enter_context(Client(port)) for _ in range(4)]
        for _ in range(count):
            successor = stack.enter_context(Served(*FLAGS, "--pp", "2", port=port))
            before = [client.num_done for client in clients]
            assert server.stop() == 0
            wait_until(lambda before=before: all(map(has_gone_on, clients, before)), 60)
            server = successor
        assert [client.errors for client in clients] == [[]] * len(clients)
        assert len(set.union(*(client.texts for client in clients))) == 1
        stack.callback(server.stop)


def has_gone_on(client: Client, num_done: int) -> bool:
    return client.num_done > num_done + 2 or bool(client.errors)


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """One that nobody else gets meanwhile, as it is bound here too, but without listening."""
    with socket.socket() as claim:
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claim.bind(("127.0.0.1", 0))
        yield int(claim.getsockname()[1])
