"""The wire between core and clients."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from core_numbers import core_stats
from penstock.batch import RankLoaded
from penstock.engine.ipc import (
    AbortRequests,
    AddRequest,
    ClientSocket,
    CoreGone,
    CoreSocket,
    Hello,
    StepUpdates,
    Welcome,
)
from penstock.errors import ErrorInfo, LinkClosedError, ProtocolError
from penstock.hosts.local_socket import LocalSocket
from penstock.request import GenerationRequest, RequestUpdate, SamplingParams, TokenLogprobs

WAIT_S = 10.0  # a bound for hangs, never waited for
STATS = core_stats(
    num_running=1,
    num_waiting=2,
    num_blocks=3,
    free_blocks=4,
    num_preemptions=5,
    step_id=6,
    inflight=7,
    last_result_age_s=8.5,
    stalled_s=0.25,
    stall_limit_s=5.0,
    epoch=9,
    generated_tokens=10,
    prompt_tokens=11,
)
MESSAGES = [
    Welcome(
        num_blocks=1,
        block_size=16,
        max_model_len=512,
        stages=[
            RankLoaded(
                stage=0,
                max_blocks=1,
                block_bytes=2,
                tensor_bytes=3,
                bytes_read=4,
                load_seconds=0.5,
                is_invariant=False,
            )
        ],
    ),
    StepUpdates([], STATS),
    StepUpdates(
        [
            RequestUpdate(request_id="a", token_ids=[1, 2], logprobs=[TokenLogprobs(-1.0, 1, [3], [-2.0])]),
            RequestUpdate(request_id="b", finish_reason="stop", stop_token_id=2),
            RequestUpdate(
                request_id="c",
                finish_reason="error",
                error=ErrorInfo(kind="NumericalError", message="NaN"),
            ),
        ],
        STATS,
    ),
]


@pytest.fixture
def pair() -> Iterator[tuple[CoreSocket, ClientSocket]]:
    endpoint = LocalSocket()
    core, client = CoreSocket(f"fd:{os.dup(endpoint.listen_fd)}"), ClientSocket(endpoint.connect_address)
    yield core, client
    client.close()
    core.close()
    endpoint.close()


def hear(core: CoreSocket) -> tuple[bytes, object]:
    core.wait([], WAIT_S)
    (received,) = core.drain()
    return received


def receive(client: ClientSocket, count: int = 1) -> list[object]:
    received: list[object] = []
    while len(received) < count:
        assert client.wait(WAIT_S), "the core has said nothing"
        received += client.drain()
    return received


def test_both_directions_carry_every_message_unchanged(pair: tuple[CoreSocket, ClientSocket]) -> None:
    core, client = pair
    request = GenerationRequest(
        request_id="r", prompt_token_ids=[1, 2], sampling=SamplingParams(stop=["x"], seed=-5)
    )
    for sent in (Hello(), AddRequest(request), AddRequest(request, [7, 8]), AbortRequests(["r", "s"])):
        client.send(sent)
        sender, received = hear(core)
        assert received == sent
    for answer in MESSAGES:
        core.send(sender, answer)
        assert receive(client) == [answer]


def test_answers_go_to_the_client_that_asked(pair: tuple[CoreSocket, ClientSocket]) -> None:
    core, first = pair
    first.send(Hello())
    first_id, _ = hear(core)
    core.send(first_id, MESSAGES[0])
    assert not core.send(b"unknown", MESSAGES[1])
    core.send(first_id, MESSAGES[1])
    assert receive(first, 2) == [MESSAGES[0], MESSAGES[1]]


def test_a_burst_is_not_dropped(pair: tuple[CoreSocket, ClientSocket]) -> None:
    core, client = pair
    client.send(Hello())
    sender, _ = hear(core)
    for index in range(5000):  # beyond zmq's default high-water mark
        core.send(sender, StepUpdates([RequestUpdate(request_id=str(index))], STATS))
    received = receive(client, 5000)
    assert [entry.updates[0].request_id for entry in received if isinstance(entry, StepUpdates)] == [
        str(index) for index in range(5000)
    ]


def test_r1_the_end_of_the_core_is_received_and_nothing_after_it(
    pair: tuple[CoreSocket, ClientSocket],
) -> None:
    core, client = pair
    client.send(Hello())
    sender, _ = hear(core)
    core.send(sender, MESSAGES[1])
    core.close()
    received: list[object] = []
    while not any(isinstance(message, CoreGone) for message in received):
        assert client.wait(WAIT_S)
        received += client.drain()
    # Its last words may be lost with it: whoever asks the next core does not need them.
    assert received[:-1] in ([], [MESSAGES[1]])


def with_a_core_that_went() -> tuple[LocalSocket, ClientSocket]:
    """Where cores listen, and a client of one that has heard it and has gone."""
    endpoint = LocalSocket()
    core, client = CoreSocket(f"fd:{os.dup(endpoint.listen_fd)}"), ClientSocket(endpoint.connect_address)
    client.send(Hello())
    hear(core)
    core.close()
    return endpoint, client


def test_r4_a_client_reaches_the_next_core_at_the_same_address() -> None:
    endpoint, client = with_a_core_that_went()
    assert isinstance(receive(client)[-1], CoreGone)
    client.send(AbortRequests(["lost with the connection"]))
    client.reconnect()
    client.send(Hello())  # before the other core is there
    second = CoreSocket(f"fd:{os.dup(endpoint.listen_fd)}")
    sender, received = hear(second)
    assert received == Hello()
    second.send(sender, MESSAGES[0])
    assert receive(client) == [MESSAGES[0]]
    for end in (client, second, endpoint):
        end.close()


def test_r13_the_core_notices_that_a_client_has_gone(pair: tuple[CoreSocket, ClientSocket]) -> None:
    core, client = pair
    client.send(Hello())
    sender, _ = hear(core)
    assert core.send(sender, MESSAGES[0])
    client.close()
    deadline = time.monotonic() + WAIT_S
    while core.send(sender, MESSAGES[0]):
        assert time.monotonic() < deadline


def test_waiting_tells_which_other_descriptors_are_ready(pair: tuple[CoreSocket, ClientSocket]) -> None:
    core, _ = pair
    reader, writer = os.pipe()
    assert core.wait([reader], 0.0) == set()
    os.write(writer, b"x")
    assert core.wait([reader], WAIT_S) == {reader}
    os.close(reader)
    os.close(writer)


def test_what_is_no_message_is_an_error_of_the_protocol(pair: tuple[CoreSocket, ClientSocket]) -> None:
    core, client = pair
    client.send(Hello())
    sender, _ = hear(core)
    core._socket.send_multipart((sender, b"\xff"))
    client.wait(WAIT_S)
    with pytest.raises(ProtocolError, match="sent an invalid message"):
        client.drain()
    client._socket.send(b"\x81\xa4type\xa5other")
    core.wait([], WAIT_S)
    with pytest.raises(ProtocolError, match="sent an invalid message"):
        core.drain()


def test_a_closed_client_says_so(pair: tuple[CoreSocket, ClientSocket]) -> None:
    _, client = pair
    client.close()
    client.close()
    with pytest.raises(LinkClosedError):
        client.send(Hello())
    assert client.drain() == []


def test_r2_sending_to_a_core_that_has_gone_does_not_wait() -> None:
    endpoint, client = with_a_core_that_went()
    assert client.wait(WAIT_S)  # the end of the connection, which is not looked at yet
    for _ in range(3):
        client.send(AbortRequests(["a"]))
    assert isinstance(client.drain()[-1], CoreGone)
    client.close()
    endpoint.close()
