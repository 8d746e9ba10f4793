"""Writes `docs/models.md`: which of the most used open models run, and on whose layers.

    python scripts/models_page.py            writes it
    python scripts/models_page.py --check    exits with 1 where the page is not what it would write

The models are in `scripts/models.toml`. What the page says of each is what the registry of families makes of
its configuration. Transformers must be installed.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tempfile
import tomllib
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.errors import ModelError
from penstock.families.registry import SUPPORTED_ARCHITECTURES, load_spec
from penstock.families.spec import ModelSpec
from penstock.families.wrappers import WRAPPERS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
TABLE = ROOT / "scripts" / "models.toml"

INTRODUCTION = """\
# Models

Look up here whether a model runs. {runs} of the {count} models below do: {own} on Penstock's own layers,
{foreign} on those of transformers (`pip install penstock[hf]`). Penstock refuses the others at start, with
the reason in the table.

`scripts/models_page.py` writes this page, and a test compares it. Each row shows the result of loading a
configuration with the model's fields (`scripts/models.toml`). These fields are publicly known facts about a
model, not its files. A row is *unverified*, and does not count, if the tested version of transformers lacks
its architecture.

On Penstock's own layers a model runs in any number of stages, with as many ranks as can share its heads,
and with `--quantization`. The layers of transformers run in stages of one rank, without quantisation
([adding a model](adding-a-model.md)). Penstock does not read numbers in float8 or MXFP4 yet. For a model in
such a format, use a checkpoint in BF16; it runs where its architecture does.

## The most used models

| model | architecture | runs |
|---|---|---|
"""

ARCHITECTURES = """
## Architectures

Penstock has its own layers for the architectures below. A checkpoint whose `config.json` names one of them
runs, fine-tunes included. If the file asks for something that is not built, the error names the field.

{listed}.

The next architectures read images too, but only their text models run. Penstock neither reads the rest of a
checkpoint nor sends it to another host, and it refuses a request with an image.

{wrapped}.

Most other decoders of transformers run through the layers of transformers.
"""

_REPEATED = re.compile(r"(\d+) x ([\d.]+)")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A row of the table."""

    name: str
    config: dict[str, Any]
    null: list[str] = field(default_factory=list)
    known_as: str = ""
    small: dict[str, Any] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        (name,) = self.config["architectures"]
        return str(name)

    @property
    def is_verified(self) -> bool:
        """Whether the installed transformers has the architecture."""
        spec = find_spec("transformers")
        assert spec is not None, "transformers is not installed"
        assert spec.submodule_search_locations is not None
        name = self.known_as or self.config["model_type"].removesuffix("_text")
        source = Path(spec.submodule_search_locations[0]) / "models" / name / f"modeling_{name}.py"
        return source.exists() and f"class {self.architecture}(" in source.read_text(encoding="utf-8")

    def spec(self) -> ModelSpec:
        """Return what the registry makes of the configuration. Raises `ModelError` if it refuses it."""
        with tempfile.TemporaryDirectory() as directory:
            fields = _spelt_out(self.config) | dict.fromkeys(self.null)
            (Path(directory) / "config.json").write_text(json.dumps(fields), encoding="utf-8")
            return load_spec(Path(directory))

    def runs(self) -> str:
        """Return on whose layers the model runs, or why it does not."""
        try:
            spec = self.spec()
        except ModelError as error:
            return f"no: {error.message}"
        layers = "our own layers" if spec.implementation == "penstock" else "transformers' layers"
        return f"on {layers}" if self.is_verified else f"on {layers} (*unverified*)"


def models() -> list[Model]:
    """Return the rows of the table."""
    with TABLE.open("rb") as file:
        return [Model(**row) for row in tomllib.load(file)["model"]]


def page() -> str:
    """Return the text of the page."""
    rows = [(model, model.runs()) for model in models()]
    own = sum(runs == "on our own layers" for _, runs in rows)
    foreign = sum(runs == "on transformers' layers" for _, runs in rows)
    head = INTRODUCTION.format(runs=own + foreign, count=len(rows), own=own, foreign=foreign)
    lines = [f"| {model.name} | `{model.architecture}` | {_in_a_cell(runs)} |\n" for model, runs in rows]
    plain = [name for name in SUPPORTED_ARCHITECTURES if name not in WRAPPERS]
    listed, wrapped = (", ".join(f"`{name}`" for name in names) for names in (plain, WRAPPERS))
    return head + "".join(lines) + ARCHITECTURES.format(listed=listed, wrapped=wrapped)


def _spelt_out(value: Any) -> Any:
    """The same with lists in place of `"48 x 1.0"`."""
    if isinstance(value, dict):
        return {name: _spelt_out(each) for name, each in value.items()}
    if isinstance(value, str) and (match := _REPEATED.fullmatch(value)):
        return [float(match[2])] * int(match[1])
    return value


def _in_a_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def main(arguments: list[str]) -> int:
    """Write the page, or compare it."""
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return 0
    logging.disable(logging.WARNING)
    text = page()
    if "--check" in arguments:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
