"""Seeded chaos: a server under mixed load in which something is always being broken, and a ledger of tokens.

    python tests/support/chaos.py --seed 7 --minutes 30

Clients ask without end for completions whose ids are known, streamed and whole; some leave early, some
send what is no request. Meanwhile children are killed, stopped and frozen for a moment, and floods of
requests come. What is done to whom, and who asks what, are functions of the seed. When it happens counts
in tokens that have come and not in seconds, so that a seed means the same on a slow machine, up to the
order in which processes run.

Every attempt goes into the `Ledger`: its ids must be the beginning of what is known, and all of it if it
ended well; whatever else it ends with must be what a client can understand. Afterwards everything must be
as at first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from served import Served, named_leftovers, title_of, wait_until

NUM_CLIENTS, NUM_ROWS = 6, 8
MAX_TOKENS = 240
FOREVER = math.inf
PATIENCE_S = 120.0  # of a client: what takes longer hangs
PROMPTS: list[Any] = ["Once upon a time", "ROMEO:", [5, 6, 7], "The king", [9] * 70, "What is"]
BAD_BODIES: list[bytes] = [
    b"",
    b"[]",
    b"{",
    b'{"model": "demo"}',
    b'{"model": "demo", "prompt": []}',
    b'{"model": "demo", "prompt": [99999999]}',
    b'{"model": "demo", "prompt": "x", "max_tokens": -2}',
    b'{"model": "demo", "prompt": "x", "temperature": 1e400}',
    b'{"model": "none", "prompt": "x"}',
    b'{"model": "demo", "prompt": "\\ud800"}',
    b"[" * 5000,
    b'{"model": "demo", "prompt": "' + b"x" * 100_000 + b'"}',
]
# What may become of a request: all is there; the client left; an error in words; 429 or 503; the connection
# broke. What is no request must be "rejected", unless all are refused.
FAIR = ("complete", "left", "error", "refused", "cut")
# In words that end a request which had been admitted: it was there at two losses; nobody came in a minute.
FAIR_CODES = ("quarantined", "stage_lost", "unavailable")
CHILDREN = ("penstock stage 0 tp 0", "penstock stage 1 tp 0", "penstock core", "penstock api")
BLOWS = ("kill", "stop", "freeze", "flood")
WEIGHTS = (8, 2, 3, 3)


@dataclass(frozen=True, slots=True)
class Blow:
    """One thing that is broken.

    Attributes:
        child: whom it hits; None for a flood.
        after: tokens that come between the blow before and this one; 0 hits what is not mended yet.
        size: requests of a flood, or milliseconds of a freeze.
    """

    kind: str
    child: str | None
    after: int
    size: int


def blows(seed: int) -> Iterator[Blow]:
    """Without end."""
    chosen = random.Random(f"blows {seed}")
    while True:
        (kind,) = chosen.choices(BLOWS, WEIGHTS)
        child = None if kind == "flood" else chosen.choice(CHILDREN)
        after = chosen.choice((0, 40, 300, 800, 1500))
        yield Blow(
            kind, child, after, chosen.randrange(20, 120) if kind == "flood" else chosen.randrange(900)
        )


@dataclass(slots=True)
class Attempt:
    """What one client asked, and what it got.

    Attributes:
        outcome: one of `FAIR`, or what is a fault of the server.
    """

    request: dict[str, Any]
    ids: list[int] = field(default_factory=list)
    outcome: str = "hangs"
    detail: str = ""


class Ledger:
    """All attempts, and what is known of each request."""

    def __init__(self) -> None:
        self.golden: dict[str, list[int]] = {}
        self.outcomes: Counter[str] = Counter()
        self.details: Counter[str] = Counter()
        self.faults: list[str] = []
        self.num_tokens = 0

    def close(self, attempt: Attempt, fair: Sequence[str] = FAIR) -> None:
        """Judge an attempt that has ended."""
        self.outcomes[attempt.outcome] += 1
        if attempt.detail:
            self.details[attempt.detail[:80]] += 1
        known = self.golden[key_of(attempt.request)][: attempt.request["max_tokens"]]
        if attempt.ids != known[: len(attempt.ids)]:
            self._fault(attempt, "has wrong ids")
        elif attempt.outcome == "complete" and len(attempt.ids) < len(known):
            self._fault(attempt, "was cut silently")
        elif attempt.outcome not in fair:
            self._fault(attempt, attempt.outcome)

    def _fault(self, attempt: Attempt, what: str) -> None:
        self.faults.append(f"{what}: {attempt.request} after {len(attempt.ids)} ids; {attempt.detail}")


def key_of(request: dict[str, Any]) -> str:
    """What its ids depend on."""
    return json.dumps([request["prompt"], request["temperature"], request.get("seed")])


def random_request(chosen: random.Random) -> dict[str, Any]:
    seeded = chosen.random() < 0.4
    sampling = {"temperature": 1.0, "seed": chosen.randrange(3)} if seeded else {"temperature": 0}
    return {
        "model": "demo",
        "prompt": chosen.choice(PROMPTS),
        "max_tokens": chosen.choice((1, 8, 60, MAX_TOKENS)),
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": chosen.random() < 0.8,
        **sampling,
    }


def all_requests() -> Iterator[dict[str, Any]]:
    """One for each `key_of`, as long as can be."""
    samplings: list[dict[str, Any]] = [{"temperature": 0}]
    samplings += [{"temperature": 1.0, "seed": seed} for seed in range(3)]
    for prompt in PROMPTS:
        for sampling in samplings:
            yield {
                "model": "demo",
                "prompt": prompt,
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": False,
                **sampling,
            }


class Chaos:
    """One run against a server that is up.

    Args:
        seconds: how long blows go on.
    """

    def __init__(self, served: Served, seed: int, seconds: float) -> None:
        self.ledger = Ledger()
        self.done: Counter[str] = Counter()  # blows by kind and child
        self._served = served
        self._seed = seed
        self._seconds = seconds
        self._is_over = False

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self._served.url, timeout=httpx.Timeout(PATIENCE_S), limits=limits
        ) as http:
            await self._learn(http)
            clients = [asyncio.create_task(self._client(http, number)) for number in range(NUM_CLIENTS)]
            try:
                await self._strike(http)
            finally:
                self._is_over = True
                await asyncio.gather(*clients)

    async def _learn(self, http: httpx.AsyncClient) -> None:
        for request in all_requests():
            answer = await http.post("/v1/completions", json=request)
            self.ledger.golden[key_of(request)] = answer.json()["choices"][0]["token_ids"]

    async def _strike(self, http: httpx.AsyncClient) -> None:
        deadline = time.monotonic() + self._seconds
        floods: list[asyncio.Task[None]] = []
        for blow in blows(self._seed):
            due = self.ledger.num_tokens + blow.after
            if not await self._reach(due, deadline):
                break
            if blow.child is None:
                floods.append(asyncio.create_task(self._flood(http, blow)))
                self.done["flood"] += 1
            else:
                await self._hit(blow, blow.child)
        await asyncio.gather(*floods)

    async def _reach(self, num_tokens: int, deadline: float) -> bool:
        """Wait until so many tokens have come; False when time is over."""
        while time.monotonic() < deadline:
            if self.ledger.num_tokens >= num_tokens:
                return True
            await asyncio.sleep(0.01)
        return False

    async def _hit(self, blow: Blow, child: str) -> None:
        victims = [process for process in self._served.family() if title_of(process) == child]
        if not victims:
            return  # it is being started
        self.done[f"{blow.kind} {child.removeprefix('penstock ')}"] += 1
        try:
            if blow.kind == "kill":
                victims[0].kill()
            else:
                victims[0].send_signal(signal.SIGSTOP)
            if blow.kind == "freeze":
                await asyncio.sleep(blow.size / 1000)
                victims[0].send_signal(signal.SIGCONT)
        except psutil.NoSuchProcess:
            pass

    async def _flood(self, http: httpx.AsyncClient, blow: Blow) -> None:
        chosen = random.Random(f"flood {self._seed} {blow}")
        requests = [random_request(chosen) | {"max_tokens": 8} for _ in range(blow.size)]
        await asyncio.gather(*(self._attempt(http, request, FOREVER) for request in requests))

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        chosen = random.Random(f"client {self._seed} {number}")
        while not self._is_over:
            if chosen.random() < 0.1:
                await self._offend(http, chosen.choice(BAD_BODIES))
                continue
            leaves_after = chosen.randrange(40) if chosen.random() < 0.15 else FOREVER
            if await self._attempt(http, random_request(chosen), leaves_after):
                await asyncio.sleep(0.05)  # it was refused, and tries again later

    async def _offend(self, http: httpx.AsyncClient, body: bytes) -> None:
        attempt = Attempt(request=next(all_requests()))
        try:
            headers = {"content-type": "application/json"}
            answer = await http.post("/v1/completions", content=body, headers=headers)
            self._judge_refusal(attempt, answer.status_code, answer.headers, answer.content)
        except httpx.TransportError as error:
            attempt.outcome = "cut"
            attempt.detail = type(error).__name__
        self.ledger.close(attempt, ("rejected", "refused", "cut"))

    async def _attempt(self, http: httpx.AsyncClient, request: dict[str, Any], leaves_after: float) -> bool:
        """Whether it was refused, or cut."""
        attempt = Attempt(request)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._ask(http, attempt, leaves_after)
        except TimeoutError:
            attempt.outcome = "hangs"
        except httpx.TransportError as error:
            attempt.outcome, attempt.detail = "cut", type(error).__name__
        self.ledger.close(attempt)
        return attempt.outcome in ("refused", "cut")

    async def _ask(self, http: httpx.AsyncClient, attempt: Attempt, leaves_after: float) -> None:
        async with http.stream("POST", "/v1/completions", json=attempt.request) as answer:
            if answer.status_code != 200:
                content = await answer.aread()
                self._judge_refusal(attempt, answer.status_code, answer.headers, content)
            elif attempt.request["stream"]:
                await self._read_stream(attempt, answer, leaves_after)
            else:
                (choice,) = json.loads(await answer.aread())["choices"]
                self._take(attempt, choice)
                attempt.outcome = "complete" if choice["finish_reason"] == "length" else "odd end"

    async def _read_stream(self, attempt: Attempt, answer: httpx.Response, leaves_after: float) -> None:
        finishes = 0
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                attempt.outcome = "complete" if finishes == 1 else f"{finishes} ends"
                continue
            event = json.loads(line[6:])
            if "error" in event:
                attempt.detail = _code(event["error"])
                attempt.outcome = "error" if attempt.detail in FAIR_CODES else "wrong error"
                continue
            for choice in event["choices"]:
                finishes += choice["finish_reason"] is not None
                self._take(attempt, choice)
            if len(attempt.ids) > leaves_after:
                attempt.outcome = "left"
                return
        if attempt.outcome == "hangs":
            attempt.outcome = "ended without a word"

    def _take(self, attempt: Attempt, choice: dict[str, Any]) -> None:
        ids = choice.get("token_ids") or []
        attempt.ids += ids
        self.ledger.num_tokens += len(ids)

    def _judge_refusal(self, attempt: Attempt, status: int, headers: httpx.Headers, content: bytes) -> None:
        error = json.loads(content)["error"]
        attempt.detail = f"{status} {_code(error)}"
        if status in (429, 503):
            attempt.outcome = "refused" if "retry-after" in headers else "refused without Retry-After"
        elif status >= 500:
            attempt.outcome = "error" if error["code"] in FAIR_CODES else "wrong error"
        else:
            attempt.outcome = "rejected"


def _code(error: dict[str, Any]) -> str:
    assert error["message"], error
    return str(error.get("code") or error["type"])


def remains(served: Served) -> dict[str, Any]:
    """What must be the same before and after."""
    family = {title_of(process): process for process in served.family()}
    supervisor = psutil.Process(served.process.pid)
    return {
        "children": sorted(title for title in family if title.startswith("penstock ")),
        "supervisor's descriptors": supervisor.num_fds(),
        "supervisor's threads": supervisor.num_threads(),
        "names": sorted(map(str, named_leftovers())),
    }


def is_idle(served: Served) -> bool:
    """Ready, and no request has a row or blocks."""
    try:
        served.get("/health")
        gauges = (
            "penstock_num_requests_running",
            "penstock_num_requests_waiting",
            "penstock_kv_cache_usage_perc",
        )
        return all(served.metric(name) == 0 for name in gauges)
    except (OSError, AssertionError):
        return False


def memory(served: Served) -> int:
    """Bytes of all processes together, shared ones counted once."""
    return sum(process.memory_full_info().pss for process in served.family())


def run(seed: int, seconds: float) -> Chaos:
    """One whole run; raises `AssertionError` when anything is not as it must be."""
    flags = ("--threads-per-rank", "1", "--dtype", "float32", "--heartbeat-limit", "2")
    bounds = ("--max-num-seqs", str(NUM_ROWS), "--max-waiting-requests", "24")
    with Served("demo", "--pp", "2", *flags, *bounds) as served:
        warm = Chaos(served, seed=-1, seconds=1.0)  # what is made once is made
        asyncio.run(warm.run())
        wait_until(lambda: is_idle(served), 60)
        before, used, told = remains(served), memory(served), len(served.output)
        chaos = Chaos(served, seed, seconds)
        try:
            asyncio.run(chaos.run())
            wait_until(lambda: is_idle(served), 180)
        except BaseException:
            print(served.output[-4000:])
            raise
        finally:
            print(f"seed {seed}: {dict(chaos.done)}")
            print(f"{dict(chaos.ledger.outcomes)}, {dict(chaos.ledger.details)}")
        after = memory(served)
        print(f"{chaos.ledger.num_tokens} tokens; {used / 1e6:.0f} MB before, {after / 1e6:.0f} MB after")
        assert not chaos.ledger.faults, chaos.ledger.faults[:5]
        stops = sum(count for blow, count in chaos.done.items() if blow.startswith("stop"))
        if served.output[told:].count("has given no sign of life") > stops:
            raise AssertionError("a child stood still by itself:\n" + served.output[told:])
        hits = sum(count for blow, count in chaos.done.items() if blow.startswith(("kill", "stop")))
        assert chaos.ledger.outcomes["error"] <= hits * NUM_ROWS / 2, "only who was there at two losses"
        try:
            wait_until(lambda: remains(served) == before, 30)
        except AssertionError:
            now = remains(served)
            changed = {name: (before[name], now[name]) for name in before if now[name] != before[name]}
            assert not changed, changed
        assert after < 1.25 * used, (used, after)
        assert served.stop() == 0
    return chaos


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=2.0)
    options = parser.parse_args()
    run(options.seed, 60 * options.minutes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
