"""A core that follows a rule of `token_return.py` in place of the engine's own. The rule's name is in the
environment, as `TOKEN_RETURN_RULE`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from penstock.engine.core import core_process
from penstock.scheduler.chunking import TokenBudget
from penstock.scheduler.plan_builder import PlanBuilder

RULE_ENV = "TOKEN_RETURN_RULE"
DEFERRED, LOCK_STEP, UNEQUAL = "deferred, equal", "lock-step, equal", "deferred, unequal"


def follow(rule: str) -> None:
    """Change the rules of this process."""
    finish = PlanBuilder.finish

    def finish_in_lock_step(plan: PlanBuilder, *, consume_through: int, **others: Any) -> Any:
        return finish(plan, consume_through=plan.step_id - 1, **others)

    def take_all(budget: TokenBudget, num_decoding: int, *others: Any) -> int:
        return num_decoding

    if rule == LOCK_STEP:
        PlanBuilder.finish = finish_in_lock_step  # type: ignore[assignment, method-assign]
    elif rule == UNEQUAL:
        TokenBudget.decode_quota = take_all  # type: ignore[assignment, method-assign]
    elif rule != DEFERRED:
        raise ValueError(f"{RULE_ENV} is {rule!r}, which is no rule")


if __name__ == "__main__":
    follow(os.environ[RULE_ENV])
    sys.exit(core_process.main())
