"""Speculation on texts that people ask for: code that is edited, and answers that quote.

    python benchmarks/speculation_texts.py MODEL --stages 1,2 --rounds 5

MODEL has random weights (`cpu_peers.py --model` makes one), which say nothing sensible. So the last stage
computes all that it computes, and then takes the next token of a text that is given here: what a good model
would have said. Whatever guesses has to guess that. Words and signs are tokens.

An engine with and one without hold the model and say the same texts in turns; a third is without, too, and
says how far two equal engines differ. Stages are threads of this process. Prints Markdown for
docs/perf-log.md.
"""

from __future__ import annotations

import argparse
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

from peers.report import markdown
from ratios import against_off, in_turns
from speculation import drafts_of

from penstock import LLM, SamplingParams
from penstock.config.speculation import SpeculativeMethod
from penstock.kernels.candidates import HeadOutput
from penstock.sample.sampler import SampleOutput, Sampler
from penstock.sample.sampling_rows import SamplingBatch

CODE = '''
def read_measurements(path, separator):
    """Return the measurements of a file, by the name of the sensor."""
    measurements = {}
    with open(path) as lines:
        for number, line in enumerate(lines):
            if not line.strip() or line.startswith("#"):
                continue
            name, value = line.split(separator)
            try:
                measurements.setdefault(name, []).append(float(value))
            except ValueError:
                raise ValueError(f"line {number} of {path}: {value!r} is no number") from None
    return measurements


def mean_of(measurements, name):
    """Return the mean of what a sensor has measured; 0 if that is nothing."""
    values = measurements.get(name, [])
    return sum(values) / len(values) if values else 0.0


def report(measurements):
    """Print the mean of each sensor, the largest first."""
    means = {name: mean_of(measurements, name) for name in measurements}
    for name in sorted(means, key=means.get, reverse=True):
        print(f"{name:20} {means[name]:10.3f}")
'''
EDITED = (
    CODE.replace("def read_measurements(path, separator):", 'def read_measurements(path, separator=";"):')
    .replace("enumerate(lines)", "enumerate(lines, 1)")
    .replace(
        "return sum(values) / len(values) if values else 0.0", "return median(values) if values else 0.0"
    )
    .replace("def mean_of", "def median_of")
    .replace("mean_of(measurements, name) for", "median_of(measurements, name) for")
    .replace('"""Return the mean of what', '"""Return the median of what')
)
LETTER = """
The committee met on Tuesday and heard three reports. The first came from the harbour office, which said
that the new breakwater would be ready by the end of May, two months later than planned, since the stone had
been delivered late. The second came from the school board: the number of pupils had risen for the fourth
year in a row, and the old gymnasium could no longer be heated for less than it would cost to replace its
roof. The third report was about the library. Its hours had been cut in the autumn, and the number of
readers had fallen by a third; the librarian asked that the reading room be opened on Saturdays again, at
the cost of one assistant. The committee decided to wait with the gymnasium until the engineer had been
heard, to open the reading room from the first of March, and to write to the quarry about the stone.
"""
ANSWER = """
The letter gives three reasons for delay and expense. About the harbour it says: "the new breakwater would
be ready by the end of May, two months later than planned, since the stone had been delivered late." About
the school: "the number of pupils had risen for the fourth year in a row, and the old gymnasium could no
longer be heated for less than it would cost to replace its roof." About the library the writer is more
hopeful, for "the librarian asked that the reading room be opened on Saturdays again, at the cost of one
assistant." In the end "the committee decided to wait with the gymnasium until the engineer had been heard,
to open the reading room from the first of March, and to write to the quarry about the stone."
"""
EXCERPT = """
The letter says: "The second came from the school board: the number of pupils had risen for the fourth
year in a row, and the old gymnasium could no longer be heated for less than it would cost to replace its
roof. The third report was about the library. Its hours had been cut in the autumn, and the number of
readers had fallen by a third; the librarian asked that the reading room be opened on Saturdays again, at
the cost of one assistant." And of the decision: "The committee decided to wait with the gymnasium until the
engineer had been heard, to open the reading room from the first of March, and to write to the quarry about
the stone."
"""
TEXTS = {
    "code edit": ("Use medians in place of means, and give the separator a default.\n" + CODE, EDITED),
    "quotation": (LETTER + "\nWhat does it say of school and library? Word for word, please.\n", EXCERPT),
    "answer that quotes": (
        LETTER + "\nWhat has gone wrong, and what was decided? Quote the letter.\n",
        ANSWER,
    ),
}
VOCAB_SIZE = 151_000


