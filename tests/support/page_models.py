"""The models that the pages name, in small: directories, GGUF files, a hub and a store of Ollama."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from checkpoints import make_checkpoint
from deepseek_models import make_with_mtp
from fake_hub import FakeHub
from gguf_models import as_gguf
from model_stores import in_ollama
from page_reader import KEY
from paths import REPOSITORY
from penstock.tokenizer.detokenizer import byte_level_alphabet
from penstock.trust.admission import AdmissionBook
from penstock.trust.join_token import JoinToken
from published_shapes import write_shape

DEMO = REPOSITORY / "src" / "penstock" / "assets" / "demo"
TEXT_MODELS = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct")
GGUF_MODEL = "Qwen/Qwen2.5-0.5B-Instruct-GGUF"
_BLOCKS = ("Q4_K", "Q8_0", "IQ2_XXS")


@dataclass(frozen=True, slots=True)
class PageModels:
    """Models that were made once, and are shown to each reader under the names of the pages.

    Attributes:
        gguf: type of the blocks -> file.
        deepseek: a directory whose model has a layer that guesses.
    """

    gguf: Mapping[str, Path]
    deepseek: Path

    @classmethod
    def make(cls, folder: Path) -> PageModels:
        checkpoint = make_checkpoint(
            folder / "checkpoint", layers=2, hidden_size=256, intermediate_size=512, vocab_size=262
        )
        vocabulary = {
            "general.name": "Tiny",
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": [*byte_level_alphabet(), *(f"<{index}>" for index in range(6))],
            "tokenizer.ggml.merges": [],
            "tokenizer.chat_template": "{{ messages[-1].content }}",
        }
        files = {
            block: as_gguf(
                checkpoint,
                folder / block,
                lambda name, block=block: None if "norm" in name else block,  # type: ignore[misc]
                more_metadata=vocabulary,
            ).path
            for block in _BLOCKS
        }
        return cls(files, make_with_mtp(folder / "deepseek"))

    def fill_hub(self, hub: FakeHub) -> None:
        """Put the models that the pages pull into a hub."""
        demo = {path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()}
        for name in TEXT_MODELS:
            hub.add(name, demo)
        names = {"Q4_K": "q4_k_m", "Q8_0": "q8_0"}
        hub.add(
            GGUF_MODEL,
            {
                f"qwen2.5-0.5b-instruct-{name}.gguf": self.gguf[block].read_bytes()
                for block, name in names.items()
            },
        )

    def furnish(self, folder: Path) -> None:
        """Put what readers have into a folder: models, keys, traces, the state of a head with two hosts."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "Qwen2.5-0.5B").symlink_to(DEMO)
        (folder / "DeepSeek-V3-bf16").symlink_to(self.deepseek)
        write_shape(folder / "Llama-3-70B", "llama-70b")
        for name, block in {
            "model": "Q4_K",
            "Qwen2.5-0.5B-Instruct-Q4_K_M": "Q4_K",
            "Qwen2.5-0.5B-Instruct-IQ2_XXS": "IQ2_XXS",
        }.items():
            (folder / f"{name}.gguf").symlink_to(self.gguf[block])
        in_ollama(
            folder / "ollama",
            "registry.ollama.ai/library/qwen3/8b",
            {"model": self.gguf["Q8_0"].read_bytes()},
        )
        (folder / "keys").write_text(f"{KEY}\n", encoding="utf-8")
        (folder / "keys").chmod(0o600)
        (folder / "alert-rules.yaml").symlink_to(REPOSITORY / "deploy" / "monitoring" / "alert-rules.yaml")
        _write_traces(folder)
        _write_head(folder / "state" / "penstock")


def _write_traces(folder: Path) -> None:
    """Write forty seconds of requests, as Azure does and in lines of JSON."""
    rows = [f"2024-05-10 00:00:{second:02}.000000,64,8" for second in range(40)]
    text = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])
    (folder / "azure.csv").write_text(f"{text}\n", encoding="utf-8")
    lines = [f'{{"input_len": 64, "output_len": 8, "arrival_s": {second}}}\n' for second in range(40)]
    (folder / "chats.jsonl").write_text("".join(lines), encoding="utf-8")


def _write_head(state: Path) -> None:
    """Write the state of a head which `desk` and `shelf` have joined with a token for two."""
    book = AdmissionBook(state / "head", time.time)
    token = JoinToken.new(b"a public key")
    book.allow(token, max_joins=2)
    for serial, host in enumerate(("shelf", "desk"), start=0x2B9E77A05C13):
        book.commit(book.reserve(lambda key: key == token.proof_key()), host, serial)
