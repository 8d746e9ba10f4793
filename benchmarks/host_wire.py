"""What the wire between two hosts of a test network can do, without an engine: round trips and chunks.

A part of `two_hosts.py`, and the program that it starts on both hosts. `ping_pong` sends bytes there and
back over sockets and TLS of its own, as an independent measure of two hops; `send_chunks` sends frames over
the link that the engine has. Processes on both hosts have the same clock, so that a crossing is timed from
end to end.
"""

from __future__ import annotations

import os
import socket
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from certificates import Certificate
from link_peers import LinkPeers
from network import Host
from penstock.batch import SampledTokens, encode
from penstock.hosts.rank_host import LinkNeed
from penstock.hosts.stream_ends import DiallingEnd, ListeningEnd
from penstock.pipeline.links.frame import ALIGNMENT, NUM_CARRIED, FrameHeader, FrameKind, frame_bytes
from penstock.pipeline.links.link_carriers import open_link
from penstock.process.control import descriptors_of
from penstock.process.endpoints import LinkEndpoint, RankEndpoints, SocketHandle

PORT = 9100
LIMIT_S = 120.0
NUM_FRAMES = 4
MESSAGE_HEAD_BYTES = 16  # of `pipeline.links.stream_channel`


class PingPong(msgspec.Struct, frozen=True, kw_only=True, tag="ping_pong"):
    """One end of the round trips.

    Attributes:
        there, back: bytes.
        think_s: that each end computes before it sends, as stages do, so that the other one sleeps.
        files: certificate and key of the end that accepts; the authority for the one that dials.
    """

    core: int
    address: str
    is_dialler: bool
    files: list[str]
    there: int
    back: int
    trips: int
    think_s: float


class Chunks(msgspec.Struct, frozen=True, kw_only=True, tag="chunks"):
    """One end of a link.

    Attributes:
        pauses_s: before each frame.
    """

    core: int
    endpoint: LinkEndpoint
    is_sender: bool
    num_tokens: int
    width: int
    pauses_s: list[float]


def ping_pong(
    hosts: Sequence[Host[Any]],
    cores: Sequence[int],
    directory: Path,
    *,
    width: int,
    trips: int,
    think_s: float,
) -> list[float]:
    """Return the seconds of round trips: the hidden state of a token goes to the second host, the token back.

    Args:
        directory: for certificates.
        width: of the hidden state, in bfloat16.
    """
    address = hosts[1].address
    certificate = Certificate(directory, address)
    ends = [
        PingPong(
            core=core,
            address=address,
            is_dialler=is_dialler,
            files=[certificate.ca_file] if is_dialler else [certificate.certfile, certificate.keyfile],
            there=hidden_bytes(1, width),
            back=sample_bytes(),
            trips=trips,
            think_s=think_s,
        )
        for core, is_dialler in zip(cores, (True, False), strict=True)
    ]
    accepting = _start(hosts[1], ends[1])
    assert accepting.stdout is not None
    accepting.stdout.readline()  # it listens
    trips_s, _ = _outcomes([_start(hosts[0], ends[0]), accepting])
    return trips_s


def send_chunks(
    hosts: Sequence[Host[Any]],
    cores: Sequence[int],
    *,
    num_tokens: int,
    width: int,
    pauses_s: Sequence[float],
) -> tuple[list[float], list[float]]:
    """Send frames of hidden states to the second host over TLS; when each was sent, and when it had come."""
    size = frame_bytes(max_num_tokens=num_tokens, width=width, itemsize=2)
    need = LinkNeed(frame_bytes=size, num_frames=NUM_FRAMES)
    with ExitStack() as closing:
        peers = closing.enter_context(LinkPeers())
        listener = hosts[1].socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((hosts[1].address, PORT))
        listener.listen()
        listening = ListeningEnd(need, listener, hosts[1].address, security=peers.certified(1))
        closing.callback(listening.close)
        assert listening.invitation is not None
        dialling = DiallingEnd(need, listening.invitation, security=peers.certified(0))
        closing.callback(dialling.close)
        programs = [
            _start(
                host,
                Chunks(
                    core=core,
                    endpoint=end.endpoint,
                    is_sender=end is dialling,
                    num_tokens=num_tokens,
                    width=width,
                    pauses_s=list(pauses_s),
                ),
            )
            for host, core, end in zip(hosts, cores, (dialling, listening), strict=True)
        ]
        sent_at, came_at = _outcomes(programs)
    return sent_at, came_at


