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
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from peers.report import markdown
from torch import Tensor

from penstock.attention.metadata import AttentionMetadata
from penstock.families.registry import load_spec
from penstock.process.config import RankConfig
from penstock.rank.loading import load_rank

PEER = Path(__file__).resolve().parent / "peers" / "gguf_logits.py"
FIRST_ID = 10


def our_logits(path: Path, dtype: str, ids: Sequence[int]) -> Tensor:
    """float32 [tokens, vocabulary] of one prompt, computed at once."""
    count = len(ids)
    config = RankConfig(
        model_path=str(path),
        dtype=dtype,  # type: ignore[arg-type]
        max_model_len=count,
        stage=0,
        num_stages=1,
        start_layer=0,
        end_layer=load_spec(path).num_layers,
        device="cpu",
        threads=torch.get_num_threads(),
        block_size=count,
        num_blocks=1,
        kv_cache_bytes=None,
        max_num_seqs=1,
        max_num_batched_tokens=count,
        depth=1,
        link_frames=1,
        quantization="none",
    )
    loaded = load_rank(config, lambda done, total: None)
    model, kv, positions = loaded.model, loaded.storage.allocate(1), torch.arange(count)
    metadata = AttentionMetadata(
        query_starts=[0, count],
        seq_lens=[count],
        block_tables=torch.zeros(1, 1, dtype=torch.int64),
        slot_mapping=positions,
        num_decodes=0,
        block_size=count,
    )
    tensors = model(model.embed(torch.tensor(ids)), positions, kv, metadata)
    return model.compute_logits(tensors, positions).float()


def divergences(reference: Tensor, logits: Tensor) -> Tensor:
    """Of each token, float64 [tokens]."""
    exact, found = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    return (exact.exp() * (exact - found)).sum(-1)


@torch.inference_mode()
def compare(path: Path, ids: Sequence[int], options: argparse.Namespace) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory(prefix="gguf-divergence-") as scratch:
        prompt, output = Path(scratch, "ids.json"), Path(scratch, "logits.npz")
        prompt.write_text(json.dumps(ids))
        command = [options.llama_python, PEER, path, prompt, output, torch.get_num_threads()]
        subprocess.run([str(word) for word in command], check=True)
        with np.load(output) as found:
            reference, llama = (torch.from_numpy(found[name]) for name in ("reference", "llama"))
    ours = {f"Penstock, {dtype}": our_logits(path, dtype, ids) for dtype in options.dtypes.split(",")}
    return {name: divergences(reference, logits) for name, logits in {"llama.cpp": llama, **ours}.items()}


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
    prompts = [
        [dice.randrange(FIRST_ID, vocab_size) for _ in range(options.tokens)] for _ in range(options.prompts)
    ]
    for form in options.forms.split(","):
        path = options.model / "gguf" / f"llama-{form}.gguf"
        found = [compare(path, ids, options) for ids in prompts]
        for name in found[0]:
            values = torch.cat([each[name] for each in found])
            rows.append([form, name, f"{values.mean():.3e}", f"{values.max():.3e}"])
    print(markdown(["form", "engine", "mean divergence", "largest"], rows))


if __name__ == "__main__":
    main()
