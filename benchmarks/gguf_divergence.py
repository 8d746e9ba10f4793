"""How far the logits of a GGUF file are from exact arithmetic: ours and llama.cpp's, on the same files.

    python benchmarks/gguf_divergence.py MODEL --llama-python DIR/bin/python --forms q8_0,q4_k_m

MODEL is the checkpoint of `cpu_peers.py`, whose files in llama.cpp's forms lie beside it (`--engines
llama:q8_0` makes them). The reference is float64 over exactly dequantised weights (`peers/gguf_logits.py`).
Printed is the mean Kullback-Leibler divergence of the reference from each engine's distributions, in nats, of
the tokens of a few prompts of random ids, and the largest one; ours with each dtype of activations.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from peers.report import markdown
from torch import Tensor
from whole_rank import WholeRank

PEER = Path(__file__).resolve().parent / "peers" / "gguf_logits.py"
FIRST_ID = 10


def divergences(reference: Tensor, logits: Tensor) -> Tensor:
    """Of each token, float64 [prompts, tokens]."""
    exact, found = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    return (exact.exp() * (exact - found)).sum(-1)


@torch.inference_mode()
def compare(path: Path, prompts: Tensor, options: argparse.Namespace) -> dict[str, Tensor]:
    """Divergences of all tokens of the prompts [prompts, tokens], by engine."""
    with tempfile.TemporaryDirectory(prefix="gguf-divergence-") as scratch:
        given, output = Path(scratch, "prompts.json"), Path(scratch, "logits.npz")
        given.write_text(json.dumps(prompts.tolist()))
        command = [options.llama_python, PEER, path, given, output, torch.get_num_threads()]
        subprocess.run([str(word) for word in command], check=True)
        with np.load(output) as found:
            reference, llama = (torch.from_numpy(found[name]) for name in ("reference", "llama"))
    engines = {"llama.cpp": llama}
    for dtype in options.dtypes.split(","):
        rank = WholeRank(path, options.tokens, dtype=dtype)
        engines[f"Penstock, {dtype}"] = torch.stack([rank.logits(ids).float() for ids in prompts])
    return {name: divergences(reference, logits).flatten() for name, logits in engines.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-python", required=True)
    parser.add_argument("--forms", default="q8_0,q4_k_m")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
    dice, rows = random.Random(1), []
    ids = [dice.randrange(FIRST_ID, vocab_size) for _ in range(options.prompts * options.tokens)]
    prompts = torch.tensor(ids).view(options.prompts, options.tokens)
    for form in options.forms.split(","):
        path = options.model / "gguf" / f"llama-{form}.gguf"
        for name, values in compare(path, prompts, options).items():
            rows.append([form, name, f"{values.mean():.3e}", f"{values.max():.3e}"])
    print(markdown(["form", "engine", "mean divergence", "largest"], rows))


if __name__ == "__main__":
    main()
