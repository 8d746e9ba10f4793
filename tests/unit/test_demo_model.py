"""The embedded demo model: its files agree with each other, with `transformers`, and with their script."""

from __future__ import annotations

import importlib
import json
import math
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import minijinja
import pytest
import torch
from tokenizers import Tokenizer

from paths import REPOSITORY, shared_data

DEMO = REPOSITORY / "src" / "penstock" / "assets" / "demo"
CORPUS = ("corpora", "tinyshakespeare.txt")
BOS, END = 0, 1


def read(name: str) -> dict[str, Any]:
    return json.loads((DEMO / name).read_text(encoding="utf-8"))


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    return importlib.import_module(name)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


# --- the files ------------------------------------------------------------------------------------


def test_files_are_complete_and_small() -> None:
    files = {path.name: path.stat().st_size for path in DEMO.iterdir()}
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "MODEL_CARD.md",
    }
    assert sum(files.values()) <= 6_000_000


def test_shape_is_the_one_asked_for() -> None:
    config = read("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] >= 6
    assert config["max_position_embeddings"] >= 1024
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0


def test_weights_are_finite_and_of_the_configured_shapes() -> None:
    from safetensors.torch import load_file

    config, tensors = read("config.json"), load_file(DEMO / "model.safetensors")
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    assert len(tensors) == 2 + 9 * layers
    assert tensors["model.embed_tokens.weight"].shape == (config["vocab_size"], hidden)
    assert tensors["model.layers.0.mlp.gate_proj.weight"].shape == (config["intermediate_size"], hidden)
    assert all(t.dtype == torch.bfloat16 and bool(t.isfinite().all()) for t in tensors.values())
    assert 1_000_000 <= sum(t.numel() for t in tensors.values()) <= 3_000_000


def test_special_tokens_agree_in_all_files(tokenizer: Tokenizer) -> None:
    config, names, generation = (
        read("config.json"),
        read("tokenizer_config.json"),
        read("generation_config.json"),
    )
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    for kind, number in (("bos", BOS), ("eos", END)):
        assert config[f"{kind}_token_id"] == generation[f"{kind}_token_id"] == number
        assert tokenizer.token_to_id(names[f"{kind}_token"]) == number
    assert names["model_max_length"] == config["max_position_embeddings"]


@pytest.mark.parametrize("text", ["ROMEO:\nO, speak again!", "naïve 東京 🐙 \t\x00", " two  spaces ", ""])
def test_tokenizer_is_byte_level_and_keeps_every_byte(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert ids[0] == BOS
    assert tokenizer.decode(ids[1:]) == text


def render(messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
    environment = minijinja.Environment(templates={"chat": read("tokenizer_config.json")["chat_template"]})

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment.add_function("raise_exception", refuse)
    return environment.render_template(
        "chat", messages=messages, bos_token="<|begin|>", add_generation_prompt=add_generation_prompt
    )


def test_chat_template_knows_system_user_and_assistant(tokenizer: Tokenizer) -> None:
    text = render(
        [
            {"role": "system", "content": "You are Romeo."},
            {"role": "user", "content": " hi\n"},
            {"role": "assistant", "content": "Good morrow."},
            {"role": "user", "content": "And?"},
        ]
    )
    assert text == (
        "<|begin|><|system|>You are Romeo.<|end|><|user|>hi<|end|>"
        "<|assistant|>Good morrow.<|end|><|user|>And?<|end|><|assistant|>"
    )
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert [i for i in ids if i < 5] == [BOS, 2, END, 3, END, 4, END, 3, END, 4]


def test_chat_template_refuses_another_role() -> None:
    with pytest.raises(Exception, match="knows the roles system, user and assistant"):
        render([{"role": "tool", "content": "42"}])


# --- what it says ---------------------------------------------------------------------------------


@pytest.mark.soak
def test_held_out_text_is_likely_over_the_whole_context(llama: Any, tokenizer: Tokenizer) -> None:
    """Nats per token of text that was never trained on; the same tokens after short and full contexts."""
    text = shared_data(*CORPUS).read_text(encoding="utf-8")[-54_000:]
    ids, context = tokenizer.encode(text).ids[1:], llama.config.max_position_embeddings

    def loss(length: int) -> float:
        ends = range(context, len(ids), 2000)
        rows = torch.tensor([[BOS, *ids[end - length + 1 : end]] for end in ends])
        with torch.no_grad():
            logits = llama(rows).logits[:, -201:-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, -200:].flatten()).item()

    uniform = math.log(llama.config.vocab_size)
    assert loss(256) < 0.55 * uniform
    assert loss(context // 2) < loss(256) + 0.1
    assert loss(context) < loss(256) + 0.3


@pytest.mark.parametrize("prompt", ["ROMEO:", "Who are you?", "What news, my lord?"])
def test_an_answer_is_a_speech_that_ends_by_itself(llama: Any, tokenizer: Tokenizer, prompt: str) -> None:
    text = render([{"role": "user", "content": prompt}])
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids])
    with torch.no_grad():
        out = llama.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=400,
            repetition_penalty=1.2,
            pad_token_id=END,
        )
    answer = out[0, ids.shape[1] :].tolist()
    assert answer[-1] == END
    assert len(answer) > 2
    assert all(token > 4 for token in answer[:-1])  # no role token inside a turn


