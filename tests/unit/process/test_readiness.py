"""Waiting for objects whose descriptors may have any number."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from penstock.process.readiness import await_readable, await_writable

BEYOND_SELECT = 1024  # the first number that `select.select` does not know


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.fixture
def far() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected sockets with numbers that `select.select` does not know."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = BEYOND_SELECT + 16
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"this system allows {hard} open files")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    near = socket.socketpair()
    numbers = [fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, BEYOND_SELECT) for end in near]
    for end in near:
        end.close()
    one, other = (socket.socket(fileno=number) for number in numbers)
    with one, other:
        yield one, other
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_descriptors_of_any_number_are_waited_for(far: tuple[socket.socket, socket.socket]) -> None:
    one, other = far
    assert min(one.fileno(), other.fileno()) >= BEYOND_SELECT
    assert await_readable([one, other], 0.0) == []
    assert await_writable([one], 0.0) == [one]
    one.send(b"x")
    assert await_readable([one, other]) == [other]
    assert await_readable([other.fileno()]) == [other.fileno()]


def test_the_ready_ones_come_in_the_order_in_which_they_were_given(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    one, other = pair
    one.send(b"x")
    other.send(b"x")
    assert await_readable([other, one]) == [other, one]
    assert await_readable([one, other]) == [one, other]


def test_an_end_counts_as_ready(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    other.close()
    assert await_readable([one]) == [one]
    assert await_writable([one]) == [one]


def test_one_that_takes_no_more_is_not_writable(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    one.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            one.send(bytes(1 << 16))
    assert await_writable([one], 0.0) == []
    assert await_writable([one, other], 0.0) == [other]


def test_a_time_that_the_system_cannot_wait_is_one_that_it_can(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    one, other = pair
    other.send(b"x")
    for seconds in (1e7, 1e300, float("inf")):
        assert await_readable([one], seconds) == [one]


def test_a_deadline_that_has_passed_is_not_waited_for() -> None:
    reading, writing = os.pipe()
    assert await_readable([reading], -1.0) == []
    os.close(reading)
    os.close(writing)
