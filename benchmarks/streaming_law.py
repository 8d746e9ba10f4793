"""One stream over stages that sleep: does speculation that streams through the pipe keep its law?

    python benchmarks/streaming_law.py [--stages 2,4,8,20] [--chances 0.5,0.7,0.8,0.9,0.95] [--sleep-ms 40]

    tokens/s = (R + 1) / ((R + D) tau),  R = a / (1 - a),  D = trip / tau

Core, scheduler, ranks and links are the real ones, as threads of this process; the layers of each stage sleep
in place of computing. A drafter that knows the text guesses each token right with chance a. Three kinds:

    token    a stage sleeps for each token of a step, so that windows of one token are best: the law's case
    window   it sleeps for each step, whatever its tokens: a step that waits for memory
    wires    four stages as in "window", 22 ms from each to the next and back, and the suffix drafter on the
             texts of `speculation_texts.py`

The text is repeated in turns with and without speculation; it must be the same. As many guesses are wrong as
the drafter's dice say, so that the law is shown for these too. Tau is what a stage takes for a plain step,
its own work beside the sleep included: it follows from plain decoding. All stages are threads of one Python,
so that the sleep must be long beside that work, times the stages. Prints Markdown for docs/perf-log.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from delayed_links import running
from knowing_drafter import KnowingDrafter
from peers.checkpoint import TINY_SHAPE, make_checkpoint
from peers.report import markdown
from sleeping_rank import let_layers_sleep
from speculation_texts import TEXTS, Script, ids_of, scripted

from penstock.config.engine import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from penstock.config.speculation import SpeculationConfig
from penstock.engine.core.core import EngineCore
from penstock.request import GenerationRequest, SamplingParams
from penstock.trace.chrome import chrome_trace

PROMPT = [5, 6, 7]
WIRE_S, WIRED_STAGES, MOST_IN_FLIGHT = 0.022, 4, 24


class Sleep:
    """How long the layers of a stage sleep.

    Attributes:
        seconds: of a step, or of a token.
        per_token: which of the two.
    """

    seconds = 0.0
    per_token = False

    @classmethod
    def of_step(cls, num_tokens: int) -> float:
        """Seconds of a step with so many tokens."""
        return cls.seconds * (num_tokens if cls.per_token else 1)


@contextmanager
def engine(model: Path, stages: int, method: str, wire_s: float = 0.0) -> Iterator[EngineCore]:
    """An engine in this process; its ranks end with the block."""
    most = 4 if Sleep.per_token else 12
    config = EngineConfig(
        model=ModelConfig(model=str(model), max_model_len=1024),
        parallel=ParallelConfig(
            pipeline_parallel_size=stages,
            backend="inprocess",
            partition="even",
            threads_per_rank=1,
            async_depth=0,
            max_plans_in_flight=MOST_IN_FLIGHT if wire_s else "auto",
        ),
        # Small steps, so that the first measurements are soon over.
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=most, prefill_chunk=most),
        cache=CacheConfig(enable_prefix_caching=False, num_blocks=64),
        speculation=SpeculationConfig(speculative_method=method),  # type: ignore[arg-type]
    )
    with running(config, wire_s, num_links=stages - 1 if wire_s else 0) as core:
        yield core


def generate(
    core: EngineCore, name: str, num_tokens: int, prompt: Sequence[int] = PROMPT
) -> tuple[list[int], float]:
    """Return the text, and tokens a second behind the first."""
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=num_tokens, ignore_eos=True)
    core.add_request(GenerationRequest(request_id=name, prompt_token_ids=list(prompt), sampling=sampling))
    tokens: list[int] = []
    began, num_before = 0.0, 0
    while len(tokens) < num_tokens:
        for update in core.step(timeout_s=0.5):
            assert update.error is None, update.error
            tokens += update.token_ids
        if not num_before and tokens:
            began, num_before = time.monotonic(), len(tokens)
    return tokens, (num_tokens - num_before) / (time.monotonic() - began)


def save_trace(core: EngineCore, path: Path) -> None:
    """What the stages did lately, for `trace_picture.py`; they report once a second."""
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        core.step(timeout_s=0.5)
    path.write_text(json.dumps(chrome_trace(core.spans())))


def law(num_tokens: int, num_wrong: float, depth: float, tau: float) -> float:
    """Tokens/s if so many guesses are wrong: a wrong one costs a trip, a right one a beat."""
    return num_tokens / ((num_tokens - num_wrong + num_wrong * depth) * tau)


class Bench:
    """All cases of one number of stages."""

    def __init__(
        self, options: argparse.Namespace, model: Path, stages: int, drafter: KnowingDrafter
    ) -> None:
        self._options, self._model, self._stages, self._drafter = options, model, stages, drafter

    def rows(self, kind: str) -> Iterator[list[str]]:
        """Lines of the table; both engines live at once and take turns."""
        options = self._options
        tau = options.sleep_ms / 1000
        Sleep.seconds, Sleep.per_token = 0.0, kind == "token"
        with ExitStack() as stack:
            plain = stack.enter_context(engine(self._model, self._stages, "off"))
            Sleep.seconds = tau  # while costs are measured
            drafting = stack.enter_context(engine(self._model, self._stages, "suffix"))
            Sleep.seconds = 0.0
            text, _ = generate(plain, "text", options.tokens)
            self._drafter.texts = {PROMPT[0]: [*PROMPT, *text]}
            Sleep.seconds = tau
            for chance in options.chances:
                self._drafter.chance = chance
                yield self._measured(plain, drafting, kind, chance)
            if options.trace:
                save_trace(drafting, options.trace)

    def _measured(self, plain: EngineCore, drafting: EngineCore, kind: str, chance: float) -> list[str]:
        options, rates, plain_rates, counts = self._options, [], [], []
        for number in range(options.rounds):
            self._drafter.seed = number
            name = f"{kind}-{chance}-{number}"
            plain_rates.append(generate(plain, name, options.plain_tokens)[1])
            before = drafting.stats().scheduler.speculation
            tokens, rate = generate(drafting, name, options.tokens)
            assert tokens == self._drafter.texts[PROMPT[0]][len(PROMPT) :], "speculation has changed tokens"
            after = drafting.stats().scheduler.speculation
            wrong = after.num_drafted - before.num_drafted - (after.num_accepted - before.num_accepted) + 1
            rates.append(rate)
            counts.append(wrong)
        tau, depth = 1.0 / statistics.median(plain_rates) / self._stages, self._stages
        of_law = [
            rate / law(options.tokens - 1, wrong, depth, tau)
            for rate, wrong in zip(rates, counts, strict=True)
        ]
        right = chance / (1.0 - chance)
        nominal = (right + 1.0) / ((right + depth) * tau)
        rate, plain_rate = statistics.median(rates), statistics.median(plain_rates)
        return [
            kind,
            str(self._stages),
            f"{1000 * tau:.1f} ms",
            f"{chance:g}",
            f"{plain_rate:.2f}",
            f"{rate:.2f}",
            f"{rate / plain_rate:.2f}",
            f"{rate / nominal:.2f}",
            f"{statistics.median(of_law):.2f}",
        ]


def wired(options: argparse.Namespace, model: Path) -> Iterator[list[str]]:
    """Lines of the table of stages with wires between them."""
    Sleep.seconds, Sleep.per_token = options.sleep_ms / 1000, False
    with scripted(), ExitStack() as stack:
        engines = [
            stack.enter_context(engine(model, WIRED_STAGES, method, WIRE_S)) for method in ("off", "suffix")
        ]
        for name, (prompt, answer) in TEXTS.items():
            prompt_ids, Script.ids = (ids_of(text, TINY_SHAPE["vocab_size"]) for text in (prompt, answer))
            lengths, rates = (options.plain_tokens, len(Script.ids)), []
            for number in range(options.rounds):
                found = [
                    generate(core, f"{name} {number}", length, prompt_ids)
                    for core, length in zip(engines, lengths, strict=True)
                ]
                assert found[1][0] == list(Script.ids), "speculation has changed tokens"
                rates.append([rate for _, rate in found])
            plain, drafting = (statistics.median(of_round[index] for of_round in rates) for index in (0, 1))
            yield [
                name,
                f"{len(prompt_ids)} + {lengths[1]}",
                f"{plain:.2f}",
                f"{drafting:.2f}",
                f"{drafting / plain:.2f}",
            ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default="token,window,wires", help="which of the three")
    parser.add_argument("--stages", default="2,4,8,20")
    parser.add_argument("--chances", default="0.5,0.7,0.8,0.9,0.95")
    parser.add_argument("--sleep-ms", type=float, default=40.0)
    parser.add_argument("--tokens", type=int, default=240)
    parser.add_argument("--plain-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace", type=Path, help="save one of the drafting engine there")
    options = parser.parse_args()
    options.chances = [float(chance) for chance in options.chances.split(",")]
    stages = [int(count) for count in options.stages.split(",")]
    let_layers_sleep(Sleep.of_step)
    kinds, drafter = set(options.kinds.split(",")), KnowingDrafter(TINY_SHAPE["vocab_size"])
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        models = {}
        for count in {*stages, WIRED_STAGES}:
            models[count] = Path(folder) / f"{count}"
            make_checkpoint(models[count], TINY_SHAPE | {"num_hidden_layers": count})
        with drafter.in_place_of_suffixes():
            for kind, count in itertools.product(sorted(kinds - {"wires"}), stages):
                rows += Bench(options, models[count], count, drafter).rows(kind)
        wired_rows = list(wired(options, models[WIRED_STAGES])) if "wires" in kinds else []
    header = [
        "kind",
        "stages",
        "tau",
        "a",
        "plain, tokens/s",
        "drafting",
        "gain",
        "of the law",
        "of these dice",
    ]
    print(markdown(header, rows))
    print(markdown(["text", "tokens", "plain, tokens/s", "suffix", "gain"], wired_rows))


if __name__ == "__main__":
    main()
