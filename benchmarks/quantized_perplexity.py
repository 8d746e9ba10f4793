"""Perplexity of the demo model on held-out text with int8 and int4 weights, against that of its own weights.

    python benchmarks/quantized_perplexity.py [--corpus tinyshakespeare.txt] [--groups 32,64,128]

Every linear layer, the embedding and the head tied to it are quantised as `--quantization` does it, and
activations are rounded as the kernel does it, first in torch through `transformers`, then by our own decoder
with its kernels. The text is what training held out. The model has seen its training text often, so a little
noise can even help it: the divergence from the plain model's distributions says more about a format than the
perplexity does.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from whole_rank import WholeRank

from penstock.config.engine import Quantization
from penstock.kernels.quantized_groups import default_group_size
from penstock.kernels.quantized_rows import dequantize, quantize_rows, round_activations

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "src/penstock/assets/demo"
WINDOW = 512
BOS = 0

sys.path.insert(0, str(ROOT / "scripts"))
from demo_text import split_corpus  # noqa: E402  (a script, not part of the package)


class EmulatedLinear(nn.Module):
    """A linear layer of the demo model, as the quantised kernel computes it."""

    def __init__(self, weight: Tensor, group_size: int) -> None:
        super().__init__()
        self.weight, self.group_size = weight, group_size  # float32 [out_size, in_size]

    def forward(self, x: Tensor) -> Tensor:
        return (round_activations(x, self.group_size) @ self.weight.T).to(x.dtype)


def quantized(model: LlamaForCausalLM, bits: int, group_size: int | None) -> LlamaForCausalLM:
    """The model with all of its matrices quantised, in place; `group_size` None takes the default."""
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name, module in linears:
        size = group_size or default_group_size(bits, module.in_features)
        weight = dequantize(quantize_rows(module.weight, bits, size), torch.float32)
        parent, _, child = name.rpartition(".")
        if name == "lm_head":
            embedding = model.get_input_embeddings()
            assert isinstance(embedding, nn.Embedding)
            embedding.weight = nn.Parameter(weight.to(embedding.weight.dtype), requires_grad=False)
        setattr(model.get_submodule(parent), child, EmulatedLinear(weight, size))
    return model


def log_probabilities(model: LlamaForCausalLM, windows: Tensor) -> Tensor:
    """float32 [windows, WINDOW, vocabulary], each window behind the token that begins a document."""
    inputs = torch.cat([torch.full((len(windows), 1), BOS), windows[:, :-1]], dim=1)
    return torch.cat([model(some).logits.float().log_softmax(-1) for some in torch.split(inputs, 8)])


def decoder_log_probabilities(quantization: Quantization, windows: Tensor) -> Tensor:
    """The same by our decoder and its kernels, with weights quantised at load, in bfloat16."""
    rank = WholeRank(DEMO, WINDOW, dtype="bfloat16", quantization=quantization)
    print(f"kernels: {rank.kernels}")
    inputs = torch.cat([torch.full((len(windows), 1), BOS), windows[:, :-1]], dim=1)
    return torch.stack([rank.logits(ids).log_softmax(-1) for ids in inputs])


def perplexity(log_probs: Tensor, windows: Tensor) -> float:
    """exp of the mean loss."""
    return math.exp(-log_probs.gather(-1, windows.unsqueeze(-1)).mean().item())


def divergence(log_probs: Tensor, of: Tensor) -> float:
    """Mean Kullback-Leibler divergence of the plain model's distributions `of` from these, in nats."""
    return nn.functional.kl_div(log_probs, of, log_target=True, reduction="none").sum(-1).mean().item()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, default=ROOT / "../shared/data/corpora/tinyshakespeare.txt")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--groups", default="32,64,128", help="of 4 bits, beside the default")
    options = parser.parse_args()
    text = split_corpus(options.corpus)[1]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    windows = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)

    def fresh() -> LlamaForCausalLM:
        model = LlamaForCausalLM.from_pretrained(DEMO, dtype=getattr(torch, options.dtype))
        assert isinstance(model, LlamaForCausalLM)
        model.eval()
        return model

    plain = log_probabilities(fresh(), windows)
    expected = perplexity(plain, windows)
    print(f"{windows.numel()} tokens held out; activations in {options.dtype}: perplexity {expected:.4f}")
    settings: list[tuple[int, int | None]] = [(8, None), (4, None)]
    settings += [(4, int(group)) for group in options.groups.split(",") if group]
    for bits, group_size in settings:
        found = log_probabilities(quantized(fresh(), bits, group_size), windows)
        label = f"int{bits}, " + (f"groups of {group_size}" if group_size else "as by default")
        change = 100 * (perplexity(found, windows) / expected - 1)
        print(f"{label:22} {change:+.2f} %, divergence {divergence(found, plain):.4f} nats", flush=True)
    own = decoder_log_probabilities("none", windows)
    print(f"our decoder: perplexity {perplexity(own, windows):.4f}")
    for quantization in ("int8", "int4"):
        found = decoder_log_probabilities(quantization, windows)
        change = 100 * (perplexity(found, windows) / perplexity(own, windows) - 1)
        print(f"our decoder, {quantization:9} {change:+.2f} %, divergence {divergence(found, own):.4f} nats")


if __name__ == "__main__":
    main()
