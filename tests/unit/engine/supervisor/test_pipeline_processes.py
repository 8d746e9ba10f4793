"""When the members of several replicas meet. What happens to them later: tests/fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.engine.supervisor.pipeline_processes import begin_together


@dataclass
class OneReplica:
    """Stands for `PipelineProcesses`."""

    have_loaded: bool = False
    num_begun: int = 0

    def begin(self) -> None:
        self.num_begun += 1


def test_i4_no_replica_begins_before_the_weights_of_all_are_in_memory() -> None:
    """It would size its KV cache by memory that another's weights are going to take."""
    first, second = OneReplica(have_loaded=True), OneReplica()
    replicas: list[Any] = [first, second]
    assert not begin_together(replicas)
    assert (first.num_begun, second.num_begun) == (0, 0)
    second.have_loaded = True
    assert begin_together(replicas)
    assert (first.num_begun, second.num_begun) == (1, 1)
