"""What a synchronous program pays for its client of the core, with and without a thread for it.

    python benchmarks/offline_client.py --stages 1 --rounds 30

Clients are connected to one engine and generate the same short requests in turns, in an order that is drawn
anew in each round:

    polled    reads the socket in the thread that waits for the outputs, and makes the text there
    control   a second one of these: how far two equal clients differ
    thread    `llm.process_client`, which `LLM` uses: `AsyncEngine` on an event loop in a thread of its own,
              which makes the text too; the program's thread waits once, for all of it

It prints tokens/s and the CPU time of this process per request: the median of each client, and the median of
its ratios to `polled`, round by round, with a bootstrap interval of 95 %.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import Protocol
from unittest.mock import patch

from ratios import bootstrap

from penstock.config.engine import EngineConfig
from penstock.engine.client.live_requests import LiveRequests
from penstock.engine.client.outputs import output_assembler
from penstock.engine.client.seeds import Seeds
from penstock.engine.client.streams import OpenStreams
from penstock.engine.ipc import AbortRequests, AddRequest, ClientSocket, Hello, StepUpdates, Welcome
from penstock.engine.supervisor.reports import LogReporter, Reporter
from penstock.llm import process_client
from penstock.llm.arguments import engine_config, settled
from penstock.llm.engine_client import OfflineRequest, RequestResult
from penstock.llm.llm import LLM
from penstock.llm.process_client import ProcessClient
from penstock.llm.progress import ProgressDisplay
from penstock.llm.prompt_preparer import PromptPreparer
from penstock.llm.supervisor_process import SupervisorProcess
from penstock.request import GenerationRequest, SamplingParams

POLL_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=64, help="that run at once")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    engine = Engine(options.model, options.stages, options.sequences)
    try:
        with patch.object(process_client, "SupervisorProcess", engine.borrowed):
            thread = ProcessClient(engine.config, engine.plan, engine.text, LogReporter())
        clients: dict[str, Client] = {
            "polled": PolledClient(engine),
            "control": PolledClient(engine),
            "thread": thread,
        }
        figures = measure(clients, Work(engine.text, options.requests, options.tokens), options)
        for client in clients.values():
            client.close()
    finally:
        engine.close()
    for index, title in enumerate(("tokens/s", "CPU us per request")):
        print(f"{title:20} median   ratio to polled (95 % interval)")
        for name in clients:
            values = [both[index] for both in figures[name]]
            ratios = [value / base[index] for value, base in zip(values, figures["polled"], strict=True)]
            low, high = bootstrap(ratios, options.seed)
            print(
                f"  {name:18} {statistics.median(values):8.1f} {statistics.median(ratios):8.4f} "
                f"({low:.4f} to {high:.4f})"
            )


class Client(Protocol):
    """What is compared."""

    def run(self, requests: Sequence[OfflineRequest], progress: ProgressDisplay) -> list[RequestResult]:
        """Return the results of all requests."""
        ...

    def close(self) -> None:
        """Leave the engine."""
        ...


class Work:
    """Makes the requests of a turn: short prompts, seeds of their own, ended by their length."""

    def __init__(self, text: PromptPreparer, num_requests: int, num_tokens: int) -> None:
        self.num_requests, self.num_tokens = num_requests, num_requests * num_tokens
        self._text, self._max_tokens, self._num_turns = text, num_tokens, 0

    def requests(self) -> list[OfflineRequest]:
        """The same each time, but for their ids."""
        self._num_turns += 1
        return [self._request(number) for number in range(self.num_requests)]

    def _request(self, number: int) -> OfflineRequest:
        prompt = [1 + (7 * number + place) % 50 for place in range(8)]
        sampling = SamplingParams(temperature=1.0, seed=number, max_tokens=self._max_tokens, ignore_eos=True)
        request = GenerationRequest(
            request_id=f"{self._num_turns}-{number}", prompt_token_ids=prompt, sampling=sampling
        )
        tokenizer = self._text.tokenizer
        return OfflineRequest(request, lambda one: output_assembler(tokenizer, prompt, one.sampling))


class Engine:
    """Supervisor, core and ranks, for several clients."""

    def __init__(self, model: str, num_stages: int, num_sequences: int) -> None:
        given = dict(LLM.__init__.__kwdefaults__ or {})
        given |= {
            "model": model,
            "pipeline_parallel_size": num_stages,
            "max_num_seqs": num_sequences,
            "threads_per_rank": 1,
            "dtype": "float32",
            "enable_prefix_caching": False,
        }
        self.config, self.plan = settled(engine_config(given, "mp"))
        self.text = PromptPreparer.of(self.plan, self.config.model)
        self.supervisor = SupervisorProcess(self.config, LogReporter())
        try:
            self.address = self.supervisor.wait_until_ready()
        except BaseException:
            self.supervisor.end()
            raise

    def borrowed(self, _config: EngineConfig, _reporter: Reporter) -> BorrowedSupervisor:
        """In place of a supervisor of the client's own."""
        return BorrowedSupervisor(self)

    def close(self) -> None:
        self.supervisor.end()


