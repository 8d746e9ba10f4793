"""The digest of a residency table, computed from what the table says."""

from __future__ import annotations

from penstock.residency import _MASK, Residency, _mix, _short


def recomputed(table: Residency) -> int:
    """Return the digest of the table as it stands.

    It equals `table.digest` only if nothing but the methods of the table has changed it.
    """
    total = sum(_mix(_short(name), block) for block, name in table.names.items())
    for resident in table.rows.values():
        total += resident.key * max(resident.length, 0) + resident.blocks_part
    return total & _MASK or 1
