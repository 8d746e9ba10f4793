"""A rank that writes down its memory and its reads: before its model is made, and when it is ready.

Started by `load_memory.py` in place of `penstock.rank.process`; it is that worker, with two calls
observed. Writes `stage-N.json` into the directory named by MEASURED_RANK_DIR.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.process import child
from penstock.process.config import RankConfig
from penstock.rank import process as worker

if TYPE_CHECKING:
    from penstock.rank.rank import RankConnections, Report


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
    """Wrap the making of the model (`models.decoder`) and the status events (`rank.rank`)."""
    from penstock.models.decoder import Decoder
    from penstock.rank import rank

    run_rank, make_decoder = rank.run_rank, Decoder.__init__
    seen: dict[str, int] = {}

    def measured_making(self: Decoder, *arguments: Any, **named: Any) -> None:
        seen.update(private_before=private_bytes(), read_before=bytes_read())
        make_decoder(self, *arguments, **named)

    def measured_run(
        config: RankConfig, epochs: Iterable[RankConnections], report: Report, *, loads_first: bool = False
    ) -> child.ChildFailed | None:
        def measured_report(event: child.StatusEvent) -> None:
            if isinstance(event, child.WeightsLoaded):
                seen.update(told_bytes_read=event.bytes_read, read_loaded=bytes_read())
            elif isinstance(event, child.Ready):
                assert event.rank is not None
                seen.update(block_bytes=event.rank.block_bytes, private_ready=private_bytes())
                path = Path(os.environ["MEASURED_RANK_DIR"], f"stage-{config.stage}.json")
                path.write_text(json.dumps(seen))
            report(event)

        return run_rank(config, epochs, measured_report, loads_first=loads_first)

    Decoder.__init__ = measured_making  # type: ignore[method-assign]
    rank.run_rank = measured_run


if __name__ == "__main__":
    observe()
    child.leave(worker.main())
