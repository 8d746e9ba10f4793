"""What loading costs each stage: bytes read, and private memory gained, against the stage's own tensors.

    python benchmarks/load_memory.py [--stages 2] [--layers 24] [--directory DIR]
    python benchmarks/load_memory.py --gguf FILE.gguf [--stages 2]

Makes a seeded random checkpoint of the shape of Qwen2.5-0.5B in bfloat16 (988 MB), starts the real
supervisor, core and ranks on it, and compares, for each stage: all bytes of its read calls while it loads
(within 1 % of its own tensors), and private memory when it is ready less that before its model is made, less
the KV pool (within 8 %). A tied head counts once. Own tensors are counted from the model's shape, not from
what the loader says. Those of a GGUF file, which is one made elsewhere, are counted from its index.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peers.checkpoint import tensor_shapes
from stand_in import use_rank

from penstock.config.engine import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from penstock.engine.supervisor import supervisor
from penstock.engine.supervisor.reports import EngineFailed, EngineReady, Event
from penstock.families.gguf_config import gguf_tensors
from penstock.families.registry import load_spec
from penstock.families.spec import ModelSpec
from penstock.gguf.file import GgufFile
from penstock.pipeline.partition import partition_layers
from penstock.process.readiness import Waitable

READ_TOLERANCE = 0.01
MEMORY_TOLERANCE = 0.08
NUM_BLOCKS = 16
ITEM_BYTES = 2  # bfloat16

HIDDEN, INTERMEDIATE, VOCABULARY = 896, 4864, 151936
HEADS, KV_HEADS = 14, 2


def config(num_layers: int) -> dict[str, Any]:
    """`config.json` of the shape of Qwen2.5-0.5B."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }


def write_checkpoint(directory: Path, num_layers: int) -> None:
    """Seeded random weights as one safetensors file, written piece by piece."""
    (directory / "config.json").write_text(json.dumps(config(num_layers)))
    noise = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32) * 0.02
    pattern = (noise.view(np.uint32) >> 16).astype("<u2")  # bfloat16: the upper half of a float32
    header, position = {}, 0
    for name, shape in tensor_shapes(config(num_layers)):
        size = int(np.prod(shape)) * ITEM_BYTES
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, shape in tensor_shapes(config(num_layers)):
            file.write(np.resize(pattern, int(np.prod(shape))).data)


class NoFront:
    """Nobody uses the engine; the benchmark ends it by a signal once it is ready."""

    lifelines: Sequence[Waitable] = ()
    drain_s = 0.0

    def open(self) -> None:
        pass

    def start(self, family: object, plan: object, client: object) -> None:
        pass

    def address(self, client: object) -> str:
        return "nowhere"

    def close(self) -> None:
        pass


class EndWhenReady:
    """The supervisor's reporter."""

    failure = ""

    def report(self, event: Event) -> None:
        if isinstance(event, EngineReady):
            os.kill(os.getpid(), signal.SIGTERM)
        elif isinstance(event, EngineFailed):
            self.failure = event.error.message


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One stage's figures, in bytes."""

    stage: int
    own: int
    read: int
    gained: int

    @property
    def fine(self) -> bool:
        read_error = abs(self.read / self.own - 1)
        return read_error <= READ_TOLERANCE and abs(self.gained / self.own - 1) <= MEMORY_TOLERANCE

    def line(self) -> str:
        read_error, gain_error = (100 * (value / self.own - 1) for value in (self.read, self.gained))
        return (
            f"stage {self.stage}  own tensors {self.own / 1e6:7.1f} MB   "
            f"read {self.read / 1e6:7.1f} MB ({read_error:+.2f} %)   "
            f"private memory gained {self.gained / 1e6:7.1f} MB ({gain_error:+.2f} %)   "
            f"{'ok' if self.fine else 'MISSED'}"
        )


def own_bytes(model: Path, spec: ModelSpec, layers: tuple[int, int]) -> int:
    """Return the size of a stage's own tensors."""
    start, end = layers
    if model.is_dir():
        return spec.stage_parameters(start, end) * ITEM_BYTES
    ends: tuple[str, ...] = ("model.embed_tokens.",) if start == 0 else ()
    if end == spec.num_layers:
        ends += ("model.norm.", "model.embed_tokens." if spec.tie_word_embeddings else "lm_head.")
    wanted = (*ends, *(f"model.layers.{layer}." for layer in range(start, end)))
    stored = gguf_tensors(GgufFile.open(model), spec).items()
    own = {each.tensor.name: each.tensor.num_bytes for name, each in stored if name.startswith(wanted)}
    return sum(own.values())


def measure(model: Path, directory: Path, num_stages: int) -> list[StageCost]:
    """Start the engine on a model and read what its ranks wrote down into a directory."""
    use_rank("measured_rank")
    os.environ["MEASURED_RANK_DIR"] = str(directory)
    engine = EngineConfig(
        model=ModelConfig(model=str(model)),
        parallel=ParallelConfig(pipeline_parallel_size=num_stages),
        cache=CacheConfig(num_blocks=NUM_BLOCKS),
    )
    reporter = EndWhenReady()
    code = supervisor.Supervisor(engine, NoFront(), reporter).run()
    if code:
        raise SystemExit(f"the engine ended with code {code}: {reporter.failure}")
    spec = load_spec(model)
    costs = []
    for stage, (start, end) in enumerate(partition_layers(spec.num_layers, num_stages)):
        seen = json.loads((directory / f"stage-{stage}.json").read_text())
        costs.append(
            StageCost(
                stage=stage,
                own=own_bytes(model, spec, (start, end)),
                read=seen["read_loaded"] - seen["read_before"],
                gained=seen["private_ready"] - seen["private_before"] - NUM_BLOCKS * seen["block_bytes"],
            )
        )
    return costs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--directory", type=Path, help="where the temporary checkpoint is written")
    parser.add_argument("--gguf", type=Path, help="measures this file, and writes no checkpoint")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        if options.gguf is None:
            write_checkpoint(directory, options.layers)
        costs = measure(options.gguf or directory, directory, options.stages)
    for cost in costs:
        print(cost.line())
    return 0 if all(cost.fine for cost in costs) else 1


if __name__ == "__main__":
    sys.exit(main())
