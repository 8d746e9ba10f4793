"""Tells from names of GGUF files which files are one model, how it is quantised, and which one a user means.

The names are those of files on disk, or of files in a repository on the hub. No file is opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from penstock.gguf.part_names import PART_STEM, SUFFIX

_QUANTISATION = re.compile(
    r"(?:^|[-._])(?P<label>(?:UD-)?(?:I?Q\d|TQ\d|BF16|FP?16|FP?32|MXFP4)(?:_\w+)?)$", re.IGNORECASE
)
_BESIDE_A_MODEL = ("mmproj", "imatrix")  # projectors for pictures, and measurements for quantisers


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """One model as GGUF: a file, or the parts of a split in their order.

    Attributes:
        parts: paths with slashes, below the repository or folder that holds them; at least one.
        num_missing: number of parts that the split has, by the names of the others, and that are not there.
    """

    parts: tuple[str, ...]
    num_missing: int = 0

    @property
    def first(self) -> str:
        return self.parts[0]

    @property
    def stem(self) -> str:
        """The file's name without `.gguf`, and without the number of a part."""
        stem = PurePosixPath(self.first).name[: -len(SUFFIX)]
        split = PART_STEM.fullmatch(stem)
        return split["stem"] if split else stem

    @property
    def quantisation(self) -> str:
        """The quantisation that the name ends with, in capitals; "" if it ends with none."""
        found = _QUANTISATION.search(self.stem)
        return found["label"].upper() if found else ""

    def is_meant_by(self, asked: str) -> bool:
        """Return whether a word is the quantisation, the stem, or the name or path of a file of this model.

        Capitals do not count, nor does `UD-` before the quantisation.
        """
        word = asked.casefold()
        names = {self.quantisation, self.quantisation.removeprefix("UD-"), self.stem}
        for part in self.parts:
            names |= {part, PurePosixPath(part).name}
        return bool(word) and word in {name.casefold() for name in names}


def gguf_models(paths: Iterable[str]) -> list[GgufModel]:
    """Return the models among some files, in the order of their names. Parts of a split are one model."""
    splits: dict[tuple[str, int], dict[int, str]] = {}
    for path in sorted(paths):
        name = PurePosixPath(path).name
        if not name.lower().endswith(SUFFIX) or name.lower().startswith(_BESIDE_A_MODEL):
            continue
        stem = path[: -len(SUFFIX)]
        split = PART_STEM.fullmatch(stem)
        stem, number, count = (
            (split["stem"], int(split["number"]), int(split["count"])) if split else (stem, 1, 1)
        )
        splits.setdefault((stem, count), {})[number] = path
    return [
        GgufModel(
            parts=tuple(parts[number] for number in sorted(parts)), num_missing=max(0, count - len(parts))
        )
        for (_, count), parts in splits.items()
    ]


def meant(models: Sequence[GgufModel], asked: str) -> list[GgufModel]:
    """Return the models that a user may mean by a word; all models if the word is empty.

    If the word is exactly the quantisation of some models, only these are returned: `Q4_K_M` then does not
    mean a model with `UD-Q4_K_M`.
    """
    if not asked:
        return list(models)
    exact = [model for model in models if model.quantisation.casefold() == asked.casefold()]
    return exact or [model for model in models if model.is_meant_by(asked)]


def shortest_name(model: GgufModel, models: Sequence[GgufModel]) -> str:
    """Return a short word that means this model alone: its quantisation, its file's name, or its path."""
    if model.quantisation and meant(models, model.quantisation) == [model]:
        return model.quantisation
    name = PurePosixPath(model.first).name
    return name if meant(models, name) == [model] else model.first
