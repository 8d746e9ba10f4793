"""Which types of tensors a GGUF file may have: those used as they are, and those converted to floats.

Called by `families.gguf_config` before a family reads the configuration. Torch-free. The package `gguf`
decodes some of the types; this module looks whether it is installed and does not import it.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Mapping

from penstock.errors import UnsupportedModelError
from penstock.gguf.block_types import PACKAGE_TYPES
from penstock.gguf.file import GgufFile
from penstock.kernels.block_formats import BLOCK_FORMATS

FLOAT_TYPES: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
EXTRA = "penstock[gguf]"


def has_package() -> bool:
    """Return whether the package `gguf` is installed."""
    return importlib.util.find_spec("gguf") is not None


def require_known_types(file: GgufFile, *, dequantize: bool) -> None:
    """Raise `UnsupportedModelError` if the file has tensors that can neither be computed with nor decoded.

    Args:
        dequantize: types that only the package `gguf` decodes are allowed too, if that is installed.
    """
    types = Counter(tensor.type.name for tensor in file.tensors.values())
    unknown = Counter(
        {name: count for name, count in types.items() if name not in (*FLOAT_TYPES, *BLOCK_FORMATS)}
    )
    if not unknown:
        return
    is_decoded = unknown.keys() <= set(PACKAGE_TYPES)
    counts = ", ".join(f"{count} of {name}" for name, count in unknown.most_common())
    if not (is_decoded and dequantize):
        known = ", ".join((*FLOAT_TYPES, *BLOCK_FORMATS))
        remedy = "Use a file of the same model in a supported type, such as Q4_K_M or Q8_0"
        raise UnsupportedModelError(
            f"{file.path.name} has tensors of unsupported types: {counts}. Supported: {known}.",
            remedy=f"{remedy}, or --gguf-dequantize, which takes more memory."
            if is_decoded
            else f"{remedy}.",
            param="model",
        )
    if not has_package():
        raise UnsupportedModelError(
            f"{file.path.name} has tensors that need the Python package gguf, which is not installed: "
            f"{counts}.",
            remedy=f"Run `pip install {EXTRA}`, or use a file of another type, such as Q4_K_M.",
            param="model",
        )
