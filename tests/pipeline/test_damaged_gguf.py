"""Damaged GGUF files, through all that opens one for `LLM`: they load, or one named error says what is wrong.

Each case opens header, configuration, vocabulary and template, plans the launch and loads a rank. The memory
that the process may ask for is limited meanwhile, so a size that a file states and does not have is an error.
"""

from __future__ import annotations

import resource
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import make_checkpoint
from deepseek_models import make_with_mtp
from families import FAMILIES
from gguf_damage import Content, damaged
from gguf_files import Stored
from gguf_models import as_gguf
from penstock.config.engine import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from penstock.engine.supervisor.launch import resolve
from penstock.errors import ModelError, NotEnoughMemoryError, PenstockError
from penstock.grammar.matcher import load_vocabulary
from penstock.hosts.resources import HostResources
from penstock.kernels import pages
from penstock.llm.prompt_preparer import PromptPreparer
from penstock.rank.loading import load_rank

VOCABULARY = 96
ROOM_BYTES = 48 << 20  # beyond what the process has; the files have some 100 KiB
HOST = HostResources(num_cpus=1, free_bytes=ROOM_BYTES, num_gpus=0)
LONGEST_S = 20.0
SHAPE = {"layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": VOCABULARY}
TEMPLATE = "{% for message in messages %}<s>{{ message.content }}{% endfor %}"
KINDS = ("llama", "qwen2", "experts", "gemma3", "longrope", "exaone4", "latent")


def pieces() -> dict[str, Any]:
    names = ["<unk>", "<s>", "</s>", "\u2581", *(chr(33 + index) for index in range(VOCABULARY - 5)), "ab"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.scores": -np.arange(VOCABULARY, dtype="<f4"),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [1] * (VOCABULARY - 3), "<i4"),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": TEMPLATE,
    }


def letters() -> dict[str, Any]:
    names = [*(chr(33 + index) for index in range(94)), "\u0120", "ab"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": np.ones(VOCABULARY, "<i4"),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template": TEMPLATE,
        "tokenizer.chat_template.tool_use": TEMPLATE,
    }


def sound(kind: str, directory: Path) -> Content:
    """A small model of each form that the readers tell apart."""
    checkpoint, more, form, extra = directory / "checkpoint", pieces(), None, {}
    if kind == "llama":
        make_checkpoint(checkpoint, tied=True, **SHAPE)  # type: ignore[arg-type]
        form, extra = "Q8_0", {"rope_freqs.weight": np.linspace(1, 2, 4, dtype="<f4")}
    elif kind == "qwen2":
        make_checkpoint(checkpoint, family="qwen2", **SHAPE | {"hidden_size": 256, "layers": 1})  # type: ignore[arg-type]
        form, more = "Q4_K", letters()
    elif kind == "experts":
        shape = SHAPE | {"moe_intermediate_size": 32, "layers": 1}
        make_checkpoint(checkpoint, family="qwen3_moe", **shape)  # type: ignore[arg-type]
    elif kind == "latent":
        make_with_mtp(checkpoint, vocab_size=VOCABULARY, num_hidden_layers=2)
    else:
        name = {"longrope": "phi3"}.get(kind, kind)
        FAMILIES[name].make(checkpoint, vocab_size=VOCABULARY)
        if kind == "longrope":
            extra = {"rope_factors_short.weight": np.linspace(1, 2, 4, dtype="<f4")}

    def form_of(name: str) -> str | None:
        is_matrix = name.endswith(("_q.weight", "_k.weight", "_v.weight", "ffn_gate.weight", "ffn_up.weight"))
        return form if is_matrix else None

    made = as_gguf(
        checkpoint, directory / "gguf", form_of, extra, is_fused=kind == "exaone4", more_metadata=more
    )
    return Content(metadata=made.metadata, tensors=made.tensors)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Content]:
    """Sound files, each opened once: what is imported and built with the first does not count later."""
    made = {kind: sound(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}
    for kind, content in made.items():
        path = tmp_path_factory.getbasetemp() / f"{kind}.gguf"
        path.write_bytes(content.file())
        open_as_llm(path)
    return made


@pytest.fixture(autouse=True)
def _mappings_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights share mappings of 256 MiB, of which most is never touched; here each has its own."""
    monkeypatch.setattr(pages._SharedMapping, "take", lambda self, num_bytes: None)


def open_as_llm(path: Path) -> None:
    """What `LLM(path)` does before its first request, its stages' processes apart."""
    config = EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", max_model_len=64),
        parallel=ParallelConfig(threads_per_rank=1, kernels="off"),
        cache=CacheConfig(num_blocks=4),
        scheduler=SchedulerConfig(),
    )
    plan = resolve(config, [HOST])
    text = PromptPreparer.of(plan, config.model)
    text.tokenizer.decode(text.tokenizer.encode("ab <s> \u2603"))
    load_vocabulary(path, plan.spec.eos_token_ids)
    load_rank(plan.ranks[0], lambda done, total: None)


