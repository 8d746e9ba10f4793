"""What every engine script of `cpu_peers.py` speaks, and the prompts that all engines are given.

A script is started once, with the checkpoint, the threads and the largest request it will see as arguments.
It loads, writes `{"ready": true, "versions": {...}, "notes": [...]}`, and then answers each JSON line of
standard input with one JSON line, until the input ends:

    {"batch": 8, "input": 128, "output": 16, "seed": 3}  ->  {"seconds": 0.512}     (or {"error": "..."})

The clock runs from token ids to token ids: `batch` fresh prompts of `input` random ids start together, and
each gets exactly `output` greedy ids. An engine that can only be run as a program of its own returns the
seconds that the program has printed. Whatever libraries print on standard output goes to standard error.
Needs nothing but the standard library, as each engine has a Python environment of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, TextIO

FIRST_ID = 10  # ids below are left to special tokens
_PR_SET_PDEATHSIG = 1

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the driver tells an engine before it loads."""

    model: Path  # directory of the checkpoint
    threads: int
    max_batch: int  # sequences of the largest request
    max_len: int  # tokens of the longest sequence, prompt and output
    stages: int = 1  # of a pipeline
    ranks: int = 1  # that share a stage, with `threads` each
    partition: str = "even"  # layers per stage, for engines that can be told
    weights: str = ""  # form of the weights, such as int8; empty: as the checkpoint has them
    chunk: int = 0  # prompt tokens of one step at most; 0 leaves it to the engine
    programs: Path | None = None  # folder of the engine's, where it has no Python package
    guesses: int = 0  # that a step may check, from the text itself (n-grams, suffixes); 0: nobody guesses
    piece: int = 0  # tokens that a prompt repeats until it is long enough; 0: it repeats nothing
    rpc_servers: str = ""  # of the stages, where they are not to be started beside the engine

    def gguf_file(self, form: str = "") -> Path:
        """Where the GGUF file that is made of the checkpoint lies, and where llama.cpp's forms of it do."""
        return self.model / "gguf" / f"{f'llama-{form}' if form else 'model'}.gguf"


class Generator(Protocol):
    """An engine, loaded."""

    def generate(self, prompts: list[list[int]], num_tokens: int) -> float | None:
        """Give every prompt exactly `num_tokens` greedy tokens; all of them start together.

        Returns:
            The seconds, if the engine has counted them itself; None: the time from call to return counts.
        """

    def close(self) -> None:
        """End whatever the engine has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An engine, and what the report says about it."""

    generator: Generator
    packages: tuple[str, ...]  # whose versions are reported
    notes: tuple[str, ...] = ()  # settings, or what could not be had


def read_settings() -> Settings:
    """The arguments of an engine script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    for name in ("--threads", "--max-batch", "--max-len"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--stages", "--ranks"):
        parser.add_argument(name, type=int, default=1)
    parser.add_argument("--partition", default="even")
    parser.add_argument("--weights", default="")
    for name in ("--chunk", "--guesses", "--piece"):
        parser.add_argument(name, type=int, default=0)
    parser.add_argument("--programs", type=Path)
    parser.add_argument("--rpc-servers", default="")
    return Settings(**vars(parser.parse_args()))


def random_prompts(batch: int, length: int, vocab_size: int, seed: int, piece: int = 0) -> list[list[int]]:
    """[batch][length] ids; the same in every engine for the same seed. With a piece, so many come again and
    again."""
    source, num_fresh = random.Random(seed), min(piece, length) or length
    fresh = [[source.randrange(FIRST_ID, vocab_size) for _ in range(num_fresh)] for _ in range(batch)]
    return [(ids * -(-length // num_fresh))[:length] for ids in fresh]


def serve(load: Callable[[Settings], Loaded]) -> None:
    """Load an engine and time requests on it until the driver closes the input."""
    with claim_stdout() as answers:
        die_with_parent()
        settings = read_settings()
        loaded = load(settings)
        vocab_size = json.loads((settings.model / "config.json").read_text())["vocab_size"]

        def answer(request: Mapping[str, int]) -> Answer:
            prompts = random_prompts(
                request["batch"], request["input"], vocab_size, request["seed"], settings.piece
            )
            begin = time.perf_counter()
            counted = loaded.generator.generate(prompts, request["output"])
            return {"seconds": time.perf_counter() - begin if counted is None else counted}

        try:
            answer_lines(answers, answer, versions=installed(loaded.packages), notes=loaded.notes)
        finally:
            loaded.generator.close()


def answer_lines(
    answers: TextIO, answer: Callable[[Mapping[str, int]], Answer], **introduction: object
) -> None:
    """Say that the script is ready, and answer each line of standard input."""
    print(json.dumps({"ready": True, **introduction}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            result = answer(json.loads(line))
        except Exception as error:  # the driver reports it; another request may well succeed
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), file=answers, flush=True)


def claim_stdout() -> TextIO:
    """The real standard output, for answers only; what libraries print goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def die_with_parent() -> None:
    """Have the kernel kill this process, stopped or not, when the driver is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def installed(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
