"""Both ends of a connection for weights, and what they make of an end that says something else."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from checkpoints import make_checkpoint
from hand_core import Crew
from penstock.errors import (
    CheckpointError,
    JoinError,
    LinkClosedError,
    ModelError,
    PeerError,
    PenstockError,
    ProtocolError,
    WaitTimeoutError,
)
from penstock.hosts.weights import weight_client, weight_server
from penstock.hosts.weights.weight_client import Part, WeightClient
from penstock.hosts.weights.weight_wire import (
    HEAD_BYTES,
    MAX_ASKED_BYTES,
    MAX_TOLD_BYTES,
    MOST_NAMES,
    PIECE_BYTES,
    AskDigests,
    AskModel,
    AskParts,
    Description,
    Sending,
    Told,
    WeightWire,
)
from penstock.trust.cancellation import Cancellation, CancelledError
from penstock.trust.join_messages import NOT_JOINED
from weight_heads import WeightHead

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_client, "FIRST_PAUSE_S", 0.0)


@pytest.fixture
def ends() -> Iterator[Ends]:
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


@pytest.fixture
def head(tmp_path: Path) -> Iterator[WeightHead]:
    made = WeightHead(tmp_path / "head", make_checkpoint(tmp_path / "model", layers=2))
    yield made
    made.close()


def piece(content: bytes) -> tuple[memoryview, int]:
    return memoryview(bytearray(HEAD_BYTES) + content), len(content)


def test_pieces_come_in_order_whatever_their_size(ends: Ends) -> None:
    sender, receiver = map(WeightWire, ends)
    contents = [os.urandom(size) for size in (1, 70_000, 16, PIECE_BYTES, 3)]
    crew = Crew()

    def send() -> None:
        for content in contents:
            sender.send_piece(*piece(content))
        sender.flush()

    crew.start(send)
    memory = memoryview(bytearray(PIECE_BYTES))
    assert [bytes(memory[: receiver.receive_piece(memory)]) for _ in contents] == contents
    crew.join()


def test_a_refusal_takes_the_place_of_a_piece(ends: Ends) -> None:
    sender, receiver = map(WeightWire, ends)
    sender.send_piece(*piece(b"half"))
    sender.send_refusal(CheckpointError(file="f", expected="this", found="that"))
    memory = memoryview(bytearray(8))
    assert receiver.receive_piece(memory) == 4
    with pytest.raises(CheckpointError, match="expected this, found that"):
        receiver.receive_piece(memory)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", LinkClosedError),
        (b"\0\0", LinkClosedError),
        (struct.pack(">I", 5) + b"12", LinkClosedError),
        (struct.pack(">I", MAX_TOLD_BYTES + 1), ProtocolError),
        (struct.pack(">I", 3) + b"\xc1\xc1\xc1", ProtocolError),
        (struct.pack(">I", 1) + b"\x80", ProtocolError),
    ],
)
def test_r15_whatever_else_comes_is_one_typed_error(ends: Ends, sent: bytes, error: type[PeerError]) -> None:
    ends[0].sendall(sent)
    ends[0].close()
    with pytest.raises(error):
        WeightWire(ends[1]).receive(Told, MAX_TOLD_BYTES)


def test_r15_an_answer_of_another_kind_is_refused(ends: Ends) -> None:
    WeightWire(ends[0]).send(Sending())
    with pytest.raises(ProtocolError, match="a Sending instead of a Description"):
        WeightWire(ends[1]).ask(AskModel(model=b""), Description)


@pytest.mark.parametrize("size", [0, 17, 1 << 31])
def test_r15_a_piece_of_another_size_than_there_is_room_for_is_refused(ends: Ends, size: int) -> None:
    ends[0].sendall(struct.pack(">I", size) + bytes(17))
    with pytest.raises(ProtocolError, match="a piece of"):
        WeightWire(ends[1]).receive_piece(memoryview(bytearray(16)))


def test_an_end_that_stops_is_left_after_a_while(ends: Ends) -> None:
    with pytest.raises(WaitTimeoutError, match="stopped sending"):
        WeightWire(ends[0], stall_s=0.01).receive(Told, MAX_TOLD_BYTES)


@pytest.mark.parametrize("seed", range(30))
def test_r15_garbage_harms_no_head(head: WeightHead, seed: int) -> None:
    """Also where it is a request with some bytes changed."""
    chance = random.Random(seed)
    asked = msgspec.msgpack.encode(
        AskParts(model=head.identity, files=["config.json"], tensors=["model.norm.weight"])
    )
    data = bytearray(struct.pack(">I", len(asked)) + asked)
    for _ in range(chance.randint(1, 5)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    stranger = head.connect()
    stranger.settimeout(30.0)
    with contextlib.suppress(ConnectionError):  # it may close before it has read all
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass
    stranger.close()
    client = WeightClient(head.connect, Cancellation())
    assert client.describe(head.identity).tensors
    client.close()


@pytest.mark.parametrize("seed", range(30))
def test_r15_garbage_harms_no_worker(seed: int) -> None:
    """Whatever a head sends, a worker ends with an error of ours."""
    chance = random.Random(seed)
    good = [Sending(), Description(files=[], tensors=[])]
    ends: list[socket.socket] = []

    def connect(_: Cancellation) -> socket.socket:
        ours, theirs = socket.socketpair()
        answer = msgspec.msgpack.encode(chance.choice(good))
        data = bytearray(struct.pack(">I", len(answer)) + answer + chance.randbytes(chance.randrange(60)))
        if data and chance.random() < 0.7:
            data[chance.randrange(len(data))] = chance.randrange(256)
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        ends.append(theirs)
        return ours

    class Nowhere:
        def begin(self, number: int) -> None: ...
        def write(self, memory: memoryview) -> None: ...
        def end(self, digest: bytes) -> None: ...

    client = WeightClient(connect, Cancellation())
    with pytest.raises(PenstockError):
        client.fetch(b"", [Part("a", 20), Part("b", 3)], Nowhere())
    for end in ends:
        end.close()


def test_r15_a_worker_that_is_away_for_a_moment_asks_again(
    head: WeightHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections break together, and this one may be back first."""
    monkeypatch.setattr(weight_client, "FIRST_PAUSE_S", 0.0)
    errors: list[PeerError] = [JoinError("it has not joined.", code=NOT_JOINED)]

    def connect(_: Cancellation) -> socket.socket:
        if errors:
            raise errors.pop()
        return head.connect()

    client = WeightClient(connect, Cancellation())
    assert client.describe(head.identity).tensors
    client.close()
    errors.append(JoinError("it never will."))
    with pytest.raises(JoinError, match="never"):
        client.describe(head.identity)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../model/model.safetensors", "model.safetensors", "token", ""]
)
def test_r15_a_head_gives_no_file_but_those_that_ranks_read(head: WeightHead, name: str) -> None:
    client = WeightClient(head.connect, Cancellation())
    with pytest.raises(ProtocolError, match="a file that no rank reads"):
        client._tried(lambda wire: wire.ask(AskParts(model=head.identity, files=[name]), Sending))
    with pytest.raises(CheckpointError, match="no such name"):
        client.digests(head.identity, [name])
    client.close()


