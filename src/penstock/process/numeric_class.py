"""The numeric classes of the ranks of a pipe: ranks of one class compute the same bits.

Each rank reports its class (`rank.compute_choice`). With our kernels, the class is their instruction set and
a digest of all else that decides their bits; with torch, it is torch's version and the device. If all ranks
of a pipe have one class, the pipe gives the same bits as every other pipe of that class, however the model is
cut. The core calls this module, because the names of KV blocks depend on the class. What users are told is in
`engine.supervisor.numeric_classes`.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.batch import RankLoaded


def class_of_pipe(ranks: Sequence[RankLoaded]) -> str:
    """Return the numeric class of a pipe: a text that is the same for pipes that compute the same bits.

    If all ranks have one class, it is that class. If the classes are mixed, the text says which layers are
    computed in which class.

    Args:
        ranks: what the ranks have reported, stage by stage; those of one stage stand side by side.
    """
    classes = {rank.numeric_class for rank in ranks}
    if len(classes) < 2:
        return next(iter(classes), "")
    return "; ".join(f"up to layer {rank.end_layer} {rank.numeric_class}" for rank in ranks)
