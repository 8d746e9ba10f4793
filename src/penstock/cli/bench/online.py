"""`penstock bench serve`: sends a load to a running server and checks that every token comes exactly once.

Called by `cli.program`. `cli.bench.replaying` sends the requests at their times, each through `Sender`, which
speaks HTTP. The exit code is 0 if the ledger has no violations and no request failed, else 1. With
`--allow-errors`, requests that the server refuses with an error object do not count as failed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from penstock.cli.bench.http_stream import EventParser, Target, post_stream
from penstock.cli.bench.ledger import StreamAccount
from penstock.cli.bench.load_shape import DatasetName, LoadShape, trace_path, whole_numbers
from penstock.cli.bench.observed_server import observed_server
from penstock.cli.bench.replaying import replay
from penstock.cli.bench.report_flags import ReportFlags
from penstock.cli.bench.results import as_json, error_lines, ledger_lines, table, write_json
from penstock.cli.client_tls import CA_FILE_HELP
from penstock.cli.flags import SERVED_ENV, flag
from penstock.cli.http_client import ServedModelCard, first_key, served_model, wait_ready
from penstock.cli.terminal import Invocation, printable
from penstock.config.checks import above_zero
from penstock.errors import PeerError, UsageError
from penstock.workloads.requests import BenchRequest, at_rate, check_fits, synthetic

COMPLETIONS = "/v1/completions"
_EVENT_STREAM = "text/event-stream"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """Which server, and how it is asked."""

    base_url: Annotated[str, flag("server to measure", "--base-url", "--url", group="target")] = (
        "http://127.0.0.1:8000"
    )
    model: Annotated[
        str | None, flag("name of the served model", "--model", group="target", env=SERVED_ENV)
    ] = None
    api_key: Annotated[str, flag("prefer the environment name", "--api-key", group="target")] = ""
    ca_file: Annotated[Path | None, flag(CA_FILE_HELP, "--ca-file", group="target")] = None
    vocab_size: Annotated[
        int | None, flag("random prompts use token ids below this", "--vocab-size", group="target")
    ] = None
    temperature: Annotated[float, flag("sampling temperature", "--temperature", group="target")] = 0.0
    ready_check_timeout_sec: Annotated[
        float, flag("time for the server to get ready", "--ready-check-timeout-sec", group="target")
    ] = 60.0
    stall_seconds: Annotated[
        float, flag("longest silence of a stream", "--stall-seconds", group="target")
    ] = 300.0

    def require_times(self) -> None:
        """Raise `UsageError` for seconds that nobody can wait."""
        above_zero("--stall-seconds", self.stall_seconds)
        if not 0 <= self.ready_check_timeout_sec < math.inf:
            raise UsageError(
                f"--ready-check-timeout-sec is {self.ready_check_timeout_sec}; it must be at least 0.",
                param="--ready-check-timeout-sec",
            )


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings(LoadShape):
    """The requests that are sent, and their times."""

    dataset_name: Annotated[DatasetName, flag("kind of load", "--dataset-name", group="load")] = "random"
    dataset_path: Annotated[Path | None, flag("trace file of the load", "--dataset-path", group="load")] = (
        None
    )
    num_prompts: Annotated[int, flag("requests to send", "--num-prompts", group="load")] = 100
    random_input_len: Annotated[int, flag("tokens of a prompt", "--random-input-len", group="load")] = 128
    random_output_len: Annotated[int, flag("tokens to generate", "--random-output-len", group="load")] = 64
    random_range_ratio: Annotated[
        float, flag("relative spread of lengths", "--random-range-ratio", group="load")
    ] = 0.0
    request_rate: Annotated[
        float | None,
        flag("requests a second; unset: at once, or a trace's times", "--request-rate", group="load"),
    ] = None
    concurrency: Annotated[
        str | None, flag("runs with so many in flight each: 1,8,32", "--concurrency", group="load")
    ] = None
    seed: Annotated[int, flag("seed of prompts and arrivals", "--seed", group="load")] = 0

    @property
    def rate(self) -> float:
        """Return the requests a second; infinity if no rate is given."""
        return math.inf if self.request_rate is None else self.request_rate

    def levels(self) -> list[int | None]:
        """Return the most requests in flight of each run; None: no bound. Raises `UsageError`."""
        self.require_concurrency()
        if self.concurrency is None:
            return [self.max_concurrency]
        if self.max_concurrency is not None:
            raise UsageError(
                "--concurrency and --max-concurrency both set the requests in flight.",
                remedy="Give --concurrency for several runs, or --max-concurrency for one.",
                param="concurrency",
            )
        return list(whole_numbers(self.concurrency, "--concurrency"))

    def requests(self, vocab_size: int, run: int = 0) -> list[BenchRequest]:
        """Return all requests of one run. Raises `UsageError` if a flag or the trace file is bad.

        Args:
            vocab_size: random token ids are below this.
            run: number of the run. Each run has other prompts, so that no run finds its prompts in a cache.
        """
        if self.dataset_name == "random":
            return synthetic(
                num_prompts=self.num_prompts,
                input_len=self.random_input_len,
                output_len=self.random_output_len,
                range_ratio=self.random_range_ratio,
                request_rate=self.rate,
                burstiness=self.burstiness,
                vocab_size=vocab_size,
                seed=self.seed + run,
            )
        requests = self.of_trace(
            trace_path(self.dataset_name, self.dataset_path),
            self.num_prompts,
            self.dataset_name,
            vocab_size=vocab_size,
            seed=self.seed + run,
        )
        if self.request_rate is None:
            return requests
        return at_rate(requests, self.rate, self.burstiness, self.seed + run)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings(ReportFlags):
    """The use that is made of the numbers."""

    result_file: Annotated[
        Path | None, flag("file for all numbers, JSON", "--result-file", group="report")
    ] = None
    metric_percentiles: Annotated[
        tuple[float, ...], flag("percentiles in that file", "--metric-percentiles", group="report")
    ] = (99.0,)
    allow_errors: Annotated[
        bool, flag("accept requests refused with a typed error", "--allow-errors", group="report")
    ] = False
    predict_model: Annotated[
        str | None, flag("local copy of the model, for --predict", "--predict-model", group="report")
    ] = None

    def require_percentiles(self) -> None:
        """Raise `UsageError` for one that no list of numbers has."""
        for percent in self.metric_percentiles:
            if not 0 <= percent <= 100:
                raise UsageError(
                    f"--metric-percentiles has {percent:g}; each must be between 0 and 100.",
                    param="--metric-percentiles",
                    code="out_of_range",
                )


_TARGET, _LOAD, _REPORT = TargetSettings(), LoadSettings(), ReportSettings()


def bench_serve(
    *,
    target: TargetSettings = _TARGET,
    load: LoadSettings = _LOAD,
    report: ReportSettings = _REPORT,
    invocation: Annotated[Invocation, Parameter(parse=False)],
) -> int:
    """Run the command. Returns 0 when every token came exactly once and no request failed, else 1."""
    levels = load.levels()
    target.require_times()
    report.require_percentiles()
    if report.result_file is not None and len(levels) > 1:
        raise UsageError("--result-file holds one run.", remedy="Use --json or --html for several.")
    server = Target.parse(target.base_url, first_key(target.api_key), target.ca_file)
    wait_ready(server, target.ready_check_timeout_sec, time.monotonic, time.sleep)
    card = served_model(server, target.model)
    size = _vocab_size(target, card)
    loads = [load.requests(size, run) for run in range(len(levels))]
    if card.max_model_len is not None:
        for requests in loads:
            check_fits(requests, card.max_model_len)
    observed = observed_server(server, report, loads, levels, report.predict_model or card.id, invocation)
    sender = Sender(server, model=card.id, temperature=target.temperature, stall_s=target.stall_seconds)
    say = report.say(invocation)
    results = []
    for requests, level in zip(loads, levels, strict=True):
        pace = _describe(load) + ("" if level is None else f", {level} in flight")
        say(f"{len(requests)} requests to {card.id} at {server.url}: {pace}, seed {load.seed}")
        result = asyncio.run(observed.measured(replay(sender, requests, level), level))
        results.append(result)
        for line in (*table(result), *ledger_lines(result.audit), *error_lines(result.accounts)):
            say(printable(line))
    settings = _as_given(target, load, card)
    if report.result_file is not None:
        write_json(report.result_file, as_json(results[0], settings, report.metric_percentiles))
    if report.are_wanted:
        report.deliver(observed.report(card.id, settings), invocation)
    failed = any(result.audit.num_errors for result in results) and not report.allow_errors
    return 1 if failed or any(result.audit.violations for result in results) else 0


class Sender:
    """Sends requests to one server and writes the account of each answer. Holds no state between requests.

    Args:
        model: name of the served model.
        stall_s: most seconds of silence of an answer.
        clock: returns seconds; all times of accounts are by it.
    """

    def __init__(
        self,
        target: Target,
        *,
        model: str,
        temperature: float,
        stall_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self._target = target
        self._model = model
        self._temperature = temperature
        self._stall_s = stall_s

    def body(self, request: BenchRequest) -> bytes:
        """Return the JSON of one request: exact length, token ids in the answer, usage at the end."""
        return msgspec.json.encode(
            {
                "model": self._model,
                "prompt": request.prompt_token_ids,
                "max_tokens": request.output_len,
                "ignore_eos": True,
                "temperature": self._temperature,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
        )

    async def send(self, request: BenchRequest) -> StreamAccount:
        """Send one request, and return the account of the answer.

        A refusal, a lost connection or an answer that cannot be read goes into the account.
        """
        account = StreamAccount(index=request.index)
        events, refusal = EventParser(), bytearray()

        def on_body(status: int, piece: bytes) -> None:
            if status != 200:
                refusal.extend(piece)
                return
            for event in events.feed(piece):
                account.event(event, self.clock())

        body = self.body(request)
        account.started_s = self.clock()
        try:
            status = await post_stream(
                self._target,
                COMPLETIONS,
                body,
                on_body,
                stall_s=self._stall_s,
                headers={"Accept": _EVENT_STREAM, "X-Request-Id": f"bench-{request.index}"},
            )
            if status != 200:
                account.refused(status, bytes(refusal))
        except (PeerError, msgspec.MsgspecError) as error:
            if account.error is None:  # after an error event the server may cut the stream
                account.broken = str(error)
        account.ended_s = self.clock()
        return account


def _vocab_size(target: TargetSettings, card: ServedModelCard) -> int:
    size = target.vocab_size or card.vocab_size
    if size is None:
        raise UsageError(
            f"{target.base_url} does not report the vocabulary size of {card.id}.",
            remedy="Give --vocab-size: the number of token ids that prompts may use.",
        )
    if size < 1:
        raise UsageError(f"--vocab-size is {size}; it must be at least 1.", param="--vocab-size")
    return size


def _describe(load: LoadSettings) -> str:
    if load.dataset_name == "random":
        rate = "all at once" if math.isinf(load.rate) else f"{load.request_rate:g} a second"
        return f"random, {load.random_input_len} in, {load.random_output_len} out, {rate}"
    assert load.dataset_path is not None
    times = f"times x {load.time_scale:g}" if load.request_rate is None else f"{load.request_rate:g} a second"
    return f"{load.dataset_path.name}, lengths / {load.length_scale:g}, {times}"


def _as_given(target: TargetSettings, load: LoadSettings, card: ServedModelCard) -> dict[str, Any]:
    """Return the settings of the run under vLLM's key names, without the API key and without prompts."""
    trace = {"length_scale": load.length_scale, "time_scale": load.time_scale}
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": "penstock",
        "endpoint_type": "openai",
        "model_id": card.id,
        "tokenizer_id": card.id,
        "dataset_name": load.dataset_name,
        "num_prompts": load.num_prompts,
        "request_rate": "inf" if math.isinf(load.rate) else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "seed": load.seed,
        "temperature": target.temperature,
    } | ({} if load.dataset_name == "random" else trace)
