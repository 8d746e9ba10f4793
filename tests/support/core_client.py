"""The client of a core over a real socket, and a core that says what a test wants."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from core_numbers import core_stats
from fakes import FakeClock
from penstock.engine.client.async_engine import AsyncEngine
from penstock.engine.client.core_health import EngineInfo
from penstock.engine.client.streams import RequestStream
from penstock.engine.ipc import AddRequest, CoreSocket, Hello, StepUpdates, Welcome
from penstock.engine.stats import CoreStats
from penstock.hosts.local_socket import LocalSocket
from penstock.request import FinishReason, RequestUpdate, SamplingParams
from penstock.tokenizer.detokenizer import ByteDetokenizer, Detokenizer, PieceTable
from penstock.tokenizer.tokenizer import AbsentTokenizer

WAIT_S = 10.0  # a bound for hangs, never waited for
INFO = EngineInfo(max_model_len=64, vocab_size=256, max_num_seqs=2, max_waiting_requests=1)
STATS = core_stats(
    num_running=0,
    num_waiting=0,
    num_blocks=8,
    free_blocks=8,
    num_preemptions=0,
    step_id=0,
    inflight=0,
    last_result_age_s=0.5,
    stalled_s=0.0,
    stall_limit_s=5.0,
    epoch=0,
    generated_tokens=0,
    prompt_tokens=0,
)
WELCOME = Welcome(num_blocks=8, block_size=4, max_model_len=64, stages=[])


class ByteTokenizer(AbsentTokenizer):
    """Each byte is a token."""

    def detokenizer(
        self, prompt_token_ids: list[int], *, skip_special_tokens: bool = True, shown: Sequence[str] = ()
    ) -> Detokenizer:
        return ByteDetokenizer(PieceTable(lambda token_id: bytes([token_id])))


def heard(socket: CoreSocket, count: int, *, greeted: bool = False) -> tuple[bytes, list[object]]:
    """The next `count` messages, and the client that has sent them.

    Args:
        greeted: it has said hello. A client that is kept waiting says so again, at any time.
    """
    client, received = b"", list[object]()
    while len(received) < count:
        entries = _next_entries(socket)
        client = entries[0][0]
        received += [message for _, message in entries if not (greeted and message == Hello())]
    assert len(received) == count
    return client, received


def greeting_client(socket: CoreSocket) -> bytes:
    """The client that says hello, however often it has said so by now: it does every second."""
    entries = _next_entries(socket)
    assert {message for _, message in entries} == {Hello()}
    return entries[0][0]


def _next_entries(socket: CoreSocket) -> Sequence[tuple[bytes, object]]:
    """What clients have sent by now, or send next."""
    entries = socket.drain()  # before the wait: what is sent may use up the sign of what has come
    if not entries:
        socket.wait([], WAIT_S)
        entries = socket.drain()
    assert entries, "the client has said nothing"
    return entries


class FakeCore:
    """The core's end of the socket. Its waits block the event loop, but zmq sends on a thread of its own."""

    def __init__(self) -> None:
        self.endpoint = LocalSocket()
        self.client = b""
        self.open()

    def open(self) -> None:
        self.socket = CoreSocket(f"fd:{os.dup(self.endpoint.listen_fd)}")

    def hear(self, count: int = 1, *, greeted: bool = True) -> list[object]:
        """The next `count` messages; see `heard`."""
        self.client, messages = heard(self.socket, count, greeted=greeted)
        return messages

    def overhear(self) -> list[object]:
        """What has come by now; a client that is kept waiting may have said hello again at any time."""
        return [message for _, message in self.socket.drain() if message != Hello()]

    def tell(self, *updates: RequestUpdate, stats: CoreStats = STATS) -> None:
        self.socket.send(self.client, StepUpdates(list(updates), stats))

    def close(self) -> None:
        self.socket.close()
        self.endpoint.close()


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop turn until it holds."""
    for _ in range(round(WAIT_S / 0.001)):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came")


class Rig:
    """An `AsyncEngine` on a clock of the test, and its core."""

    def __init__(self, info: EngineInfo = INFO) -> None:
        self.core = FakeCore()
        self.clock = FakeClock()
        self.engine = AsyncEngine(
            self.core.endpoint.connect_address,
            ByteTokenizer(),
            info,
            clock=self.clock,
            wall_clock=lambda: 1e9 + self.clock.now,
        )

    async def start(self, max_model_len: int = 64) -> None:
        starting = asyncio.ensure_future(self.engine.start(WAIT_S))
        await asyncio.sleep(0)  # lets it say hello
        assert self.core.hear(greeted=False) == [Hello()]
        welcome = msgspec.structs.replace(WELCOME, max_model_len=max_model_len)
        self.core.socket.send(self.core.client, welcome)
        await starting
        self.core.tell()
        await until(lambda: self.engine.status().ready)

    async def lose_core(self) -> None:
        """Its socket closes; the address stays."""
        self.core.socket.close()
        await until(lambda: not self.engine.status().ready)

    async def greeted(self) -> None:
        """Another core comes to the same address."""
        self.core.open()
        heard: list[tuple[bytes, object]] = []
        await until(lambda: heard.extend(self.core.socket.drain()) or heard)
        self.core.client = heard[0][0]
        assert heard[0][1] == Hello()

    async def welcome(self) -> None:
        """Another core comes, and is ready."""
        await self.greeted()
        await self.answered()

    async def answered(self) -> None:
        """The core that was greeted is ready."""
        self.core.socket.send(self.core.client, WELCOME)
        self.core.tell()
        await until(lambda: self.engine.status().ready)

    def add(self, name: str = "r", **sampling: object) -> RequestStream:
        """A stream whose request the core has seen."""
        stream = self.engine.add(name, [1, 2, 3], SamplingParams(max_tokens=20, **sampling))
        (message,) = self.core.hear()
        assert isinstance(message, AddRequest)
        assert message.request.request_id == name
        assert message.request.prompt_token_ids == [1, 2, 3]
        return stream


def with_rig(body: Callable[[Rig], Awaitable[None]], info: EngineInfo = INFO) -> None:
    async def run() -> None:
        rig = Rig(info)
        try:
            await body(rig)
        finally:
            rig.engine.close()
            rig.core.close()

    asyncio.run(run())


def update(name: str, text: bytes, finish: FinishReason | None = None, **more: object) -> RequestUpdate:
    return RequestUpdate(request_id=name, token_ids=list(text), finish_reason=finish, **more)


async def read_all(stream: RequestStream) -> tuple[str, FinishReason | None]:
    text = ""
    while True:
        delta = await stream.next()
        text += delta.text
        if delta.finish_reason is not None:
            return text, delta.finish_reason
