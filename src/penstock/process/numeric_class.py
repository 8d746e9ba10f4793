"""The numeric classes of the ranks of a pipe: ranks of one class compute the same bits.

Each rank says in which it computes (`rank.compute_choice`): the instruction set of its kernels and a digest
of all else that decides their bits, or torch's version and device. A pipe of one class gives the bits of
every other pipe of that class, however it is cut. Called by the core, which names KV blocks by it; what users
are told is in `engine.supervisor.numeric_classes`.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.batch import RankLoaded


def class_of_pipe(ranks: Sequence[RankLoaded]) -> str:
    """Return the class that pipes have in common if they compute the same bits.

    That is the class of all ranks where they have one. Where classes are mixed it says which layers are
    computed in which.

    Args:
        ranks: stage by stage, the ranks of one stage side by side.
    """
    classes = {rank.numeric_class for rank in ranks}
    if len(classes) < 2:
        return next(iter(classes), "")
    return "; ".join(f"up to layer {rank.end_layer} {rank.numeric_class}" for rank in ranks)
