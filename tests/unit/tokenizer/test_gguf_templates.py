"""The chat template of a GGUF file, and of models that keep it in a file of its own."""

from __future__ import annotations

import json
from pathlib import Path

from gguf_files import write_gguf
from penstock.tokenizer.template_files import load_chat_template
from penstock.tokenizer.tokenizer import AbsentTokenizer

TEMPLATE = "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "hello"}]


def rendered(model: Path) -> str:
    return load_chat_template(model, AbsentTokenizer()).render(MESSAGES)


def test_a_gguf_files_template_is_its_own_and_names_its_tokens(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
    }
    assert rendered(write_gguf(tmp_path / "m.gguf", metadata, {})) == "<s><user>hello"


def test_chat_template_json_counts_where_there_is_no_other(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<b>"}))
    assert rendered(tmp_path) == "<b><user>hello"
    (tmp_path / "chat_template.jinja").write_text("other")
    assert rendered(tmp_path) == "other"