def ids_of(text: str, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Words, numbers and signs as tokens, with the spaces before them."""
    pieces = re.findall(r" *\w+|\n *| *[^\w\s]", text)
    return [zlib.crc32(piece.encode()) % vocab_size for piece in pieces]


class Script:
    """In place of what was drawn: the next tokens of a text."""

    ids: Sequence[int] = ()

    @classmethod
    def put(cls, drawn: SampleOutput, output_index: Sequence[int]) -> SampleOutput:
        if not cls.ids:
            return drawn
        last = len(cls.ids) - 1
        return replace(drawn, token_ids=[cls.ids[min(place, last)] for place in output_index])


@contextmanager
def scripted() -> Iterator[None]:
    """Stages that sample within say `Script.ids`."""
    sample = Sampler.sample

    def say(
        self: Sampler, head: HeadOutput, params: SamplingBatch, output_index: Sequence[int]
    ) -> SampleOutput:
        return Script.put(sample(self, head, params, output_index), output_index)

    with mock.patch.object(Sampler, "sample", say):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--stages", default="1,2")
    parser.add_argument("--texts", default=",".join(TEXTS))
    parser.add_argument("--threads", type=int, default=2, help="of all stages together")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = []
    with scripted():
        for stages in map(int, options.stages.split(",")):
            rows += compared(options, stages)
    header = [
        "stages",
        "text",
        "tokens",
        "off, tokens/s",
        "suffix",
        "suffix/off",
        "control",
        "accepted/drafted",
    ]
    print(markdown(header, rows))


def compared(options: argparse.Namespace, stages: int) -> list[list[str]]:
    """A line for each text."""
    given = {
        "pipeline_parallel_size": stages,
        "threads_per_rank": max(1, options.threads // stages),
        "num_blocks": 200,
        "max_model_len": 2048,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "inprocess",
    }
    rows = []
    with ExitStack() as stack:
        methods: tuple[SpeculativeMethod, ...] = ("off", "suffix", "off")
        engines = [
            stack.enter_context(LLM(str(options.model), speculative_method=method, **given))
            for method in methods
        ]
        for name in options.texts.split(","):
            prompt, answer = TEXTS[name]
            prompt_ids, Script.ids = ids_of(prompt), ids_of(answer)
            sampling = SamplingParams(temperature=0.0, max_tokens=len(Script.ids), ignore_eos=True)

            def take(
                index: int, prompt_ids: list[int] = prompt_ids, sampling: SamplingParams = sampling
            ) -> float:
                times: list[float] = []
                for outputs in (SamplingParams(temperature=0.0, max_tokens=1), sampling):
                    began = time.perf_counter()
                    (found,) = engines[index].generate(
                        [{"prompt_token_ids": prompt_ids}], outputs, use_tqdm=False
                    )
                    times.append(time.perf_counter() - began)
                assert found.outputs[0].token_ids == list(Script.ids)
                return (len(Script.ids) - 1) / (times[1] - times[0])

            before = drafts_of(engines[1])
            rounds = in_turns(range(len(engines)), take, options.rounds, warm_up=1)
            told = [after - old for after, old in zip(drafts_of(engines[1]), before, strict=True)]
            rows.append(
                [
                    str(stages),
                    name,
                    f"{len(prompt_ids)} + {len(Script.ids)}",
                    *against_off(rounds),
                    f"{told[0]}/{told[1]}",
                ]
            )
    return rows


if __name__ == "__main__":
    main()
