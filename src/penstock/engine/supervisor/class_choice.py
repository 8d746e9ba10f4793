"""Implements `--numeric-class`: checks that all ranks can compute in the class that was chosen.

Ranks of one numeric class compute the same bits. Called by `engine.supervisor.launch`, before a process
starts. Whether the kernels can be built for the class on a host is found out later, by the ranks there
(`rank.compute_choice`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.config.engine import ParallelConfig
from penstock.errors import UsageError
from penstock.families.spec import ModelSpec
from penstock.hosts.resources import HostResources
from penstock.kernels.cpu.library import KERNEL_NAMES, parse_kernels
from penstock.kernels.cpu.targets import AUTO


def require_class(
    parallel: ParallelConfig,
    spec: ModelSpec,
    dtype: str,
    devices: Sequence[str],
    hosts: Sequence[HostResources],
) -> None:
    """Raise `UsageError` if a class was chosen, but a host cannot compute in it or torch would compute.

    Args:
        dtype: type of the numbers of weights and hidden states.
        devices: device of each rank.
    """
    wanted = parallel.numeric_class
    if wanted == AUTO:
        return
    for why in _without_kernels(parallel, spec, dtype, devices):
        raise UsageError(
            f"--numeric-class is {wanted}, but {why}.",
            remedy="Leave --numeric-class out: it applies to our CPU kernels only.",
            param="numeric_class",
        )
    for host in hosts:
        if not has_class(parallel, host):
            raise UsageError(
                f"--numeric-class is {wanted}, but {host.name} supports "
                f"{', '.join(host.numeric_classes) or 'none'}.",
                remedy=_remedy(hosts),
                param="numeric_class",
            )


def has_class(parallel: ParallelConfig, host: HostResources) -> bool:
    """Return whether a host can compute in the class that was chosen, if any was."""
    return parallel.numeric_class in (AUTO, *host.numeric_classes)


def _without_kernels(
    parallel: ParallelConfig, spec: ModelSpec, dtype: str, devices: Sequence[str]
) -> Iterator[str]:
    """Yield the reasons why torch, and not our kernels, would compute all or a part of the model."""
    if any(device != "cpu" for device in devices):
        yield "some ranks run on a GPU"
    if parse_kernels(parallel.kernels).enabled != frozenset(KERNEL_NAMES):
        yield f"--kernels is {parallel.kernels}"
    if spec.implementation != "penstock":
        yield "the layers are those of transformers"
    if spec.latent is not None:
        yield "torch rotates the keys of this model and chooses its experts"
    if dtype == "float16":
        yield "our kernels have no float16"


def _remedy(hosts: Sequence[HostResources]) -> str:
    common = [
        name for name in hosts[0].numeric_classes if all(name in host.numeric_classes for host in hosts)
    ]
    if not common:
        return "Leave --numeric-class out: no class is available on all hosts."
    return f"Use --numeric-class {common[-1]}, the best class available on all hosts."
