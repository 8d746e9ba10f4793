"""GGUF files by their names: quantisations, splits, and which one a word means."""

from __future__ import annotations

import pytest

from penstock.local_models.gguf_names import GgufModel, gguf_models, meant, shortest_name


@pytest.mark.parametrize(
    ("name", "quantisation"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q8_0.gguf", "Q8_0"),
        ("Llama.IQ4_XS.gguf", "IQ4_XS"),
        ("gemma-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("stories260K_F32.gguf", "F32"),
        ("model-bf16.gguf", "BF16"),
        ("model-fp16.gguf", "FP16"),
        ("Q6_K/Model-Q6_K-00001-of-00003.gguf", "Q6_K"),
        ("stories260K.gguf", ""),
        ("SQ8_0.gguf", ""),
    ],
)
def test_the_quantisation_is_the_end_of_the_name(name: str, quantisation: str) -> None:
    (model,) = gguf_models([name])
    assert model.quantisation == quantisation


def test_parts_of_a_split_are_one_model_in_order() -> None:
    names = [f"big-Q8_0-0000{n}-of-00003.gguf" for n in (3, 1, 2)]
    (model,) = gguf_models(names)
    assert model == GgufModel(parts=tuple(sorted(names)))
    assert (model.first, model.stem, model.quantisation) == (sorted(names)[0], "big-Q8_0", "Q8_0")
    (lacking,) = gguf_models(names[1:])
    assert lacking.num_missing == 1
    assert (
        len(gguf_models(["a-00001-of-00002.gguf", "a-00001-of-00003.gguf", "b/a-00001-of-00002.gguf"])) == 3
    )


def test_what_lies_beside_a_model_is_none() -> None:
    assert gguf_models(["mmproj-model-f16.gguf", "imatrix.gguf", "config.json", "x.GGUF.part"]) == []
    assert len(gguf_models(["x.GGUF"])) == 1


def test_a_word_means_a_quantisation_a_file_or_a_path() -> None:
    models = gguf_models(["a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "a-UD-Q4_K_M.gguf", "b/a-Q8_0.gguf"])
    by_name = {model.first: model for model in models}
    for word, expected in (
        ("q4_k_m", ["a-Q4_K_M.gguf"]),
        ("UD-Q4_K_M", ["a-UD-Q4_K_M.gguf"]),
        ("A-Q4_K_S.GGUF", ["a-Q4_K_S.gguf"]),
        ("a-Q8_0", ["b/a-Q8_0.gguf"]),
        ("b/a-Q8_0.gguf", ["b/a-Q8_0.gguf"]),
        ("Q4_K", []),
        ("K_M", []),
        ("", sorted(by_name)),
    ):
        assert [model.first for model in meant(models, word)] == expected, word
    only_dynamic = gguf_models(["a-UD-Q4_K_M.gguf", "a-UD-Q4_K_XL.gguf"])
    assert [model.first for model in meant(only_dynamic, "Q4_K_M")] == ["a-UD-Q4_K_M.gguf"]


def test_the_shortest_name_means_one_model() -> None:
    models = gguf_models(["a-Q4_0.gguf", "b-Q4_0.gguf", "c-Q8_0.gguf", "d.gguf", "x/e.gguf", "y/e.gguf"])
    shortest = [shortest_name(model, models) for model in models]
    assert shortest == ["a-Q4_0.gguf", "b-Q4_0.gguf", "Q8_0", "d.gguf", "x/e.gguf", "y/e.gguf"]
    for model, name in zip(models, shortest, strict=True):
        assert meant(models, name) == [model]
