"""Inputs that break servers: the JSON conformance suite and the list of naughty strings."""

from __future__ import annotations

import json
import tarfile
from functools import cache

from paths import shared_data


@cache
def json_suite() -> dict[str, bytes]:
    """Name and content of each file: `y_` is JSON, `n_` is not, `i_` is for each reader to define."""
    with tarfile.open(shared_data("conformance", "json_parsing_suite.tar.gz")) as archive:
        files = {m.name.rpartition("/")[2]: archive.extractfile(m) for m in archive if m.isfile()}
        return {name: file.read() for name, file in files.items() if file and name.endswith(".json")}


@cache
def naughty_strings() -> list[str]:
    found = json.loads(shared_data("conformance", "blns.json").read_text("utf-8"))
    assert all(isinstance(text, str) for text in found)
    return found


def is_taken(name: str) -> bool:
    """Whether our reader takes a file of the suite as JSON."""
    return (name.startswith("y_") and name not in DOUBLED) or name in TAKEN


# The `y_` files that we refuse: an object has a key twice, and readers differ in which value counts.
DOUBLED = frozenset({"y_object_duplicated_key.json", "y_object_duplicated_key_and_value.json"})

# The `i_` files that we take: numbers too small to tell from 0 are 0, and integers have any size (fields that
# hold one have bounds of their own). All others are refused: infinities, lone surrogates, bytes that are not
# UTF-8, byte order marks, more than 64 levels.
TAKEN = frozenset(
    {
        "i_number_double_huge_neg_exp.json",
        "i_number_real_underflow.json",
        "i_number_too_big_neg_int.json",
        "i_number_too_big_pos_int.json",
        "i_number_very_big_negative_int.json",
    }
)