class BorrowedSupervisor:
    """The supervisor of another: it does not end with the client that uses it."""

    def __init__(self, engine: Engine) -> None:
        self.address = engine.address
        self.fileno = engine.supervisor.fileno
        self.pass_on_news = engine.supervisor.pass_on_news
        self.has_ended = False

    def wait_until_ready(self) -> str:
        return self.address

    def end(self) -> None:
        pass


class PolledClient:
    """Does what a client of the core must while nothing is lost, in the thread of the caller."""

    def __init__(self, engine: Engine) -> None:
        self._supervisor = engine.supervisor
        self._socket = ClientSocket(engine.address)
        self._live = LiveRequests()
        self._socket.send(Hello())
        self._heard_at = time.monotonic()
        self._socket.wait(60.0)
        (welcome,) = [message for message in self._socket.drain() if isinstance(message, Welcome)]
        self._seeds = Seeds(welcome)

    def run(self, requests: Sequence[OfflineRequest], progress: ProgressDisplay) -> list[RequestResult]:
        streams = OpenStreams(self._abort)
        opened = [streams.open(one.request, one.make_assembler) for one in requests]
        for one in requests:
            request = self._seeds.given(one.request)
            self._live.add(request)
            self._socket.send(AddRequest(request))
        while len(streams):
            for message in self._poll():
                for update in message.updates:
                    self._live.note(update)
                for _ in streams.deliver(message.updates):
                    progress.advance()
        return [RequestResult.of([stream.result() for stream in own], own) for own in opened]

    def close(self) -> None:
        self._socket.close()

    def _poll(self) -> list[StepUpdates]:
        self._supervisor.pass_on_news()
        assert self._socket.wait(POLL_S) or time.monotonic() < self._heard_at + 60.0, "the core is silent"
        self._heard_at = time.monotonic()
        return [message for message in self._socket.drain() if isinstance(message, StepUpdates)]

    def _abort(self, request_id: str) -> None:
        self._socket.send(AbortRequests([request_id]))


def measure(
    clients: dict[str, Client], work: Work, options: argparse.Namespace
) -> dict[str, list[tuple[float, float]]]:
    """(tokens/s, CPU microseconds per request) of each round."""
    draw = random.Random(options.seed)
    texts = set()
    for client in clients.values():  # warm, and whether all say the same
        results = client.run(work.requests(), ProgressDisplay())
        texts.add(tuple(result.whole.text for result in results))
    assert len(texts) == 1, "clients disagree"
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in clients}
    for _ in range(options.rounds):
        for name in draw.sample(list(clients), len(clients)):
            requests = work.requests()
            cpu, began = time.process_time(), time.perf_counter()
            clients[name].run(requests, ProgressDisplay())
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            figures[name].append((work.num_tokens / seconds, cpu * 1e6 / work.num_requests))
    return figures


if __name__ == "__main__":
    main()
