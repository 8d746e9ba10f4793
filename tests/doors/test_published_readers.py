"""What we read of three formats, held against the programs that publish them."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_files import Q8_0, Stored, Typed, write_gguf
from paths import shared_data
from penstock.gguf.block_types import TYPES
from penstock.gguf.file import GgufFile
from penstock.tokenizer.detokenizer import byte_level_alphabet
from penstock.tokenizer.sources.model_files import vocabulary_file
from penstock.tokenizer.sources.split_patterns import KIMI, LLAMA3, QWEN2
from penstock.tokenizer.tokenizer import load_tokenizer
from published_vocabularies import published, vectors
from vocabulary_files import sentencepiece_bytes, tiktoken_bytes

pytestmark = pytest.mark.doors

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    **{f"n.{kind}": Typed(kind=kind, value=3) for kind in (0, 1, 2, 3, 4, 5, 10, 11, 12)},
    "n.bool": True,
    "texts": ["a", "é", "日本"],
    "numbers": np.array([0.0, -1.5], "<f4"),
}


def test_the_gguf_package_reads_the_same_header(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf")
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1":  # of no file; the package has its size of an older ggml
            ours = TYPES[int(kind)]
            assert (ours.name, ours.block_values, ours.block_bytes) == (kind.name, *sizes)
    tensors = {
        "a": Stored.of(np.arange(12, dtype="<f4").reshape(3, 4)),
        "b": Stored(shape=(2, 32), kind=Q8_0, content=bytes(range(68))),
    }
    path = write_gguf(tmp_path / "m.gguf", METADATA, tensors)
    reader, file = gguf.GGUFReader(path), GgufFile.open(path)
    for key, value in file.metadata.items():
        assert reader.fields[key].contents() == (value.tolist() if isinstance(value, np.ndarray) else value)
    assert [
        (tensor.name, tuple(map(int, tensor.shape))[::-1], int(tensor.data_offset), int(tensor.n_bytes))
        for tensor in reader.tensors
    ] == [(tensor.name, tensor.shape, tensor.start, tensor.num_bytes) for tensor in file.tensors.values()]


def texts(count: int) -> list[str]:
    """Return the texts of the published vectors, pieces of a play and mixtures of what is hard."""
    choice = random.Random(5)
    play = shared_data("corpora", "tinyshakespeare.txt").read_text()
    parts = [
        "a",
        "the",
        "aa",
        "aaa",
        " ",
        "  ",
        "<sep>",
        "foo bar",
        "\u2581",
        "é",
        "\n",
        "日本",
        "</s>",
        "ee",
        "'s",
        "12",
    ]
    parts += ["<|x|>", "<0x61>", "½", "!", "\t", "e\u0301", "한국", "Привет", "😀", "_", "THE", "345"]
    mixed = ["".join(choice.choices(parts, k=choice.randrange(1, 14))) for _ in range(count)]
    starts = [choice.randrange(len(play) - 200) for _ in range(count)]
    return (
        [text for text, _ in vectors("llama-spm")]
        + mixed
        + [play[at : at + choice.randrange(200)] for at in starts]
    )


def model_directory(path: Path, content: bytes, name: str, tokenizer_class: str = "") -> Path:
    path.mkdir()
    (path / name).write_bytes(content)
    (path / "tokenizer_config.json").write_text(f'{{"tokenizer_class": "{tokenizer_class}"}}')
    assert vocabulary_file(path) == path / name
    return path


def test_sentencepiece_gives_the_same_ids_for_a_published_vocabulary(tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece", reason="needs sentencepiece")
    metadata = GgufFile.open(published("llama-spm")).metadata
    names, keys = metadata.texts("tokenizer.ggml.tokens"), ("scores", "token_type")
    columns = [metadata.numbers(f"tokenizer.ggml.{key}").tolist() for key in keys]
    content = sentencepiece_bytes(list(zip(names, *columns, strict=True)))
    reference = library.SentencePieceProcessor(model_proto=content)
    ours = load_tokenizer(model_directory(tmp_path / "m", content, "tokenizer.model"))
    from_gguf = load_tokenizer(published("llama-spm"))
    for text in texts(1000):
        ids = reference.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids, repr(text)
        assert from_gguf.encode(text, add_special_tokens=False) == ids, repr(text)


PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
DEFINED = {
    "user_defined_symbols": ["<sep>", "\u2581\u2581", "\n", "foo\u2581bar"],
    "control_symbols": ["<|x|>"],
}
TRAINED: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe", "byte_fallback": True, **PLAIN},
    "bpe with symbols": {"model_type": "bpe", "byte_fallback": True, **PLAIN, **DEFINED},
    "bpe without prefix": {
        "model_type": "bpe",
        "byte_fallback": True,
        "add_dummy_prefix": False,
        **PLAIN,
        **DEFINED,
    },
    "bpe of composed text": {"model_type": "bpe", "byte_fallback": False},
    "unigram": {"model_type": "unigram", "byte_fallback": True, **PLAIN},
    "unigram of composed text": {
        "model_type": "unigram",
        "byte_fallback": True,
        "user_defined_symbols": ["<sep>"],
    },
}


@pytest.mark.parametrize("shape", TRAINED)
def test_sentencepiece_gives_the_same_ids_for_a_trained_model(tmp_path: Path, shape: str) -> None:
    library = pytest.importorskip("sentencepiece", reason="needs sentencepiece")
    corpus = tmp_path / "corpus.txt"
    text = shared_data("corpora", "tinyshakespeare.txt").read_text()[:200_000]
    corpus.write_text(text + "日本語 你好 Привет été 한국어 ½ \n" * 20)
    library.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "m"), vocab_size=1000, minloglevel=2, **TRAINED[shape]
    )
    content = (tmp_path / "m.model").read_bytes()
    reference = library.SentencePieceProcessor(model_proto=content)
    tokenizer = load_tokenizer(model_directory(tmp_path / "d", content, "tokenizer.model"))
    for each in texts(600):
        if "composed" in shape and ("\u0301" in each or "s>" in each or "x|>" in each):
            continue  # marks behind a letter that is replaced are lost by the tokenizers library
        assert tokenizer.encode(each, add_special_tokens=False) == reference.encode(each), repr(each)


@pytest.mark.parametrize(
    ("tokenizer_class", "pattern"),
    [("QWenTokenizer", QWEN2), ("ChatGLM4Tokenizer", LLAMA3), ("TikTokenTokenizer", KIMI)],
)
def test_tiktoken_gives_the_same_ids(tmp_path: Path, tokenizer_class: str, pattern: str) -> None:
    library = pytest.importorskip("tiktoken", reason="needs tiktoken")
    alphabet = byte_level_alphabet()
    ids = json.loads(shared_data("tokenizers", "gpt2_vocab.json").read_text())
    names = sorted(ids.keys() - {"<|endoftext|>"}, key=ids.__getitem__)
    tokens = [bytes(alphabet[letter] for letter in name) for name in names]
    content = tiktoken_bytes(tokens)
    path = model_directory(tmp_path / "m", content, "tiktoken.model", tokenizer_class)
    tokenizer = load_tokenizer(path)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    reference = library.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in texts(1000):
        given = unicodedata.normalize("NFC", text) if tokenizer_class == "QWenTokenizer" else text
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode_ordinary(given), repr(
            text
        )
