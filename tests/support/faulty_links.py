"""Links and channels that lose, repeat, exchange, change or hold up what they carry, as a seed says.

What happens to a frame is a pure function of (seed, name of the link, number of the frame), so that a run can
be played again: `Faults.kind_of` answers without any run. A frame is changed where its receiver can notice:
in its header, and in the shape of what it carries. That the numbers in it cannot change unseen behind a link
is tested where they lie in shared memory (`tests/unit/pipeline/links`).
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from hashlib import blake2b
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from penstock.batch import SampledCounts, SampledTokens, StepResult, encode
from penstock.pipeline.links.channel import SEND_TIMEOUT_S, MessageChannel
from penstock.pipeline.links.frame import FrameHeader
from penstock.pipeline.links.link import Link, RecvHandle
from penstock.trace.phases import NOBODYS, PhaseClock

HEADER_BITS = 8 * 36


class Kind(Enum):
    """What may happen to a frame."""

    DELAY = "delay"
    DROP = "drop"
    DUPLICATE = "duplicate"
    REORDER = "reorder"  # it comes after the one that follows it
    CORRUPT = "corrupt"  # a bit of its header, or of a plan, is another one
    RESHAPE = "reshape"  # it carries more or less than was agreed on
    CLOSE = "close"
    THROW = "throw"


SENDING = tuple(Kind)
RECEIVING = (Kind.DELAY, Kind.CLOSE, Kind.THROW)


class InjectedError(OSError):
    """Thrown by a link in place of what a driver or a kernel would throw."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One that has happened."""

    kind: Kind
    name: str  # of the link
    number: int  # of the frame
    choice: random.Random  # for whatever the kind leaves open

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name} #{self.number}"


