"""The modules that run as processes of their own, as `python -m NAME`.

A module that starts a process often may not import the module that the process runs. The names are therefore
strings, and this is the only place that has them. A test checks that each module exists and can be run.
"""

from __future__ import annotations

from typing import Final

SUPERVISOR: Final = "penstock.engine.supervisor.supervisor"  # started by `llm.supervisor_process`
CORE: Final = "penstock.engine.core.core_process"  # by `hosts.local`
RANK: Final = "penstock.rank.process"  # by `hosts.local`
SPARE: Final = "penstock.rank.spare"  # by `hosts.local`
API_PROCESS: Final = "penstock.server.api_process"  # by `engine.supervisor.fronts`
MEASURE: Final = "penstock.planner.measure"  # by `hosts.local`
GRAMMAR_PROVING: Final = "penstock.grammar.proving_process"  # by `grammar.proving`
RAY_DRIVER: Final = "penstock.hosts.launchers.ray_driver"  # by `hosts.launchers.ray_starter`
DRAFTER: Final = "penstock.drafting.drafter_process"  # by `drafting.drafter_child`
TIED_PROCESS: Final = "penstock.hosts.launchers.tied_process"  # by `hosts.launchers.ray_worker`
