"""Writes numbers of bytes as text, for the commands about models."""

from __future__ import annotations


def size_text(num_bytes: int) -> str:
    """Return a size in the largest unit of which there is one."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} B"