def test_r15_a_head_gives_nothing_of_a_model_that_it_does_not_serve(head: WeightHead) -> None:
    client = WeightClient(head.connect, Cancellation())
    with pytest.raises(ModelError, match="does not serve"):
        client.describe(b"x" * 32)
    with pytest.raises(ModelError, match="does not serve"):
        client._tried(lambda wire: wire.ask(AskDigests(model=b"", tensors=[]), Sending))
    client.close()


def test_r15_a_host_has_so_many_connections_at_a_time(
    head: WeightHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_server, "MAX_CONNECTIONS", 2)
    wires = [WeightWire(head.connect()) for _ in range(3)]
    for wire in wires[:2]:
        assert wire.ask(AskModel(model=head.identity), Description)
    with pytest.raises(LinkClosedError):
        wires[2].ask(AskModel(model=head.identity), Description)
    for wire in wires:
        wire.close()


def test_r15_all_connections_of_a_host_are_dropped_and_those_of_others_stay(head: WeightHead) -> None:
    dropped, other = WeightWire(head.connect()), WeightWire(head.connect(host="shelf"))
    for wire in (dropped, other):
        assert wire.ask(AskModel(model=head.identity), Description)
    assert head.server.hosts() == {"desk", "shelf"}
    head.server.drop("desk")
    with pytest.raises(LinkClosedError):
        dropped.ask(AskModel(model=head.identity), Description)
    assert other.ask(AskModel(model=head.identity), Description)
    for wire in (dropped, other):
        wire.close()


def test_a_head_that_closes_ends_its_connections(head: WeightHead) -> None:
    wire = WeightWire(head.connect())
    assert wire.ask(AskModel(model=head.identity), Description)
    head.close()
    with pytest.raises(LinkClosedError):
        wire.receive(Told, MAX_TOLD_BYTES)
    wire.close()
    late = WeightWire(head.connect())
    with pytest.raises(LinkClosedError):
        late.receive(Told, MAX_TOLD_BYTES)
    late.close()


