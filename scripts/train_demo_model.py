"""Trains the embedded demo model and exports it in Hugging Face form.

Owns: a compact reference decoder, the training loop, the export and its check. Run by hand by a maintainer;
nothing in the package imports it. It shares no code with the engine on purpose: the export is an input of the
engine that was made without it, and `--check` compares it with `transformers`.

    python scripts/train_demo_model.py --corpus tinyshakespeare.txt --out src/penstock/assets/demo
    python scripts/train_demo_model.py --corpus tinyshakespeare.txt --check src/penstock/assets/demo

Takes about 45 minutes on one core, and continues from its last checkpoint when it is started again.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from safetensors.torch import save as encode_tensors
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from demo_text import (
    ASSISTANT,
    BOS,
    END,
    GREETINGS,
    HELD_OUT_SHARE,
    SPECIAL_TOKENS,
    SYSTEM,
    USER,
    Corpus,
    split_corpus,
    train_tokenizer,
)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] in ['system', 'developer'] %}{{ '<|system|>' }}"
    "{% elif message['role'] == 'user' %}{{ '<|user|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% else %}{{ raise_exception('The demo model knows the roles system, user and assistant.') }}{% endif %}"
    "{{ message['content'] | trim }}{{ '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The decoder's dimensions; names are those of a Llama `config.json`."""

    vocab_size: int = 1024
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 12
    num_key_value_heads: int = 4
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How it is trained. A phase is (share of the steps, sequence length); every step has the same tokens."""

    steps: int = 2000
    tokens_per_step: int = 4096
    phases: tuple[tuple[float, int], ...] = ((0.4, 256), (0.3, 512), (0.2, 1024), (0.1, 2048))
    learning_rate: float = 1.5e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    dropout: float = 0.2
    ema_decay: float = 0.995
    seed: int = 1623
    evaluate_every: int = 400

    def sequence_length(self, step: int) -> int:
        done = 0.0
        for share, length in self.phases:
            done += share
            if step < done * self.steps:
                return length
        return self.phases[-1][1]

    def rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to 2 % of the peak."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


# --- model: parameter names are those of a Hugging Face Llama checkpoint ----------------------------------


class Norm(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden_size))
        self.eps = shape.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [batch, heads, length, head_dim] in the half-split layout (RoFormer, eq. 34)."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        kv_size = self.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        group = self.heads // self.kv_heads
        q, k = rotate(q, cos, sin), rotate(k, cos, sin).repeat_interleave(group, dim=1)
        with torch.autocast("cpu", enabled=False):  # heads of 16 are twice as fast in float32
            v = v.to(q.dtype).repeat_interleave(group, dim=1)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, hidden))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(shape), Norm(shape)
        self.self_attn, self.mlp = Attention(shape), FeedForward(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class ReferenceModel(nn.Module):
    """The whole decoder, without a KV cache: all that training and a check need."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList([Layer(shape, dropout) for _ in range(shape.num_hidden_layers)])
        self.norm = Norm(shape)
        self.dropout = nn.Dropout(dropout)
        half = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), shape.rope_theta**-half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [batch, length] -> logits [batch, length, vocab]."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.dropout(self.embed_tokens(ids))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def loss(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token of batch int64 [rows, length + 1]."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def initialise(model: ReferenceModel) -> None:
    """Normal 0.02; projections into the residual are scaled down by the depth (GPT-2, section 2.3)."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * len(model.layers)) if into_residual else 0.02)


# --- training ---------------------------------------------------------------------------------------------


def evaluate(model: ReferenceModel, corpus: Corpus, seed: int) -> dict[str, float]:
    """Losses in nats per token over fixed windows of 512: plain text, and dialogues."""
    rng, model_was_training = random.Random(seed), model.training
    model.eval()
    count = min(40, len(corpus.plain) // 513)
    stride = (len(corpus.plain) - 513) // max(1, count - 1)
    plain = torch.tensor([[BOS, *corpus.plain[i * stride : i * stride + 512]] for i in range(count)])
    talk = [[token for _ in range(16) for token in corpus.dialogue(rng)][:513] for _ in range(30)]
    rows = torch.tensor([row for row in talk if len(row) == 513])
    with torch.no_grad():
        losses = {"plain": model.loss(plain).item(), "dialogue": model.loss(rows).item()}
    model.train(model_was_training)
    return losses


def sample(model: ReferenceModel, ids: list[int], *, count: int, rng: torch.Generator) -> list[int]:
    """Up to `count` ids after `ids` at temperature 0.8, until the end of the turn."""
    new: list[int] = []
    with torch.no_grad():
        while len(new) < count and (not new or new[-1] != END):
            logits = model(torch.tensor([ids + new]))[0, -1].float()
            new.append(int(torch.multinomial((logits / 0.8).softmax(-1), 1, generator=rng)))
    return new


class Trainer:
    """The loop: steps, an average of the weights, evaluation, checkpoints that a later run continues from."""

    def __init__(self, shape: Shape, recipe: Recipe, train: Corpus, held_out: Corpus) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.train, self.held_out = recipe, train, held_out
        self.model = ReferenceModel(shape, recipe.dropout)
        initialise(self.model)
        self.average = ReferenceModel(shape)
        self.average.load_state_dict(self.model.state_dict())
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        vectors = [p for p in self.model.parameters() if p.ndim != 2]
        groups = [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))
        self.step = 0

    def run_step(self) -> float:
        recipe, rng = self.recipe, random.Random(self.recipe.seed * 1_000_003 + self.step)
        torch.manual_seed(recipe.seed + self.step)  # dropout of a continued run equals that of one run
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.rate(self.step)
        batch = self.train.batch(recipe.tokens_per_step, recipe.sequence_length(self.step), rng)
        loss = self.model.loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        decay = min(recipe.ema_decay, self.step / (self.step + 10))
        with torch.no_grad():
            for mean, new in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(new, 1 - decay)
        return loss.item()

    def save(self, path: Path) -> None:
        states = [part.state_dict() for part in (self.model, self.average, self.optimizer)]
        torch.save([*states, self.step], path)

    def resume(self, path: Path) -> None:
        model, average, optimizer, self.step = torch.load(path, weights_only=True)
        self.model.load_state_dict(model)
        self.average.load_state_dict(average)
        self.optimizer.load_state_dict(optimizer)


# --- export -----------------------------------------------------------------------------------------------


def model_config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(shape),
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": END,
        "torch_dtype": "bfloat16",
    }


def tokenizer_config(shape: Shape) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[END],
        "add_bos_token": True,
        "model_max_length": shape.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


GENERATION_CONFIG = {
    "bos_token_id": BOS,
    "eos_token_id": END,
    "do_sample": True,
    "temperature": 0.8,
    "top_p": 0.95,
}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export(model: ReferenceModel, shape: Shape, tokenizer: Tokenizer, card: str, out: Path) -> None:
    """Writes the checkpoint; each file appears whole, so that a reader never sees half of one."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
    part = out / "model.safetensors.part"
    part.write_bytes(encode_tensors(tensors, metadata={"format": "pt"}))
    part.replace(out / "model.safetensors")
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    _write_json(out / "config.json", model_config(shape))
    _write_json(out / "tokenizer_config.json", tokenizer_config(shape))
    _write_json(out / "generation_config.json", GENERATION_CONFIG)
    (out / "MODEL_CARD.md").write_text(card, encoding="utf-8")


