"""Decode with a grammar on every row against decode without, in turns.

    python benchmarks/grammar_throughput.py MODEL

The model's weights with a generated tokenizer of the size of its vocabulary. With a grammar each row fills an
array of records that has no end before the tokens do; all rows of both kinds draw at temperature 1 from whole
logits, and give the same number of tokens. The ranks are threads of this process, so that its CPU time is
the engine's, which says something on a machine that has other work as well. The first round is not counted.
Prints Markdown for docs/perf-log.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from generated_vocabulary import write_tokenizer

from penstock import LLM, SamplingParams
from penstock.request import StructuredOutputs

PROMPT = [{"prompt_token_ids": [97 + (7 * row + place) % 26 for place in range(16)]} for row in range(512)]
SCHEMA = {
    "type": "array",
    "minItems": 5000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["small", "middle", "large"]},
            "price": {"type": "number", "minimum": 0, "maximum": 10_000},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        },
        "required": ["name", "kind", "price", "tags"],
        "additionalProperties": False,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each stage")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, engine(options, Path(directory)) as llm:
        rates: dict[str, list[tuple[float, float]]] = {"without": [], "with a grammar": []}
        for number in range(options.rounds + 1):
            for kind, found in rates.items():
                rate = decode(llm, options.batch, options.tokens, None if kind == "without" else SCHEMA)
                if number:
                    found.append(rate)
    print(f"batch {options.batch}, {options.tokens} tokens, {options.stages} stages")
    print("| | tokens a second | tokens a second of CPU |\n|---|---|---|")
    for kind, found in rates.items():
        wall, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"| {kind} | {wall:.1f} | {cpu:.1f} |")
    for place, what in enumerate(("time", "CPU time")):
        ratios = [b[place] / a[place] for a, b in zip(*rates.values(), strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"by {what}, neighbours: median {statistics.median(ratios):.3f}, {spread}")


def engine(options: argparse.Namespace, directory: Path) -> LLM:
    """Over the model's files, but for the tokenizer."""
    config = json.loads((options.model / "config.json").read_text())
    end = write_tokenizer(directory, config["vocab_size"])
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": end}))
    for file in options.model.glob("*.safetensors*"):
        (directory / file.name).symlink_to(file.resolve())
    return LLM(
        str(directory),
        pipeline_parallel_size=options.stages,
        max_num_seqs=options.batch,
        max_model_len=512,
        async_depth=1,
        threads_per_rank=options.threads,
        distributed_executor_backend="inprocess",
        enable_prefix_caching=False,
    )


def decode(llm: LLM, batch: int, tokens: int, schema: dict[str, object] | None) -> tuple[float, float]:
    """Tokens of all rows a second, and a second of CPU."""
    structured = None if schema is None else StructuredOutputs(json=json.dumps(schema))
    params = [
        SamplingParams(
            seed=row,
            max_tokens=tokens,
            ignore_eos=structured is None,
            structured_outputs=structured,
            detokenize=False,
        )
        for row in range(batch)
    ]
    began, cpu_began = time.perf_counter(), time.process_time()
    outputs = llm.generate(PROMPT[:batch], params)
    took, cpu_took = time.perf_counter() - began, time.process_time() - cpu_began
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    return batch * tokens / took, batch * tokens / cpu_took


if __name__ == "__main__":
    main()