def test_a_worker_that_waits_for_a_silent_head_can_be_cancelled() -> None:
    ours, theirs = socket.socketpair()
    cancellation, crew = Cancellation(), Crew()
    client = WeightClient(lambda _: ours, cancellation)

    def wait() -> None:
        with pytest.raises(CancelledError):
            client.describe(b"")

    crew.start(wait)
    assert theirs.recv(1)  # it waits for the answer
    cancellation.cancel()
    crew.join()
    theirs.close()


def test_g1_the_digests_of_tensors_are_remembered_over_starts_until_the_file_changes(
    tmp_path: Path, head: WeightHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.hosts.weights import tensor_digests

    client = WeightClient(head.connect, Cancellation())
    names = [tensor.name for tensor in client.describe(head.identity).tensors]
    first = client.digests(head.identity, names)
    client.close()
    head.close()  # its threads have kept what they know
    reads: list[object] = []
    original = tensor_digests.read_pieces
    monkeypatch.setattr(tensor_digests, "read_pieces", lambda *given: reads.append(1) or original(*given))
    again = WeightHead(tmp_path / "head", tmp_path / "model")
    client = WeightClient(again.connect, Cancellation())
    assert client.digests(again.identity, names) == first
    assert reads == []
    path = tmp_path / "model" / "model.safetensors"
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    assert client.digests(again.identity, names) == first
    assert len(reads) == len(names)
    client.close()
    again.close()


def test_r15_a_request_is_small_and_names_no_more_tensors_than_there_are(head: WeightHead) -> None:
    client = WeightClient(head.connect, Cancellation())
    names = [tensor.name for tensor in client.describe(head.identity).tensors]
    for asked in (
        AskDigests(model=head.identity, tensors=[*names, names[0]]),
        AskParts(model=head.identity, files=["config.json"] * 4),
    ):
        with pytest.raises(ProtocolError, match="more than"):
            client._tried(lambda wire, asked=asked: wire.ask(asked, Sending))
    for asked in (
        AskDigests(model=head.identity, tensors=[""] * (MOST_NAMES + 1)),
        AskParts(model=head.identity, tensors=["x" * (MAX_ASKED_BYTES + 1)]),
    ):
        with pytest.raises(PeerError):
            client._tried(lambda wire, asked=asked: wire.ask(asked, Sending))
    client.close()
    assert MAX_ASKED_BYTES <= 4 << 20


@pytest.mark.parametrize(("most_names", "names_bytes"), [(3, 1 << 20), (1000, 60)])
def test_r15_what_is_more_than_a_request_takes_comes_with_several(
    head: WeightHead, monkeypatch: pytest.MonkeyPatch, most_names: int, names_bytes: int
) -> None:
    class Noted:
        def __init__(self) -> None:
            self.begun: list[int] = []
            self.digests: list[bytes] = []

        def begin(self, number: int) -> None:
            self.begun.append(number)

        def write(self, memory: memoryview) -> None: ...

        def end(self, digest: bytes) -> None:
            self.digests.append(digest)

    client = WeightClient(head.connect, Cancellation())
    made = client.describe(head.identity)
    names = [tensor.name for tensor in made.tensors]
    at_once = client.digests(head.identity, names)
    monkeypatch.setattr(weight_client, "MOST_NAMES", most_names)
    monkeypatch.setattr(weight_client, "NAMES_BYTES", names_bytes)
    assert client.digests(head.identity, names) == at_once
    entries = [head.served.open(head.identity).tensor(name) for name in names]
    files = [Part(file.name, file.num_bytes, is_file=True) for file in made.files]
    sink = Noted()
    client.fetch(
        head.identity, [*files, *(Part(entry.name, entry.end - entry.begin) for entry in entries)], sink
    )
    assert sink.begun == list(range(len(files) + len(names)))
    assert sink.digests == [file.digest for file in made.files] + at_once
    client.close()


def test_r15_without_a_thread_for_it_a_connection_is_not_counted(
    head: WeightHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        for _ in range(weight_server.MAX_CONNECTIONS):
            ours, theirs = socket.socketpair()
            with ours, theirs, pytest.raises(RuntimeError):
                head.server.serve(theirs, "desk")
    client = WeightClient(head.connect, Cancellation())
    assert client.describe(head.identity).tensors
    client.close()