class Faults:
    """Which frames suffer, and a book of those that have.

    Args:
        rate: share of the frames.
        kinds: those that happen.
        limit: so many faults, then none.
        max_delay_s: the longest delay.
    """

    def __init__(
        self,
        seed: int,
        rate: float,
        *,
        kinds: Sequence[Kind] = SENDING,
        limit: int | None = None,
        max_delay_s: float = 0.002,
    ) -> None:
        self.seed = seed
        self.max_delay_s = max_delay_s
        self.happened: list[Fault] = []
        self._rate = rate
        self._kinds = set(kinds)
        self._limit = limit
        self._lock = threading.Lock()

    def kind_of(self, name: str, number: int, possible: Sequence[Kind]) -> Kind | None:
        """What happens to a frame of a link on which these kinds are possible."""
        word = blake2b(f"{self.seed}|{name}|{number}".encode(), digest_size=8).digest()
        kinds = [kind for kind in possible if kind in self._kinds]
        if not kinds or int.from_bytes(word[:4], "little") >= self._rate * 2**32:
            return None
        return kinds[int.from_bytes(word[4:], "little") % len(kinds)]

    def strike(self, name: str, number: int, possible: Sequence[Kind]) -> Fault | None:
        """As `kind_of`; enters it in the book."""
        kind = self.kind_of(name, number, possible)
        if kind is None:
            return None
        fault = Fault(
            kind=kind, name=name, number=number, choice=random.Random(f"{self.seed}|{name}|{number}")
        )
        with self._lock:
            if self.is_over:
                return None
            self.happened.append(fault)
        return fault

    @property
    def is_over(self) -> bool:
        return self._limit is not None and len(self.happened) >= self._limit

    def delay(self, fault: Fault) -> None:
        time.sleep(fault.choice.random() * self.max_delay_s)

    def __str__(self) -> str:
        """For the message of a failed test: what is needed to play it again."""
        last = "\n  ".join(map(str, self.happened[-40:]))
        return f"seed {self.seed}, {len(self.happened)} faults; the last ones:\n  {last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlippedHeader(FrameHeader):
    """Packs as the original with one bit flipped; in memory, where nobody packs, its digest is another."""

    original: FrameHeader
    bit: int

    @classmethod
    def of(cls, original: FrameHeader, bit: int) -> FlippedHeader:
        values = {field.name: getattr(original, field.name) for field in fields(original)}
        return cls(**{**values, "digest": original.digest ^ (1 << bit % 32)}, original=original, bit=bit)

    def pack(self) -> bytes:
        packed = bytearray(self.original.pack())
        packed[self.bit // 8] ^= 1 << self.bit % 8
        return bytes(packed)


class FaultyLink:
    """One end of a `Link`.

    Args:
        name: with the epoch and the end; no other end has the same.
    """

    def __init__(self, inner: Link, name: str, faults: Faults) -> None:
        self._inner = inner
        self._name = name
        self._faults = faults
        self._number = 0
        self._held: list[tuple[FrameHeader, list[Tensor]]] = []

    @property
    def is_sending(self) -> bool:
        return self._inner.is_sending

    def send_frame(self, header: FrameHeader, tensors: Sequence[Tensor], clock: PhaseClock = NOBODYS) -> None:
        fault = self._strike(SENDING)
        kind = None if fault is None else fault.kind
        if kind is Kind.REORDER:
            self._held.append((header, [tensor.clone() for tensor in tensors]))
        if kind in (Kind.DROP, Kind.REORDER):
            return
        if kind is Kind.CORRUPT:
            header = FlippedHeader.of(header, fault.choice.randrange(HEADER_BITS))
        elif kind is Kind.RESHAPE:
            header, tensors = reshaped(header, tensors, fault.choice)
        for _ in range(2 if kind is Kind.DUPLICATE else 1):
            self._inner.send_frame(header, tensors, clock)
        while self._held:
            self._inner.send_frame(*self._held.pop(0), clock)

    def receive_frame(
        self,
        header: FrameHeader,
        out: Sequence[Tensor],
        requests: Sequence[str] = (),
        clock: PhaseClock = NOBODYS,
    ) -> RecvHandle:
        handle = self._inner.receive_frame(header, out, requests, clock)

        def wait() -> None:
            self._strike(RECEIVING)
            handle.wait()

        return RecvHandle(wait)

    def close(self) -> None:
        self._inner.close()

    def _strike(self, possible: Sequence[Kind]) -> Fault | None:
        """What happens to the next frame; delays, ends and throws happen here."""
        fault = self._faults.strike(self._name, self._number, possible)
        self._number += 1
        suffer(fault, self._inner, self._faults)
        return fault


def suffer(fault: Fault | None, inner: Link | MessageChannel, faults: Faults) -> None:
    """The kinds that are the same everywhere."""
    kind = None if fault is None else fault.kind
    if kind is Kind.DELAY:
        faults.delay(fault)
    elif kind is Kind.CLOSE:
        inner.close()
    elif kind is Kind.THROW:
        raise InjectedError(f"injected: {fault}")


def reshaped(
    header: FrameHeader, tensors: Sequence[Tensor], choice: random.Random
) -> tuple[FrameHeader, list[Tensor]]:
    """A frame of another shape or type whose header says so."""
    first, width = tensors[0], header.width
    other_tokens = choice.choice([n for n in (header.num_tokens - 1, header.num_tokens + 1) if n >= 0])
    other_width = width + choice.choice([-1, 1])
    ways = {
        "tokens": (torch.zeros(other_tokens, width, dtype=first.dtype), len(tensors)),
        "width": (torch.zeros(header.num_tokens, other_width, dtype=first.dtype), len(tensors)),
        "dtype": (torch.zeros(header.num_tokens, width, dtype=torch.bfloat16), len(tensors)),
        "tensors": (first, 1),
    }
    tensor, count = ways[choice.choice(sorted(ways))]
    described = replace(
        header,
        num_tokens=len(tensor),
        width=tensor.shape[1],
        dtype=str(tensor.dtype).removeprefix("torch."),
        num_tensors=count,
    )
    return described, [tensor] * count


Change = Callable[[bytes, Kind, random.Random], bytes]
Concerns = Callable[[bytes], bool]


class FaultyChannel:
    """One end of a `MessageChannel`, whose messages of one type suffer on their way.

    Args:
        concerns: which messages suffer; all others pass.
        change: makes a message another one, for `Kind.CORRUPT` and `Kind.RESHAPE`.
        incoming: what comes suffers, else what goes.
    """

    def __init__(
        self,
        inner: MessageChannel,
        name: str,
        faults: Faults,
        *,
        concerns: Concerns,
        change: Change,
        incoming: bool,
    ) -> None:
        self._inner = inner
        self._name = name
        self._faults = faults
        self._concerns = concerns
        self._change = change
        self._incoming = incoming
        self._number = 0
        self._held: list[bytes] = []
        self._come: deque[bytes] = deque()

    def send(self, frame: bytes, timeout_s: float = SEND_TIMEOUT_S) -> None:
        for passed in [frame] if self._incoming else self._through(frame):
            self._inner.send(passed, timeout_s)

    def recv(self, timeout_s: float | None) -> bytes | None:
        while not self._come:
            frame = self._inner.recv(timeout_s)
            if frame is None:
                return None
            self._come += self._through(frame) if self._incoming else [frame]
        return self._come.popleft()

    def close(self) -> None:
        self._inner.close()

    def _through(self, frame: bytes) -> list[bytes]:
        """What comes out where this goes in."""
        if not self._concerns(frame):
            return [frame]
        fault = self._faults.strike(self._name, self._number, SENDING)
        self._number += 1
        suffer(fault, self._inner, self._faults)
        kind = None if fault is None else fault.kind
        if kind is Kind.REORDER:
            self._held.append(frame)
        if kind in (Kind.DROP, Kind.REORDER):
            return []
        if kind in (Kind.CORRUPT, Kind.RESHAPE):
            frame = self._change(frame, kind, fault.choice)
        held, self._held = self._held, []
        return [frame] * (2 if kind is Kind.DUPLICATE else 1) + held


def change_plan(frame: bytes, kind: Kind, choice: random.Random) -> bytes:
    """Any bit of a plan, or some of its bytes missing."""
    if kind is Kind.RESHAPE:
        return frame[: choice.randrange(len(frame))]
    changed = bytearray(frame)
    changed[choice.randrange(len(frame))] ^= 1 << choice.randrange(8)
    return bytes(changed)


def change_samples(frame: bytes, kind: Kind, choice: random.Random) -> bytes:
    """Samples of another step, epoch or history, or of more or fewer rows."""
    try:
        return encode(_changed(msgspec.msgpack.decode(frame, type=SampledTokens), kind, choice))
    except msgspec.ValidationError:  # to a stage that does not embed
        return encode(_changed(msgspec.msgpack.decode(frame, type=SampledCounts), kind, choice))


def change_result(frame: bytes, kind: Kind, choice: random.Random) -> bytes:
    """As `change_samples`, for a result."""
    return encode(_changed(msgspec.msgpack.decode(frame, type=StepResult), kind, choice))


Samples = TypeVar("Samples", SampledTokens, SampledCounts, StepResult)


def _changed(message: Samples, kind: Kind, choice: random.Random) -> Samples:
    if kind is Kind.RESHAPE and isinstance(message, SampledCounts):
        num_ids = choice.choice([[*message.num_ids, 1], message.num_ids[1:]])
        return msgspec.structs.replace(message, num_ids=num_ids)
    if kind is Kind.RESHAPE:
        ids = message.token_ids
        other = choice.choice([[*ids, [1]], ids[1:]]) if ids else [[1]]
        return msgspec.structs.replace(message, token_ids=other)
    field = choice.choice(["step_id", "epoch", "digest"])
    return msgspec.structs.replace(message, **{field: getattr(message, field) ^ (1 << choice.randrange(20))})


def is_plan(frame: bytes) -> bool:
    return b"plan" in frame[:16]


def is_result(frame: bytes) -> bool:
    return b"result" in frame[:16]
