"""What `config.json` says of the lengths of vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ModelConfigError
from penstock.families.registry import load_vector_shape
from penstock.request import VectorShape


def shape_of(directory: Path, **fields: Any) -> VectorShape:
    (directory / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return load_vector_shape(directory, 64)


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({}, VectorShape(size=64)),
        ({"is_matryoshka": False}, VectorShape(size=64)),
        ({"is_matryoshka": True}, VectorShape(size=64, any_cut=True)),
        ({"matryoshka_dimensions": [32, 16]}, VectorShape(size=64, cuts=(32, 16))),
        ({"is_matryoshka": True, "matryoshka_dimensions": [64]}, VectorShape(size=64, cuts=(64,))),
    ],
)
def test_only_what_a_model_was_trained_for(
    tmp_path: Path, fields: dict[str, Any], shape: VectorShape
) -> None:
    assert shape_of(tmp_path, **fields) == shape


@pytest.mark.parametrize(
    "fields",
    [{"is_matryoshka": "yes"}, {"matryoshka_dimensions": 32}, {"matryoshka_dimensions": [65]}],
    ids=str,
)
def test_bad_fields_are_named(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ModelConfigError, match=next(iter(fields))):
        shape_of(tmp_path, **fields)
