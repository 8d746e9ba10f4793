"""The number of drafts of each row that are worth their time.

A step over n tokens takes C(n) seconds and yields one token for each row, and for each draft its chance of
being accepted. Drafts are added in falling order of that chance, as long as the step yields no fewer tokens a
second than without the next one:

    (tokens + chance) / C(n + 1)  >=  tokens / C(n)

While a step is bound by reading weights, C hardly grows and drafts cost next to nothing; where it is bound by
computing (many rows, or a slow processor) a draft must be nearly certain, and soon none is worth it. So
speculation ends by itself where it would lose, and comes back when rows become few or the text predictable.

The d-th draft of a row counts with chance ** d: it is of use only if all before it are right. Pure
arithmetic.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from penstock.speculation.drafter import Draft

LEAST_CHANCE = 0.2  # below, a draft is never sent: what a step costs is not known so exactly
_LEAST_S = 1e-9  # of a step
_MARGIN = 0.02  # of the rate, that a draft must gain


def least_chance(num_tokens: int, seconds: Callable[[int], float]) -> float:
    """Return the chance from which on a first draft is worth its time; above 1: none is.

    Args:
        num_tokens: tokens of the step without drafts.
        seconds: as for `window_sizes`.
    """
    now, longer = max(seconds(num_tokens), _LEAST_S), max(seconds(num_tokens + 1), _LEAST_S)
    margin = _MARGIN if longer > now else 0.0
    return max(LEAST_CHANCE, num_tokens * ((1.0 + margin) * longer / now - 1.0))


def window_sizes(drafts: Sequence[Draft], num_tokens: int, seconds: Callable[[int], float]) -> list[int]:
    """Choose how many tokens of each draft to send.

    Args:
        drafts: those of the rows that bring any.
        num_tokens: tokens of the step without drafts, at least one for each row.
        seconds: the time that a step of so many tokens takes; grows with them.

    Returns:
        [len(drafts)] tokens of each.
    """
    sizes = [0] * len(drafts)
    # Chances in falling order; a row's next draft comes into question when the one before was taken.
    waiting = [(-draft.chance, index) for index, draft in enumerate(drafts) if draft.token_ids]
    heapq.heapify(waiting)
    yielded, now = float(num_tokens), max(seconds(num_tokens), _LEAST_S)
    while waiting:
        chance, index = -waiting[0][0], waiting[0][1]
        longer = max(seconds(num_tokens + 1), _LEAST_S)
        least_gain = _MARGIN if longer > now else 0.0
        if chance < LEAST_CHANCE or (yielded + chance) / longer < (1.0 + least_gain) * yielded / now:
            break
        sizes[index] += 1
        yielded, now, num_tokens = yielded + chance, longer, num_tokens + 1
        draft = drafts[index]
        if sizes[index] < len(draft.token_ids):
            heapq.heapreplace(waiting, (-chance * draft.chance, index))
        else:
            heapq.heappop(waiting)
    return sizes