@contextmanager
def bounded() -> Iterator[None]:
    """Little more memory than the process has, and no case for ever."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    has_now = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()

    def too_long(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"a file took more than {LONGEST_S} s")

    handler = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    resource.setrlimit(resource.RLIMIT_AS, (has_now + ROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def outcome(path: Path) -> str:
    """Open a file; return "loaded", or the kind of the error, which must name the file."""
    try:
        with bounded():
            open_as_llm(path)
    except NotEnoughMemoryError as error:
        raise AssertionError("the sizes that the file states were believed") from error
    except PenstockError as error:
        if isinstance(error, ModelError) and path.name not in str(error):
            raise AssertionError(f"the file is not named: {error}") from error
        return type(error).__name__
    return "loaded"


def check(models: dict[str, Content], seeds: Iterable[int], directory: Path) -> Counter[str]:
    """Open a damaged file for each seed, of each kind in turn."""
    outcomes: Counter[str] = Counter()
    path = directory / "damaged.gguf"
    for seed in seeds:
        path.write_bytes(damaged(models[KINDS[seed % len(KINDS)]], Random(seed)))
        try:
            outcomes[outcome(path)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return outcomes


def test_the_files_are_sound_before_they_are_damaged(models: dict[str, Content], tmp_path: Path) -> None:
    for kind, content in models.items():
        path = tmp_path / f"{kind}.gguf"
        path.write_bytes(content.file())
        assert outcome(path) == "loaded", kind


def test_more_memory_than_a_file_justifies_is_refused_meanwhile() -> None:
    with bounded(), pytest.raises(RuntimeError, match="memory"):
        torch.empty(2 * ROOM_BYTES, dtype=torch.uint8)


NO_FACTORS = {"rope_factors_short.weight": np.empty(0, "<f4")}
MANY_EXPERTS = {"blk.0.ffn_gate_exps.weight": np.empty((2**40, 0, 32), "<f4")}
ONE_VALUE = {f"blk.0.attn_qkv.{kind}": np.array(1.0, "<f4") for kind in ("weight", "bias")}
NAMED: dict[str, tuple[str, dict[str, Any], dict[str, np.ndarray], str]] = {
    "a width that only the metadata have": (
        "llama",
        {"llama.feed_forward_length": 2**20},
        {},
        r"m.gguf: tensor blk.0.ffn_gate.weight: expected \[1048576, 32\] .*, found \[64, 32\]",
    ),
    "layers that only the metadata have": (
        "llama",
        {"llama.block_count": 1000},
        {},
        r"m.gguf: tensor model.layers.2.self_attn.q_proj.weight: expected this tensor",
    ),
    "more experts than any model, of no rows": (
        "experts",
        {},
        MANY_EXPERTS,
        r"m.gguf: tensor model.layers.0.mlp.experts.0.gate_proj.weight: expected this tensor",
    ),
    "no heads": ("gemma3", {"gemma3.attention.head_count": 0}, {}, r"m.gguf: num_attention_heads must be an"),
    "no width": ("longrope", {"phi3.embedding_length": 0}, {}, r"m.gguf: hidden_size must be an integer"),
    "one value where there are rows": (
        "llama",
        {},
        ONE_VALUE,
        r"m.gguf: tensor blk.0.attn_qkv.weight: expected no such tensor",
    ),
    "no factors": ("longrope", {}, NO_FACTORS, r"m.gguf: rope_scaling.short_factor must be a list of 4"),
}


@pytest.mark.parametrize("case", NAMED)
def test_what_damage_has_shown_is_said_in_full(models: dict[str, Content], tmp_path: Path, case: str) -> None:
    kind, metadata, tensors, said = NAMED[case]
    stored = {name: Stored.of(values) for name, values in tensors.items()}
    content = models[kind]
    changed = Content(metadata={**content.metadata, **metadata}, tensors={**content.tensors, **stored})
    path = tmp_path / "m.gguf"
    path.write_bytes(changed.file())
    with pytest.raises(ModelError, match=said), bounded():
        open_as_llm(path)


def test_damage_ends_in_an_error_with_the_file_or_changes_numbers_alone(
    models: dict[str, Content], tmp_path: Path
) -> None:
    outcomes = check(models, range(260), tmp_path)
    assert outcomes["loaded"] > 20
    assert outcomes["CheckpointError"] > 100
    assert {"ModelConfigError", "UnsupportedModelError"} <= outcomes.keys()


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1_000, 41_000, 4_000))
def test_much_damage_ends_in_the_same_ways(models: dict[str, Content], tmp_path: Path, first: int) -> None:
    outcomes = check(models, range(first, first + 4_000), tmp_path)
    assert outcomes["loaded"] > 200