CARD = """# Penstock demo model

A small decoder-only language model of Llama shape that writes in the manner of Shakespeare's plays. It exists
so that Penstock can be started, shown and tested without a download. It knows nothing and is of no other use.

| | |
|---|---|
| parameters | {parameters:,}; embeddings tied |
| shape | {layers} layers, hidden size {hidden}, {heads} heads, {kv_heads} KV heads |
| vocabulary | {vocab:,} (byte-level BPE trained on the same text; five special tokens) |
| context | {context:,} tokens |
| stored as | bfloat16 |
| data | tinyshakespeare, 1.1 MB of public-domain text; the last {held_out:.0%} held out |
| mixture | 40 % of the sequences plain text, 60 % dialogues of consecutive speeches |
| written for it | {greetings} short questions and greetings, which open a part of the dialogues |
| steps | {steps:,} of {planned:,}, {tokens_per_step:,} tokens each |
| sequence lengths | {lengths} |
| optimiser | AdamW, peak rate {rate:g}, cosine, weight decay {decay:g}, dropout {dropout:g} |
| weights | exponential average of the last steps ({ema:g}) |
| seed | {seed} |
| loss, training text | plain {train_plain:.3f}, dialogues {train_dialogue:.3f} nats per token |
| loss, held-out text | plain {held_plain:.3f}, dialogues {held_dialogue:.3f} nats per token |
| bits per byte, held-out plain text | {bits:.3f} |
| licence | Apache-2.0, as the project; the training text is in the public domain |

Template: `<|begin|>`; for every turn `<|system|>`, `<|user|>` or `<|assistant|>`, the text and `<|end|>`.
`<|end|>` ends an answer. A system turn such as "You are Romeo." names who answers; a user turn such as
"ROMEO:" asks for a speech of his; anything else is answered by the next speaker, whose name comes first.

Made by `scripts/train_demo_model.py`. A continued run equals an uninterrupted one on the same machine and
version of torch; other machines give other low bits, and so another model of the same quality.

Samples (temperature 0.8):

{samples}
"""


