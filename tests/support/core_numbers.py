"""The numbers of a core, made of those that a test names; fields of all parts are named side by side."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.engine.stats import CoreStats

QUIET = CoreStats(step_id=0, inflight=0, last_result_age_s=0, stalled_s=0, stall_limit_s=0, epoch=0)


def core_stats(base: CoreStats = QUIET, **numbers: Any) -> CoreStats:
    """`base` with these numbers; what a number belongs to follows from its name."""

    def taken(part: msgspec.Struct, prefix: str = "") -> dict[str, Any]:
        return {
            name: numbers.pop(prefix + name) for name in part.__struct_fields__ if prefix + name in numbers
        }

    def changed(part: Any, prefix: str = "", **more: Any) -> Any:
        return msgspec.structs.replace(part, **taken(part, prefix), **more)

    use = changed(changed(base.store.use, "store_"))
    made = changed(
        base,
        scheduler=changed(base.scheduler),
        cache=changed(base.cache),
        store=changed(base.store, use=use),
        sessions=changed(base.sessions, "sessions_"),
    )
    assert not numbers, f"no part has {sorted(numbers)}"
    assert isinstance(made, CoreStats)
    return made