def hidden_bytes(num_tokens: int, width: int) -> int:
    """Bytes of a frame of hidden states on the wire."""
    return ALIGNMENT + _header(num_tokens, width).payload_bytes


def sample_bytes() -> int:
    """Bytes of the message that takes one sampled token back."""
    sampled = SampledTokens(step_id=1000, epoch=0, digest=1 << 31, token_ids=[[100_000]], num_rejected=[0])
    return MESSAGE_HEAD_BYTES + len(encode(sampled))


def _header(num_tokens: int, width: int) -> FrameHeader:
    return FrameHeader(
        epoch=0,
        step_id=0,
        kind=FrameKind.HIDDEN,
        num_tokens=num_tokens,
        width=width,
        dtype="bfloat16",
        num_tensors=NUM_CARRIED,
        digest=0,
    )


def _start(host: Host[Any], end: PingPong | Chunks) -> subprocess.Popen[str]:
    """Start this program on a host; it inherits the descriptors of its end."""
    inherited: list[int] = []
    if isinstance(end, Chunks):
        nobody = SocketHandle(handle_fd=0)
        carried = RankEndpoints(epoch=0, plans=nobody, tokens=[], outgoing=[end.endpoint])
        inherited = [fd for fd in descriptors_of(carried) if fd != nobody.handle_fd]
    command = [sys.executable, __file__, msgspec.json.encode(end).decode()]
    return host.popen(command, pass_fds=inherited, stdout=subprocess.PIPE, text=True)


def _outcomes(programs: Sequence[subprocess.Popen[str]]) -> list[list[float]]:
    """Return what the programs print in the end."""
    found = []
    for program in programs:
        printed, _ = program.communicate(timeout=LIMIT_S)
        if program.returncode != 0:
            raise SystemExit(f"a program on a host has ended with {program.returncode}")
        found.append(msgspec.json.decode(printed, type=list[float]))
    return found


def run_end(told: str) -> None:
    """Be one end, and print its times."""
    end = msgspec.json.decode(told, type=PingPong | Chunks)
    os.sched_setaffinity(0, {end.core})
    torch.set_num_threads(1)  # as a stage of one core has it: two would wait for each other
    times = _run_trips(end) if isinstance(end, PingPong) else _run_chunks(end)
    print(msgspec.json.encode(times).decode())


def _run_trips(end: PingPong) -> list[float]:
    with _dialled(end) if end.is_dialler else _accepted(end) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not end.is_dialler:
            for _ in range(end.trips):
                _receive(stream, end.there)
                _compute(end.think_s)
                stream.sendall(bytes(end.back))
            return []
        trips_s = []
        for _ in range(end.trips):
            began = time.perf_counter()
            stream.sendall(bytes(end.there))
            _receive(stream, end.back)
            trips_s.append(time.perf_counter() - began - end.think_s)
            _compute(end.think_s)
        return trips_s[len(trips_s) // 10 :]  # the first find cold caches


def _dialled(end: PingPong) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=end.files[0])
    plain = socket.create_connection((end.address, PORT), LIMIT_S)
    return context.wrap_socket(plain, server_hostname=end.address)


def _accepted(end: PingPong) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(*end.files)
    with socket.create_server((end.address, PORT)) as listener:
        print(flush=True)  # whoever started us waits for it
        listener.settimeout(LIMIT_S)
        plain, _ = listener.accept()
    plain.settimeout(LIMIT_S)
    return context.wrap_socket(plain, server_side=True)


def _receive(stream: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        data = stream.recv(num_bytes)
        if not data:
            raise SystemExit("the other end has gone")
        num_bytes -= len(data)


def _compute(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def _run_chunks(end: Chunks) -> list[float]:
    header = _header(end.num_tokens, end.width)
    tensors = [torch.ones(end.num_tokens, end.width, dtype=torch.bfloat16) for _ in range(NUM_CARRIED)]
    link, times = open_link(end.endpoint, "chunks", LIMIT_S), []
    for pause_s in end.pauses_s:
        if end.is_sender:
            time.sleep(pause_s)
            times.append(time.monotonic())
            link.send_frame(header, tensors)
        else:
            link.receive_frame(header, tensors).wait()
            times.append(time.monotonic())
    if end.is_sender:  # what has not left yet must not be lost with the process
        time.sleep(max(1.0, statistics.median(end.pauses_s)))
    link.close()
    return times


if __name__ == "__main__":
    run_end(sys.argv[1])
