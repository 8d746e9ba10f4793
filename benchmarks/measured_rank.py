"""A rank that writes down its memory and its reads: before its model is made, and when it is ready.

Started by `load_memory.py` in place of `penstock.executor.worker`; it is that worker, with two calls
observed. Writes `stage-N.json` into the directory named by MEASURED_RANK_DIR.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.executor import child, worker


def private_bytes() -> int:
    """Private_Clean + Private_Dirty of this process."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    pages = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
    return sum(int(pages[name].split()[0]) * 1024 for name in ("Private_Clean", "Private_Dirty"))


def bytes_read() -> int:
    """All bytes that this process has got from read calls, cached or not."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def observe() -> None:
    """Wrap the making of the model (`executor.loading`) and the status events (`executor.rank`)."""
    from penstock.executor import loading, rank

    run_rank = rank.run_rank
    seen: dict[str, int] = {}

    class MeasuredDecoder(loading.Decoder):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            seen.update(private_before=private_bytes(), read_before=bytes_read())
            super().__init__(*arguments, **named)

    def measured_run(config: Any, epochs: Any, report: Callable[[Any], None]) -> Any:
        def measured_report(event: child.StatusEvent) -> None:
            if isinstance(event, child.Loaded):
                seen.update(block_bytes=event.rank.block_bytes, told_bytes_read=event.rank.bytes_read)
                seen.update(read_loaded=bytes_read())
            elif isinstance(event, child.Ready):
                seen.update(private_ready=private_bytes())
                path = Path(os.environ["MEASURED_RANK_DIR"], f"stage-{config.stage}.json")
                path.write_text(json.dumps(seen))
            report(event)

        return run_rank(config, epochs, measured_report)

    loading.Decoder, rank.run_rank = MeasuredDecoder, measured_run


if __name__ == "__main__":
    observe()
    sys.exit(worker.main())