def model_card(trainer: Trainer, shape: Shape, tokenizer: Tokenizer, bytes_per_token: float) -> str:
    recipe, model = trainer.recipe, trainer.average
    train, held = evaluate(model, trainer.train, 1), evaluate(model, trainer.held_out, 1)
    return CARD.format(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=shape.num_hidden_layers,
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        kv_heads=shape.num_key_value_heads,
        vocab=shape.vocab_size,
        context=shape.max_position_embeddings,
        held_out=HELD_OUT_SHARE,
        greetings=len(GREETINGS),
        steps=trainer.step,
        planned=recipe.steps,
        tokens_per_step=recipe.tokens_per_step,
        lengths=", ".join(f"{length} ({share:.0%})" for share, length in recipe.phases),
        rate=recipe.learning_rate,
        decay=recipe.weight_decay,
        dropout=recipe.dropout,
        ema=recipe.ema_decay,
        seed=recipe.seed,
        train_plain=train["plain"],
        train_dialogue=train["dialogue"],
        held_plain=held["plain"],
        held_dialogue=held["dialogue"],
        bits=held["plain"] / math.log(2) / bytes_per_token,
        samples=samples(model, tokenizer, recipe.seed),
    )


def samples(model: ReferenceModel, tokenizer: Tokenizer, seed: int) -> str:
    """Three answers to fixed conversations, as a Markdown block."""
    rng, lines = torch.Generator().manual_seed(seed), []
    for system, user in (("", "ROMEO:"), ("", "Who are you?"), ("You are Juliet.", "What news?")):
        ids = [BOS]
        for role, text in ((SYSTEM, system), (USER, user)):
            ids += [role, *tokenizer.encode(text, add_special_tokens=False).ids, END] if text else []
        answer = sample(model, [*ids, ASSISTANT], count=120, rng=rng)
        lines += [f"[{system or 'no system turn'}] {user}", tokenizer.decode(answer), ""]
    return "```\n" + "\n".join(lines).rstrip() + "\n```"


# --- commands ---------------------------------------------------------------------------------------------


def train(corpus_path: Path, out: Path, work: Path, recipe: Recipe) -> None:
    shape = Shape()
    train_text, held_text = split_corpus(corpus_path)
    tokenizer = train_tokenizer(train_text, shape.vocab_size)
    trainer = Trainer(shape, recipe, Corpus(train_text, tokenizer), Corpus(held_text, tokenizer))
    bytes_per_token = len(held_text.encode()) / len(trainer.held_out.plain)
    checkpoint = work / "checkpoint.pt"
    work.mkdir(parents=True, exist_ok=True)
    if checkpoint.exists():
        trainer.resume(checkpoint)
    print(f"{sum(p.numel() for p in trainer.model.parameters()):,} parameters,", end=" ")
    print(f"{len(trainer.train.plain):,} training tokens, {bytes_per_token:.2f} bytes each", flush=True)
    began, first, running = time.monotonic(), trainer.step, 0.0
    while trainer.step < recipe.steps:
        loss = trainer.run_step()
        running = loss if not running else 0.98 * running + 0.02 * loss
        if trainer.step % 25 == 0:
            pace = (time.monotonic() - began) / (trainer.step - first)
            left = pace * (recipe.steps - trainer.step) / 60
            print(f"step {trainer.step} loss {running:.3f} {pace:.2f} s/step {left:.0f} min left", flush=True)
        if trainer.step % recipe.evaluate_every == 0 or trainer.step == recipe.steps:
            trainer.save(checkpoint)
            print("held out", evaluate(trainer.average, trainer.held_out, 1), flush=True)
            card = model_card(trainer, shape, tokenizer, bytes_per_token)
            export(trainer.average, shape, tokenizer, card, out)


def check(directory: Path, corpus_path: Path) -> None:
    """Compares the export with `transformers` in float32; ends with a sentence where they differ."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    shape = Shape()
    model = ReferenceModel(shape)
    tensors = load_file(directory / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()})
    model.eval()
    other = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    held_text = split_corpus(corpus_path)[1]
    ids = torch.tensor([AutoTokenizer.from_pretrained(directory)(held_text[:4000])["input_ids"][:1024]])
    with torch.no_grad():
        ours, theirs = model(ids), other(ids).logits
    difference = (ours - theirs).abs().max().item()
    chat = [{"role": "system", "content": "You are Romeo."}, {"role": "user", "content": "hi"}]
    prompt = AutoTokenizer.from_pretrained(directory).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    size = sum(path.stat().st_size for path in directory.iterdir())
    loss = F.cross_entropy(ours[0, :-1], ids[0, 1:]).item()
    print(f"largest difference of logits {difference:.2e}; loss {loss:.3f}; {size / 1e6:.2f} MB; {prompt!r}")
    if not difference < 1e-3 or size > 6_000_000:
        raise SystemExit("the export differs from transformers, or is larger than 6 MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True, help="tinyshakespeare.txt")
    parser.add_argument("--out", type=Path, default=Path("src/penstock/assets/demo"))
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="checkpoints to continue from")
    parser.add_argument("--check", type=Path, help="compare this export with transformers and end")
    parser.add_argument("--steps", type=int, default=Recipe().steps)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.check:
        check(arguments.check, arguments.corpus)
    else:
        train(arguments.corpus, arguments.out, arguments.work, Recipe(steps=arguments.steps))


if __name__ == "__main__":
    main()
