"""ik_llama.cpp by its own programs. Started by `cpu_peers.py`; see `peer_protocol`.

It has no Python binding, so each request is a run of its program `llama-batched-bench`. The program loads
the model, repacks it for this CPU (-rtr), warms up, and prints the seconds of prompts and of output apart;
loading is not counted. As in `llama_peer`, sampling costs nothing there. Where guesses are wanted it is
`llama-lookup`, which guesses what followed the same n-gram before, as many tokens as it thinks right, and
chooses the likeliest token. The GGUF file is written as for `llama_peer`, and `llama-quantize` makes the
other forms of it. The programs run in the folder of that file, as they leave logs behind.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from gguf_writer import token_text, write_gguf
from peer_protocol import Loaded, Settings, serve

BATCH_TOKENS = 2048
MICRO_BATCH_TOKENS = 512
CELL_MULTIPLE = 256
LAST_GUESSES = 32  # no step of `llama-lookup` sends more
# |    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
ROW = re.compile(r"^\|" + r" *\d+ \|" * 4 + r" *([\d.]+) \| *\S+ \| *([\d.]+) \|", re.MULTILINE)
READ = re.compile(r"^encoded +\d+ tokens in +([\d.]+)", re.MULTILINE)
WRITTEN = re.compile(r"^decoded +(\d+) tokens in +([\d.]+)", re.MULTILINE)


class IkLlama:
    """Its programs over one file."""

    def __init__(self, settings: Settings, gguf: Path) -> None:
        self._gguf, self._threads = gguf.resolve(), settings.threads
        self._program = program(settings, "llama-batched-bench")

    def generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        batch, length = len(prompts), len(prompts[0])
        cells = batch * -(-(length + num_tokens) // CELL_MULTIPLE) * CELL_MULTIPLE
        sizes = {"-npl": batch, "-npp": length, "-ntg": num_tokens - 1, "-c": cells, "-t": self._threads}
        sizes |= {"-b": BATCH_TOKENS, "-ub": MICRO_BATCH_TOKENS}
        words = [str(word) for pair in sizes.items() for word in pair]
        command = [self._program, "-m", str(self._gguf), *words, "-rtr", "-fa", "on"]
        done = subprocess.run(command, cwd=self._gguf.parent, capture_output=True, text=True, check=False)
        row = ROW.search(done.stdout + done.stderr)
        if row is None:
            raise RuntimeError(f"llama-batched-bench printed no result: {done.stderr[-500:]}")
        return float(row[1]) + float(row[2])

    def close(self) -> None:
        """Nothing runs between requests."""


class IkLookup:
    """One prompt at a time, with guesses from its text."""

    def __init__(self, settings: Settings, gguf: Path) -> None:
        self._gguf, self._threads = gguf.resolve(), settings.threads
        self._program = program(settings, "llama-lookup")

    def generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        (prompt,) = prompts
        cells = -(-(len(prompt) + num_tokens + LAST_GUESSES) // CELL_MULTIPLE) * CELL_MULTIPLE
        sizes = {"-n": num_tokens, "-c": cells, "-t": self._threads, "--temp": 0}
        sizes |= {"-b": BATCH_TOKENS, "-ub": MICRO_BATCH_TOKENS}
        words = [str(word) for pair in sizes.items() for word in pair]
        words += ["-rtr", "-fa", "on", "--ignore-eos", "-p", "".join(map(token_text, prompt))]
        command = [self._program, "-m", str(self._gguf), *words]
        done = subprocess.run(command, cwd=self._gguf.parent, capture_output=True, text=True, check=False)
        printed = done.stdout + done.stderr
        read, written = READ.search(printed), WRITTEN.search(printed)
        if read is None or written is None:
            raise RuntimeError(f"llama-lookup printed no result: {done.stderr[-500:]}")
        # It ends some tokens late: by the guesses of its last step.
        return float(read[1]) + float(written[2]) * num_tokens / int(written[1])

    def close(self) -> None:
        """Nothing runs between requests."""


def program(settings: Settings, name: str) -> str:
    if settings.programs is None:
        raise SystemExit("ik_llama: --programs names the folder of its compiled programs")
    return str(settings.programs / name)


def quantized(settings: Settings, gguf: Path) -> Path:
    """Return the file in the form of the weights; make it if it is not there."""
    form = settings.weights
    target = gguf.with_name(f"{form}.gguf")
    if not target.exists():
        partial = target.with_suffix(".partial")
        command = [program(settings, "llama-quantize"), str(gguf), str(partial), form]
        subprocess.run(command, stdout=sys.stderr, check=True)
        partial.rename(target)
    return target


def load(settings: Settings) -> Loaded:
    gguf = settings.gguf_file()
    if not gguf.exists():
        write_gguf(settings.model, gguf)
    if settings.weights:
        gguf = quantized(settings, gguf)
    kind = IkLookup if settings.guesses else IkLlama
    return Loaded(generator=kind(settings, gguf), packages=("gguf",))


if __name__ == "__main__":
    serve(load)
