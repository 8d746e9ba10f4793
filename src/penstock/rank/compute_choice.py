"""Chooses how a rank computes: by our kernels or torch, on which CPU cores, over weights in which form.

Called by `rank.loading` before the model is built.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import NamedTuple

import torch

from penstock.errors import UsageError
from penstock.families.spec import ModelSpec
from penstock.kernels.cpu.library import KERNEL_NAMES, LoadedKernels, load, parse_kernels
from penstock.kernels.cpu.ops import DTYPES, CpuKernels
from penstock.kernels.cpu.targets import AUTO
from penstock.kernels.quantized_groups import default_group_size
from penstock.layers.compute import FormatOf, never_quantized
from penstock.layers.matrix import QuantizedFormat
from penstock.process.config import RankConfig
from penstock.rank.stored_weights import StoredWeights

_BITS = {"int8": 8, "int4": 4}


class ChosenKernels(NamedTuple):
    """The kernels that run on a rank: our own for CPUs, or none, so that torch computes everything.

    Attributes:
        kernels: the loaded kernels; None: torch computes everything.
        description: text for people: which kernels run, or why none do and what is lost.
        numeric_class: a text that is equal for ranks whose kernels compute the same bits
            (`kernels.cpu.library`). If only some kernels are enabled, it names them; "" if none run.
    """

    kernels: CpuKernels | None
    description: str
    numeric_class: str = ""


def load_kernels(config: RankConfig, *, is_quantized: bool) -> ChosenKernels:
    """Load our CPU kernels, if the rank's device, dtype and settings allow them.

    Args:
        is_quantized: the weights are quantised. If no kernels run, the description says what that costs.

    Raises:
        UsageError: the config demands a numeric class, and this machine has no kernels of that class.
    """
    if config.device != "cpu":
        return ChosenKernels(None, "none on a GPU")
    if getattr(torch, config.dtype) not in DTYPES:
        return ChosenKernels(
            None, f"none for {config.dtype}: plain torch, which is slower; use bfloat16 or float32"
        )
    loaded = load(config.kernels, config.numeric_class)
    if loaded.library is None:
        _require_any_class(config, loaded)
        lost = "plain torch, which is slower, and whose results depend on the other rows of a batch"
        if is_quantized:
            lost += "; quantised weights are converted to float32"
        return ChosenKernels(None, f"none: {loaded.reason}; {lost}. {loaded.remedy}".rstrip())
    enabled = parse_kernels(config.kernels).enabled
    which = "" if enabled == frozenset(KERNEL_NAMES) else f" for {'/'.join(sorted(enabled))}"
    return ChosenKernels(
        CpuKernels(loaded.library, enabled),
        _described(loaded, enabled, config.kernels),
        loaded.numeric_class + which,
    )


def _require_any_class(config: RankConfig, loaded: LoadedKernels) -> None:
    """Raise `UsageError` if the config demands a numeric class, although this rank has no kernels."""
    if config.numeric_class != AUTO:
        raise UsageError(
            f"{config.name} needs kernels for {config.numeric_class}, which {config.host} does not have: "
            f"{loaded.reason}.",
            remedy=loaded.remedy,
            param="numeric_class",
        )


def numeric_class(chosen: ChosenKernels, spec: ModelSpec, device: torch.device) -> str:
    """Return a text that is equal for ranks that compute the same bits, such as `avx512-bf16 1f0a2b3c`.

    Where torch computes a part, the text also has torch's version and its device, such as `torch 2.13 on
    avx512`. Torch does not promise equal bits even then.
    """
    if is_invariant(chosen.kernels) and spec.latent is None:
        return chosen.numeric_class
    kind = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else torch.backends.cpu.get_cpu_capability().lower()
    )
    by_torch = f"torch {'.'.join(torch.__version__.split('.')[:2])} on {kind}"
    return ", ".join(filter(None, [chosen.numeric_class, by_torch]))


def is_invariant(kernels: CpuKernels | None) -> bool:
    """Return whether a row's results do not depend on the other rows that are computed together with it.

    That is so where all our kernels are enabled. What torch computes beside them goes number by number, in a
    way that has this property too (`layers.elementwise`); other functions of torch do not promise it.
    """
    return kernels is not None and kernels.enabled == frozenset(KERNEL_NAMES)


def _described(loaded: LoadedKernels, enabled: frozenset[str], requested_kernels: str) -> str:
    text = f"{loaded.isa}, {loaded.reason}"
    if loaded.remedy:  # they run, but could not be saved for the next start
        text = f"{text}. {loaded.remedy}"
    if requested_kernels == "auto":
        return text
    return f"{text}; only {', '.join(sorted(enabled))}; plain torch for the rest, which is slower"


def pin_threads(config: RankConfig, kernels: CpuKernels | None) -> None:
    """Bind the rank's compute threads to its CPU cores: one thread to each core if our kernels can do that.

    If they cannot, all threads are bound to all these cores together. Nothing is done if the config names no
    cores. Call it after the kernels were built: a compiler would inherit the binding.
    """
    if not config.cpus:
        return
    # A kernel library of another compiler may bring its own OpenMP runtime: its threads are not torch's.
    shares_threads = kernels is not None and kernels.library.penstock_num_threads() == config.threads
    if kernels is None or not shares_threads:
        os.sched_setaffinity(0, config.cpus)  # threads that are started from here on inherit it
        return
    cpus = (ctypes.c_int64 * len(config.cpus))(*config.cpus)
    kernels.library.penstock_pin_threads(cpus, len(cpus))


def format_of(config: RankConfig, weights: StoredWeights) -> FormatOf:
    """Return a function that returns the quantised form in which to hold a matrix; None: as floats.

    If the files are quantised, the form is theirs. Otherwise it is the one that the config asks for. The
    function raises `CheckpointError` if a shape in the files contradicts config.json.
    """
    if weights.is_quantized:
        return weights.form_of
    if config.quantization == "none":
        return never_quantized
    bits = _BITS[config.quantization]

    def at_load(parts: Mapping[str, int], in_size: int) -> QuantizedFormat | None:
        if not parts:
            return None
        group_size = default_group_size(bits, in_size)
        return QuantizedFormat(bits=bits, group_size=group_size, scale_dtype=torch.bfloat16, has_zeros=False)

    return at_load
