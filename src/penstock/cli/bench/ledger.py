"""The ledger of a load: every token of every request must come exactly once, and every stream must end well.

A `StreamAccount` has what came for one request. `cli.bench.online` writes it from the events of a server,
`cli.bench.engine_load` from the outputs of an engine. `audit` compares all accounts with the requests. The
events of a good stream are tokens, one finish reason, usage and one `[DONE]`. A stream may also end with one
error event, and then without `[DONE]`. This module neither reads nor writes files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.errors import ErrorInfo
from penstock.workloads.requests import BenchRequest

DONE = b"[DONE]"


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    index: int = 0


class Usage(msgspec.Struct):
    """Tokens that a server or an engine has counted."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class _ErrorBody(msgspec.Struct):
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class _Event(msgspec.Struct):
    id: str = ""
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: _ErrorBody | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorBody


_events = msgspec.json.Decoder(_Event)
_error_answers = msgspec.json.Decoder(_ErrorAnswer)


@dataclass(slots=True, kw_only=True)
class StreamAccount:
    """The account of the answer to one request. All times are seconds by the clock of the sender.

    Attributes:
        index: index of the request.
    """

    index: int
    started_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    ended_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    chunk_gaps_s: list[float] = field(default_factory=list)  # between chunks that carry tokens
    text: list[str] = field(default_factory=list)
    stream_ids: set[str] = field(default_factory=set)
    finish_reasons: list[str] = field(default_factory=list)
    prompt_echo: list[int] | None = None
    usage: Usage | None = None
    dones: int = 0
    after_done: int = 0  # events after [DONE]
    error: ErrorInfo | None = None  # a typed error that the server answered
    broken: str = ""  # the stream ended in no allowed way

    @property
    def ok(self) -> bool:
        return self.error is None and not self.broken and self.dones == 1

    def event(self, data: bytes, now: float) -> None:
        """Add one event. Raises `msgspec.MsgspecError` for data that is not a completion chunk."""
        self.after_done += self.dones
        if data == DONE:
            self.dones += 1
            return
        event = _events.decode(data)
        if event.id:
            self.stream_ids.add(event.id)
        if event.error is not None:
            self.error = _as_info(event.error, "stream")
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices:
            self._choice(choice, now)

    def _choice(self, choice: _Choice, now: float) -> None:
        if choice.index != 0:
            self.broken = f"a chunk names choice {choice.index}, which was not requested"
        if choice.finish_reason is not None:
            self.finish_reasons.append(choice.finish_reason)
        if choice.prompt_token_ids is not None:
            self.prompt_echo = choice.prompt_token_ids
        self.text.append(choice.text)
        if choice.token_ids:
            self.add_tokens(choice.token_ids, now)

    def add_tokens(self, token_ids: list[int], now: float) -> None:
        """Add tokens that came together."""
        if self.token_ids:
            self.chunk_gaps_s.append(now - self.last_token_s)
        else:
            self.first_token_s = now
        self.last_token_s = now
        self.token_ids += token_ids

    def refused(self, status: int, body: bytes) -> None:
        """Record an answer that is not 200."""
        try:
            self.error = _as_info(_error_answers.decode(body).error, f"HTTP {status}")
        except msgspec.MsgspecError:
            self.broken = f"HTTP {status} without an error object: {body[:80]!r}"


def _as_info(body: _ErrorBody, where: str) -> ErrorInfo:
    code = None if body.code is None else str(body.code)
    return ErrorInfo(kind=where, message=body.message, param=body.param, code=code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The outcome of the comparison.

    `violations` is empty if every token came exactly once, except those of requests that ended with an error.
    """

    num_requests: int
    num_tokens: int
    num_errors: int  # requests that ended with an error that was reported; this is not a violation
    violations: list[str]


def audit(requests: Sequence[BenchRequest], accounts: Sequence[StreamAccount]) -> Audit:
    """Compare the requests with their accounts. It is a violation if a request has not exactly one."""
    booked = Counter(account.index for account in accounts)
    violations = [
        f"request {request.index}: {booked[request.index]} answers"
        for request in requests
        if booked[request.index] != 1
    ]
    by_index = {account.index: account for account in accounts}
    for request in requests:
        account = by_index.get(request.index)
        if account is not None:
            violations += [f"request {request.index}: {fault}" for fault in faults(request, account)]
    violations += _shared_streams(accounts)
    return Audit(
        num_requests=len(requests),
        num_tokens=sum(len(account.token_ids) for account in accounts),
        num_errors=sum(account.error is not None for account in accounts),
        violations=violations,
    )


def faults(request: BenchRequest, account: StreamAccount) -> list[str]:
    """Return what is wrong with one stream, as short sentences; an empty list if nothing is."""
    if account.broken:
        return [account.broken]
    if account.error is not None:
        return ["an error event is followed by [DONE]"] if account.dones else []
    problems = _ending_faults(account)
    came, wanted = len(account.token_ids), request.output_len
    if came != wanted:
        word = "lost" if came < wanted else "too many"
        problems.append(f"{abs(wanted - came)} tokens {word}: positions up to {came - 1}, expected {wanted}")
    if account.prompt_echo is not None and account.prompt_echo != request.prompt_token_ids:
        problems.append("the server returned other token ids for the prompt")
    return problems + _usage_faults(request, account)


def _ending_faults(account: StreamAccount) -> list[str]:
    problems = []
    if account.finish_reasons != ["length"]:
        problems.append(f"finish reasons {account.finish_reasons}, expected one: length")
    if account.dones != 1:
        problems.append(f"{account.dones} [DONE] events, expected one")
    if account.after_done:
        problems.append(f"{account.after_done} events after [DONE]")
    if len(account.stream_ids) > 1:
        problems.append(f"chunks of {len(account.stream_ids)} streams in one answer")
    return problems


def _usage_faults(request: BenchRequest, account: StreamAccount) -> list[str]:
    if account.usage is None:
        return ["no usage"]
    expected = (len(request.prompt_token_ids), len(account.token_ids))
    usage = (account.usage.prompt_tokens, account.usage.completion_tokens)
    return [] if usage == expected else [f"usage says {usage} prompt and output tokens, counted {expected}"]


def _shared_streams(accounts: Sequence[StreamAccount]) -> list[str]:
    """Return a sentence for each stream id that answers two requests."""
    owner: dict[str, int] = {}
    problems = []
    for account in accounts:
        for stream_id in account.stream_ids:
            other = owner.setdefault(stream_id, account.index)
            if other != account.index:
                problems.append(
                    f"requests {other} and {account.index} got the same stream {stream_id[:60]!r}"
                )
    return problems
