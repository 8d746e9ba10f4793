"""Makes `import torch` cheaper in the processes that only run a model, of which there is one per rank.

A quarter of the processor time of `import torch`, and 17 MiB of memory, go into `torch._meta_registrations`:
Python functions that give the shapes of operations on tensors of device "meta". torch's compiler and exporter
use them, and models of transformers, which are surveyed without memory. Nothing else in a rank does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Final

_META_FUNCTIONS: Final = "torch._meta_registrations"


@contextlib.contextmanager
def cheap_torch_import() -> Iterator[None]:
    """Let torch be imported in this block without its functions for meta tensors.

    While the block runs, the garbage collector rests: what an import makes stays, and to search all of it
    again and again takes a tenth of the time. What is there at the end is not searched later either. Does
    nothing if torch has been imported before.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules[_META_FUNCTIONS] = ModuleType(_META_FUNCTIONS)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # No trace of the empty module is left, so that `load_meta_functions` imports the true one.
        sys.modules.pop(_META_FUNCTIONS, None)
        if (torch := sys.modules.get("torch")) is not None:
            vars(torch).pop("_meta_registrations", None)
        gc.freeze()
        if was_enabled:
            gc.enable()


def load_meta_functions() -> None:
    """Load torch's functions for meta tensors, if `cheap_torch_import` has left them out."""
    with contextlib.suppress(ModuleNotFoundError):  # a later torch may have them elsewhere, and imported
        importlib.import_module(_META_FUNCTIONS)
