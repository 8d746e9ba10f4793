"""A supervisor whose core follows a rule of `token_return.py`: started by it in place of the supervisor."""

from __future__ import annotations

import sys

from stand_in import use_stand_in

from penstock.engine.supervisor import supervisor
from penstock.process import entry_points

if __name__ == "__main__":
    use_stand_in(entry_points.CORE, "ruled_core")
    sys.exit(supervisor.main())
