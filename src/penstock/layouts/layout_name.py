"""The name of a layout, as plans, benchmarks and reports write it."""

from __future__ import annotations


def layout_name(pp: int, tp: str, dp: int = 1) -> str:
    """Return a name such as "PP 2 x TP 8 x DP 2".

    Args:
        pp: number of stages.
        tp: number of ranks of every stage, or of each stage, such as "4,2".
        dp: number of replicas; the name leaves out a single one.
    """
    parts = [f"PP {pp}", f"TP {tp}", *([f"DP {dp}"] if dp > 1 else [])]
    return " x ".join(parts)
