"""A supervisor that keeps a standby of the last of two stages, from the first moment on.

Run as `python -m standby_supervisor` in place of the supervisor that an `LLM` starts.
"""

from __future__ import annotations

import functools
import sys

from penstock.engine.supervisor import standbys, supervisor

MODULE = "standby_supervisor"
STAGE = 1

if __name__ == "__main__":
    standbys.WHOLE_S = 0.0
    standbys.KEEP_FREE_BYTES = 0
    supervisor.Supervisor = functools.partial(  # type: ignore[assignment, misc]
        supervisor.Supervisor, standby_stages=(STAGE,)
    )
    sys.exit(supervisor.main())
