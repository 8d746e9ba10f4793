"""Which family goes with which stages and ranks, and as which GGUF file: a part of docs/compatibility.md.

    python tests/support/compatibility_families.py        shows what the page says of families

A family is a small checkpoint by transformers. Its GGUF file is a checkpoint of what such a file can say.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compatibility
import deepseek_models
from checkpoints import make_checkpoint
from compatibility import EQUAL, Feature
from expert_families import EXPERT_FAMILIES
from families import FAMILIES
from gguf_families import BY_NUMBERS, DENSE, LATENT, WITH_EXPERTS
from gguf_models import ARCHITECTURES, as_gguf
from wrapped_models import WRAPPED

Make = Callable[[Path], object]
GGUF = "GGUF"
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp 2": {"pipeline_parallel_size": 2},
    "pp 3": {"pipeline_parallel_size": 3},
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2, tp 2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "pp 3, tp 2": {"pipeline_parallel_size": 3, "tensor_parallel_size": 2},
}
GGUF_LAYOUTS: tuple[dict[str, Any], ...] = ({}, LAYOUTS["pp 2, tp 2"])

TITLE = """
## Families

Each family runs in float32 and in stages of the same size: `=` as above. Text models within models of more
than text are included. The last column is the architecture in GGUF. Such a file in floats gives the tokens of
its checkpoint, on one rank and as `pp 2, tp 2`.
"""


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        make: writes a small checkpoint.
        as_file: writes the checkpoint that a GGUF file is made of.
        architecture: of the file; empty: as the converter names it.
    """

    make: Make
    as_file: Make
    architecture: str = ""


def _plain(name: str, **changes: Any) -> Family:
    return Family(FAMILIES[name].make, lambda directory: FAMILIES[name].make(directory, **changes))


def _own(name: str) -> Family:
    def make(directory: Path) -> object:
        return make_checkpoint(directory, family=name, layers=3, vocab_size=150, seed=3)  # type: ignore[arg-type]

    return Family(make, make)


def _with_experts(name: str) -> Family:
    family, changes = EXPERT_FAMILIES[name], WITH_EXPERTS[name]
    return Family(family.make, lambda directory: family.make(directory, **changes))


def _latent(name: str) -> Family:
    model, changes = deepseek_models.MODELS[name], LATENT[name]
    return Family(model.make, lambda directory: model.make(directory, **changes))


def _wrapped(name: str, text: str, architecture: str) -> Family:
    changes = BY_NUMBERS.get(text) or DENSE.get(text) or {}
    as_file = _own(text) if text in ("llama", "qwen2") else _plain(text, **changes)
    return Family(WRAPPED[name].make, as_file.as_file, architecture)


ROWS: dict[str, Family] = {
    "Llama": _own("llama"),
    "Llama, tied": _plain("small tied llama"),
    "Mistral": _plain("mistral", sliding_window=None),
    "Mixtral": _own("mixtral"),
    "Qwen 2": _own("qwen2"),
    "Qwen 2 MoE": _own("qwen2_moe"),
    "Qwen 3": _plain("qwen3"),
    "Qwen 3 MoE": _own("qwen3_moe"),
    "Gemma 2": _plain("gemma2", **BY_NUMBERS["gemma2"]),
    "Gemma 3": _plain("gemma3", **BY_NUMBERS["gemma3"]),
    "Phi 3": _plain("phi3"),
    "OLMo 2": _plain("olmo2"),
    "Granite": _plain("granite", **BY_NUMBERS["granite"]),
    "Gemma": _plain("gemma"),
    "GLM": _plain("glm", **DENSE["glm"]),
    "GLM 4": _plain("glm4"),
    "ERNIE 4.5": _plain("ernie4_5"),
    "Seed-OSS": _plain("seed_oss"),
    "SmolLM 3": _plain("smollm3", **DENSE["smollm3"]),
    "EXAONE 4": _plain("exaone4"),
    "Ministral 3": _plain("ministral3"),
    "OLMo 3": _plain("olmo3"),
    "GLM 4.5 with experts": _with_experts("glm4_moe"),
    "dots.llm1": _with_experts("dots1"),
    "OLMoE": _with_experts("olmoe"),
    "DeepSeek V2": _latent("v2"),
    "DeepSeek V3": _latent("v3"),
    "GLM 4.7 Flash": _latent("glm"),
    "text of Gemma 3 with pictures": _wrapped("gemma3", "gemma3", "gemma3"),
    "text of Mistral Small 3.1": _wrapped("mistral3", "llama", "llama"),
    "text of Ministral 3": _wrapped("ministral3", "ministral3", "mistral3"),
    "text of Qwen 2.5 VL": _wrapped("qwen2_5_vl", "qwen2", "qwen2vl"),
    "text of Qwen 3 VL": _wrapped("qwen3_vl", "qwen3", "qwen3vl"),
}


def found(family: Family, directory: Path) -> list[str]:
    """Return a cell for each layout, and the architecture in GGUF, all of it having been run."""
    model = directory / "model"
    family.make(model)
    feature = Feature(family.make)
    alone = compatibility.tokens(feature, model, {})
    cells = []
    for layout in LAYOUTS.values():
        reason = compatibility.refusal(feature, model, layout)
        assert reason or compatibility.tokens(feature, model, layout) == alone, layout
        cells.append(reason or EQUAL)
    return [*cells, found_as_gguf(family, directory)]


def found_as_gguf(family: Family, directory: Path) -> str:
    """Return the architecture of a family's GGUF file, which gives the tokens of its checkpoint."""
    checkpoint = directory / "checkpoint"
    family.as_file(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = family.architecture or ARCHITECTURES[config["architectures"][0]]
    path = as_gguf(checkpoint, directory / "gguf", architecture=architecture).path
    feature = Feature(family.as_file)
    expected = compatibility.tokens(feature, checkpoint, {})
    for layout in GGUF_LAYOUTS:
        assert compatibility.tokens(feature, path, layout) == expected, layout
    return f"`{architecture}`"


def table(reasons: dict[str, int]) -> Iterator[str]:
    """Yield the lines of the part; what is refused is added to `reasons`, by number."""
    yield TITLE
    yield f"| | {' | '.join(LAYOUTS)} | {GGUF} |"
    yield f"|---|{'---|' * (len(LAYOUTS) + 1)}"
    for name, family in ROWS.items():
        with tempfile.TemporaryDirectory() as directory:
            cells = found(family, Path(directory))
        yield f"| {name} | {' | '.join(compatibility.shown(cell, reasons) for cell in cells)} |"


def main() -> int:
    for line in table({}):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