def test_export_equals_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The independent reference decoder of the training script and `transformers` give the same logits."""
    script("train_demo_model", monkeypatch).check(DEMO, shared_data(*CORPUS))
    assert capsys.readouterr().out.startswith("largest difference of logits")


# --- the script that made it ----------------------------------------------------------------------

PLAY = "\n\n".join(
    f"{name}:\n{line}" for name in ("ROMEO", "JULIET", "NURSE") for line in ("Come,\nnight.", "Ay me!")
)


@pytest.fixture
def demo_text(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("demo_text", monkeypatch)


def test_dialogues_are_turns_of_the_template(demo_text: ModuleType) -> None:
    corpus = demo_text.Corpus(PLAY, demo_text.train_tokenizer(PLAY, 300))
    rng = random.Random(5)
    for _ in range(200):
        marks = [i for i in corpus.dialogue(rng) if i < 5]
        assert marks[0] == BOS
        turns = list(zip(marks[1::2], marks[2::2], strict=True))
        roles = [role for role, end in turns if end == END]
        assert len(roles) == len(turns)
        assert roles[roles[0] == 2 :] == [(3, 4)[i % 2] for i in range(len(roles) - (roles[0] == 2))]


def test_sequences_have_the_length_asked_for_and_depend_on_the_seed_alone(demo_text: ModuleType) -> None:
    corpus = demo_text.Corpus(PLAY, demo_text.train_tokenizer(PLAY, 300))
    first = [corpus.batch(256, 64, random.Random(seed)) for seed in (1, 1, 2)]
    assert first[0].shape == (4, 65)
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_a_continued_run_equals_an_uninterrupted_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text, training = script("demo_text", monkeypatch), script("train_demo_model", monkeypatch)
    shape = training.Shape(
        vocab_size=300, hidden_size=24, intermediate_size=32, num_hidden_layers=2, max_position_embeddings=64
    )
    recipe = training.Recipe(steps=4, tokens_per_step=64, phases=((0.5, 16), (0.5, 32)), warmup_steps=1)
    corpus = text.Corpus(PLAY, text.train_tokenizer(PLAY, 300))

    def trainer() -> Any:
        return training.Trainer(shape, recipe, corpus, corpus)

    whole, begun, continued = trainer(), trainer(), trainer()
    losses = [whole.run_step() for _ in range(4)]
    assert losses[:2] == [begun.run_step() for _ in range(2)]
    begun.save(tmp_path / "checkpoint.pt")
    continued.resume(tmp_path / "checkpoint.pt")
    assert losses[2:] == [continued.run_step() for _ in range(2)]
    for mine, other in zip(whole.average.parameters(), continued.average.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_phases_reach_the_whole_context(monkeypatch: pytest.MonkeyPatch) -> None:
    training = script("train_demo_model", monkeypatch)
    recipe, shape = training.Recipe(), training.Shape()
    lengths = [recipe.sequence_length(step) for step in range(recipe.steps)]
    assert lengths == sorted(lengths)
    assert lengths[-1] == shape.max_position_embeddings
    assert lengths.count(1024) >= recipe.steps // 10
    assert sys.float_info.epsilon < recipe.rate(recipe.steps - 1) < recipe.learning_rate / 10
