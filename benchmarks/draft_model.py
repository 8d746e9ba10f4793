"""What a draft model gains on one stream, with the real kernels.

    python benchmarks/draft_model.py MODEL --stages 1,2 --rounds 5

Weights are random (`cpu_peers.py --model` makes MODEL), so that no small model guesses what it says. Two
others are made of it: the draft model is its embedding, its first layers and its head. The model that is
served has all layers, of which the later ones say only a little: what they add to the stream is multiplied by
`--weight`. The smaller that is the more often both agree, and so it sets the acceptance, which is printed.

An engine with the draft model and two without (the second says how far equal engines differ) generate the
same greedy texts in turns, each a process per stage as `serve` has them. Tokens must be equal. (Sampled texts
of random weights cannot be guessed: all of the vocabulary is about equally likely.) Prints Markdown for
docs/perf-log.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from peers.report import markdown
from ratios import against_off, in_turns
from safetensors.torch import load_file, save_file
from speculation import drafts_of

from penstock import LLM, SamplingParams

_FILE = "model.safetensors"
_ADDS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")  # to the stream


def make_models(model: Path, directory: Path, num_layers: int, weight: float) -> tuple[Path, Path]:
    """Write the model that is served and the one that drafts; returns their directories."""
    tensors = load_file(model / _FILE)
    served, draft = directory / "served", directory / "draft"
    for path in (served, draft):
        shutil.copytree(model, path, ignore=shutil.ignore_patterns("*.safetensors", "openvino"))
    for name, tensor in tensors.items():
        layer = _layer_of(name)
        if layer is not None and layer >= num_layers and name.endswith(_ADDS):
            tensors[name] = (tensor.float() * weight).to(tensor.dtype)
    save_file(tensors, served / _FILE)
    kept = {name: tensor for name, tensor in tensors.items() if (_layer_of(name) or 0) < num_layers}
    save_file(kept, draft / _FILE)
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:num_layers]
    (draft / "config.json").write_text(json.dumps(config))
    return served, draft


def _layer_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--layers", type=int, default=2, help="of the draft model")
    parser.add_argument("--weight", type=float, default=0.03, help="of what later layers add")
    parser.add_argument("--quantization", default="int4", choices=["none", "int8", "int4"])
    add_run_arguments(parser, guesses=8)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        models = make_models(options.model, Path(directory), options.layers, options.weight)
        rows = [compared(options, *models, stages) for stages in map(int, options.stages.split(","))]
    header = ["stages", "streams", "off, tokens/s", "draft model", "draft/off", "control", "accepted/drafted"]
    print(markdown(header, rows))


def add_run_arguments(parser: argparse.ArgumentParser, *, guesses: int) -> None:
    """What `compared_with_off` wants to know, and over which numbers of stages."""
    parser.add_argument("--stages", default="1,2")
    parser.add_argument("--threads", type=int, default=2, help="of all stages together")
    parser.add_argument("--guesses", type=int, default=guesses, help="of a step at most")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)


def compared(options: argparse.Namespace, served: Path, draft: Path, stages: int) -> list[str]:
    """The line of so many stages."""
    speculation = {
        "model": str(draft),
        "quantization": options.quantization,
        "num_speculative_tokens": options.guesses,
    }
    return compared_with_off(options, served, {"speculative_config": speculation}, stages)


def compared_with_off(
    options: argparse.Namespace, served: Path, drafting: dict[str, Any], stages: int
) -> list[str]:
    """The line of so many stages, with these settings of who guesses."""
    given: dict[str, Any] = {
        "pipeline_parallel_size": stages,
        "threads_per_rank": max(1, options.threads // stages),
        "num_blocks": 400,
        "max_model_len": 1024,
        "enable_prefix_caching": False,
        "speculative_method": "off",
    }
    prompts = [
        {"prompt_token_ids": [(7919 * place + 31 * number) % 30_000 for place in range(64)]}
        for number in range(options.streams)
    ]
    with ExitStack() as stack:
        engines = [stack.enter_context(LLM(str(served), **more)) for more in (given, given | drafting, given)]
        tokens: list[list[list[int]]] = [[] for _ in engines]

        def take(index: int) -> float:
            times = []
            for count in (1, options.tokens):
                sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
                began = time.perf_counter()
                outputs = engines[index].generate(prompts, sampling, use_tqdm=False)
                times.append(time.perf_counter() - began)
            tokens[index] = [output.outputs[0].token_ids for output in outputs]
            return float(options.streams * (options.tokens - 1) / (times[1] - times[0]))

        before = drafts_of(engines[1])
        rounds = in_turns(range(len(engines)), take, options.rounds, warm_up=1)
        assert tokens[0] == tokens[1] == tokens[2], "speculation has changed tokens"
        told = [after - old for after, old in zip(drafts_of(engines[1]), before, strict=True)]
    return [
        str(stages),
        str(options.streams),
        *against_off(rounds),
        f"{told[0]}/{told[1]} ({told[0] / max(told[1], 1):.2f})",
    ]


if __name__ == "__main__":
    main()
