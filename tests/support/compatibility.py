"""Which feature goes with which layout: found out by running each pair, and written to docs/compatibility.md.

    python tests/support/compatibility.py        after a change that the test of the page complains about

What a cell promises is decided here by a rule (`promise`); the test runs the pair and holds it to that.
"""

from __future__ import annotations

import itertools
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import deepseek_models
from checkpoints import make_checkpoint, make_quantized_checkpoint
from families import FAMILIES
from penstock import LLM, SamplingParams
from penstock.config.engine import EngineConfig, ModelConfig, ParallelConfig, Pooling
from penstock.engine.client.outputs import RequestOutput
from penstock.engine.supervisor.launch import resolve_replicas
from penstock.errors import PenstockError
from penstock.families.registry import resolve_model_directory
from penstock.hosts.resources import HostResources
from penstock.request import StructuredOutputs
from small_engines import findable, run, small_engine, wait_until_stored

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
Prompt = dict[str, list[int]]
PROMPTS: list[Prompt] = [
    {"prompt_token_ids": [(7 * i + 3 * j) % 90 for j in range(5 + 11 * i)]} for i in range(3)
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
CHOICES = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=10, ignore_eos=True)
CHANGED = SamplingParams(
    temperature=0.0,
    repetition_penalty=1.5,
    frequency_penalty=0.5,
    logit_bias={7: 1.0},
    allowed_token_ids=list(range(0, 150, 2)),
    bad_word_ids=[[i, j] for i in range(0, 150, 10) for j in (6, 12, 18)],
    max_tokens=10,
    ignore_eos=True,
)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=10, ignore_eos=True, logprobs=2)
# Of two ids, so that what was said before comes again and is guessed.
REPEATING = SamplingParams(
    temperature=1.0, seed=7, max_tokens=24, ignore_eos=True, logprobs=2, allowed_token_ids=[4, 9]
)
SCORED = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=2)
HOST = HostResources(num_cpus=64, free_bytes=1 << 40, num_gpus=0)

MODEL_SETTINGS = ("dtype", "quantization", "model_impl")
EQUAL, RUNS = "=", "~"
SCHEMA = StructuredOutputs(json='{"type":"array","items":{"enum":["ay","no"]},"minItems":2,"maxItems":4}')
CONSTRAINED = SamplingParams(temperature=1.0, seed=7, max_tokens=48, structured_outputs=SCHEMA)
STEP = 5e-6  # of the numbers of vectors that are compared
NEAR = 0.03  # of log-probabilities: tokens between which rounding may choose


@dataclass(frozen=True)
class Feature:
    """A model, and settings of `LLM`.

    Attributes:
        is_rounded: numbers are rounded in a way that lets sums in another order show.
        is_warm: all was asked for before, and is in the prefix cache.
        is_stored: one rank was asked for all before, and has stored it.
        pooling: vectors are asked for, and no tokens.
    """

    model: Callable[[Path], object]
    settings: Mapping[str, Any] = field(default_factory=dict)
    sampling: SamplingParams = GREEDY
    is_rounded: bool = False
    is_warm: bool = False
    is_stored: bool = False
    pooling: Pooling | None = None

    @property
    def is_invariant(self) -> bool:
        """Whether numbers are the same bits whatever is computed with them: a token and its guesses are."""
        return self.settings.get("kernels") != "off" and self.settings.get("model_impl") != "transformers"


def plain(directory: Path) -> object:
    return make_checkpoint(directory, layers=3, vocab_size=150, seed=3)


def with_mtp(directory: Path) -> object:
    return deepseek_models.make_with_mtp(directory, is_right=True)


def tied(directory: Path) -> object:
    return make_checkpoint(directory, layers=3, vocab_size=150, seed=3, tied=True)


def wide(directory: Path) -> object:
    """Whose shares are whole groups of quantised weights."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "max_positions": 128}
    return make_checkpoint(directory, layers=3, vocab_size=150, seed=3, **sizes)


def gptq(directory: Path) -> object:
    sizes = {"hidden_size": 512, "intermediate_size": 512, "max_positions": 128}
    return make_quantized_checkpoint(directory, "gptq", group_size=128, layers=3, vocab_size=160, **sizes)


def gptq_small(directory: Path) -> object:
    return make_quantized_checkpoint(directory, "gptq", group_size=16, layers=3, vocab_size=160)


def mixtral(directory: Path) -> object:
    return make_checkpoint(directory, family="mixtral", num_local_experts=5, layers=3, vocab_size=150, seed=3)


def embedded(directory: Path) -> object:
    """The embedded model, which has a tokenizer."""
    return shutil.copytree(resolve_model_directory("demo"), directory, dirs_exist_ok=True)


FEATURES = {
    "float32": Feature(plain),
    "bfloat16": Feature(plain, {"dtype": "bfloat16"}, is_rounded=True),
    "without our kernels": Feature(plain, {"kernels": "off"}),
    "prompts in chunks of 4": Feature(plain, {"prefill_chunk": 4}),
    "prompts found in the prefix cache": Feature(plain, {"block_size": 4}, is_warm=True),
    "prompts found in a store that one rank has written": Feature(plain, is_stored=True),
    "sampling with a seed, log-probabilities": Feature(plain, sampling=SEEDED),
    "penalties, a bias, allowed ids, bad words": Feature(plain, sampling=CHANGED),
    "speculation by the text's own suffixes": Feature(
        plain, {"speculative_method": "suffix"}, sampling=REPEATING
    ),
    "structured output": Feature(embedded, sampling=CONSTRAINED),
    "scored prompts, in chunks of 4": Feature(plain, {"prefill_chunk": 4}, sampling=SCORED),
    "three choices of each prompt": Feature(plain, {"block_size": 4}, sampling=CHOICES),
    "embeddings, last token": Feature(plain, pooling="last"),
    "embeddings, mean, prompts in chunks of 4": Feature(plain, {"prefill_chunk": 4}, pooling="mean"),
    "`--quantization int8`": Feature(wide, {"quantization": "int8"}, is_rounded=True),
    "`--quantization int4`": Feature(wide, {"quantization": "int4"}, is_rounded=True),
    "GPTQ checkpoint, groups of 128": Feature(gptq, is_rounded=True),
    "GPTQ checkpoint, groups of 16, MLP 48 wide": Feature(gptq_small, is_rounded=True),
    "tied head": Feature(tied),
    "tied head by transfer": Feature(tied, {"tied_head": "transfer"}),
    "experts (Mixtral)": Feature(mixtral),
    "experts, `--enable-expert-parallel`": Feature(mixtral, {"enable_expert_parallel": True}),
    "transformers' own layers": Feature(plain, {"model_impl": "transformers"}),
    "latent attention (DeepSeek-V3)": Feature(deepseek_models.MODELS["v3"].make),
    "its own layer guesses (DeepSeek-V3, `mtp`)": Feature(with_mtp, {"speculative_method": "mtp"}),
    "sliding window (Mistral)": Feature(FAMILIES["mistral"].make),
    "soft caps, norms around (Gemma 2)": Feature(FAMILIES["gemma2"].make),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp 2": {"pipeline_parallel_size": 2},
    "pp 3, depth 2": {"pipeline_parallel_size": 3, "async_depth": 2},
    "tp 2": {"tensor_parallel_size": 2},
    "tp 4": {"tensor_parallel_size": 4},
    "pp 2, tp 2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "pp 2, tp 2,1": {"pipeline_parallel_size": 2, "tensor_parallel_size": "2,1"},
    "pp 2, speculation": {"pipeline_parallel_size": 2, "speculative_method": "suffix"},
    "dp 2, pp 2, depth 1": {"data_parallel_size": 2, "pipeline_parallel_size": 2, "async_depth": 1},
}


def promise(feature: Feature, layout: Mapping[str, Any]) -> str:
    """Equal tokens where each number is summed in one order, or exactly enough; else only that it runs."""
    is_summed_otherwise = feature.is_rounded and "tensor_parallel_size" in layout
    is_guessed_otherwise = not feature.is_invariant and "speculative_method" in layout
    return RUNS if is_summed_otherwise or is_guessed_otherwise else EQUAL


def refusal(feature: Feature, model: Path, layout: Mapping[str, Any]) -> str:
    """Why the pair is refused; empty if it is not."""
    names = set(ParallelConfig.__struct_fields__)
    parallel = {name: value for name, value in (*feature.settings.items(), *layout.items()) if name in names}
    own = {name: value for name, value in feature.settings.items() if name in MODEL_SETTINGS}
    config = EngineConfig(model=ModelConfig(model=str(model), **own), parallel=ParallelConfig(**parallel))
    try:
        resolve_replicas(config, [HOST])
    except PenstockError as error:
        return str(error)
    return ""


def tokens(feature: Feature, model: Path, layout: Mapping[str, Any]) -> list[list[int]]:
    """All that came for each prompt, in a row. Replicas take the prompts in turn, and run at the same time
    unless they share a store, which a process opens once."""
    layout = dict(layout)
    num_replicas = layout.pop("data_parallel_size", 1)
    parts = [PROMPTS[replica::num_replicas] for replica in range(num_replicas)]
    found: list[list[int]] = [[] for _ in PROMPTS]
    with ThreadPoolExecutor(1 if feature.is_stored else num_replicas) as pool:
        of_replicas = pool.map(lambda prompts: tokens_of_replica(feature, model, layout, prompts), parts)
        for replica, answers in enumerate(of_replicas):
            found[replica::num_replicas] = answers
    return found


def tokens_of_replica(
    feature: Feature, model: Path, layout: Mapping[str, Any], prompts: Sequence[Prompt]
) -> list[list[int]]:
    """Of one pipeline, its ranks as threads. Of vectors: numbers in steps of `STEP`."""
    settings = {"dtype": "float32", "threads_per_rank": 1, "async_depth": 0, **layout, **feature.settings}
    if feature.is_stored:
        return tokens_from_store(model, settings, layout, prompts)
    with LLM(str(model), distributed_executor_backend="inprocess", num_blocks=64, **settings) as llm:
        if feature.pooling is not None:
            vectors = llm.encode(prompts, pooling=feature.pooling)
            return [np.rint(vector.outputs.data / STEP).astype(int).tolist() for vector in vectors]
        runs = [llm.generate(prompts, feature.sampling) for _ in range(1 + feature.is_warm)]
        assert not feature.is_warm or all(output.num_cached_tokens for output in runs[-1])
        return [[*chosen(output), *likeliest(output)] for output in runs[-1]]


def chosen(output: RequestOutput) -> list[int]:
    """Of all choices."""
    return [token_id for one in output.outputs for token_id in one.token_ids]


def likeliest(output: RequestOutput) -> list[int]:
    """Of each token of a prompt that was scored."""
    return [token_id for entry in output.prompt_logprobs or [] for token_id in entry or ()]


def tokens_from_store(
    model: Path, settings: Mapping[str, Any], layout: Mapping[str, Any], prompts: Sequence[Prompt]
) -> list[list[int]]:
    """As `tokens_of_replica`; without a layout what is run goes into the store, else it is found there."""
    ids = [prompt["prompt_token_ids"] for prompt in prompts]
    with small_engine(model, model / "store", **settings) as llm:
        answers, num_found = run(llm, ids, GREEDY)
        if layout:
            assert num_found == sum(map(findable, ids))
        else:
            wait_until_stored(llm, ids, answers)
        return answers


def found(feature: Feature, directory: Path) -> list[str]:
    """A cell for each layout, the pair having been run."""
    feature.model(directory)
    alone, cells = tokens(feature, directory, {}), []
    for layout in LAYOUTS.values():
        reason = refusal(feature, directory, layout)
        cells.append(reason or promise(feature, layout))
        if reason:
            continue
        shared = tokens(feature, directory, layout)
        assert [len(ids) for ids in shared] == [len(ids) for ids in alone]
        if promise(feature, layout) == EQUAL:
            check_equal(feature, shared, alone)
        else:
            check_near(feature, directory, shared, alone)
    return cells


def check_equal(feature: Feature, shared: list[list[int]], alone: list[list[int]]) -> None:
    if feature.pooling is None:
        assert shared == alone
    else:  # a number may lie between two steps
        assert np.abs(np.subtract(shared, alone)).max() <= 1


def check_near(feature: Feature, model: Path, shared: list[list[int]], alone: list[list[int]]) -> None:
    """Two texts part only where one rank finds their next tokens almost as likely."""
    for prompt, own, other in zip(PROMPTS, alone, shared, strict=True):
        pairs = enumerate(zip(own, other, strict=True))
        parting = next((place for place, (one, another) in pairs if one != another), None)
        if parting is None:
            continue
        logprobs = likeliest_after(feature, model, [*prompt["prompt_token_ids"], *own[:parting]])
        assert logprobs.get(other[parting], -math.inf) > max(logprobs.values()) - NEAR, (parting, logprobs)


def likeliest_after(feature: Feature, model: Path, ids: list[int]) -> dict[int, float]:
    """The log-probabilities of the likeliest tokens behind some, by one rank."""
    settings = {"dtype": "float32", "threads_per_rank": 1, **feature.settings}
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5, ignore_eos=True)
    with LLM(str(model), distributed_executor_backend="inprocess", num_blocks=64, **settings) as llm:
        (output,) = llm.generate([{"prompt_token_ids": ids}], params)
    (entry,) = output.outputs[0].logprobs or ()
    return {token_id: each.logprob for token_id, each in entry.items()}


def shown(cell: str, reasons: dict[str, int]) -> str:
    """Return a cell as the page has it: of what is refused, the number of the reason."""
    if cell in (EQUAL, RUNS) or cell.startswith("`"):
        return cell
    return f"[{reasons.setdefault(cell, len(reasons) + 1)}]"


def page() -> str:
    """The whole page; what is refused is said below the tables."""
    from compatibility_families import table  # here: it runs pairs by what is here

    reasons: dict[str, int] = {}
    lines = [f"| | {' | '.join(LAYOUTS)} |", f"|---|{'---|' * len(LAYOUTS)}"]
    for name, feature in FEATURES.items():
        with tempfile.TemporaryDirectory() as directory:
            cells = found(feature, Path(directory))
        lines.append(f"| {name} | {' | '.join(shown(cell, reasons) for cell in cells)} |")
    lines += table(reasons)
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(itertools.chain([_HEAD], lines, [_REFUSED], notes)) + "\n"


_HEAD = """# What goes with what

This page says which feature works with which layout. `tests/support/compatibility.py` runs each pair with
small models and writes the page; a test compares the two. A cell says what the run found:

- `=`: the tokens are those of one rank. The numbers of vectors are those of one rank within 1e-5.
- `~`: it runs. Sums over ranks, or over a token and its guesses, are rounded. They may end in another token
  where two are almost as likely.
- A number: it is refused before anything starts, with the text that has this number below.

The columns are layouts:

- `pp`: stages
- `tp`: ranks that share a stage
- `depth`: plans issued ahead of the pipe; 0 where a column does not say
- `dp`: pipelines side by side
- `speculation`: guesses by the text's own suffixes

Ranks are threads here. Two replicas run at the same time and take the prompts in turn. If they share a store,
they run one after the other. `tests/pipeline/test_replicated.py` tests one server before both.

Features that ranks do not see work with every layout, and are left out. These are streams, stop strings,
tools and reasoning, `/v1/responses`, `echo`, sessions, priorities and the operations of administrators.
"""
_REFUSED = "\nRefused:\n"


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.modules["compatibility"] = sys.modules[__name__]
    sys.exit(main())
