"""Decides how many drafts (guessed tokens) of each row are worth the time that a step spends on them.

A step over n tokens takes C(n) seconds. It yields one token for each row, and each draft adds, on average, as
much of a token as its chance to be right. Drafts are added in falling order of that chance, as long as the
step yields no fewer tokens a second than without the next one:

    (tokens + chance) / C(n + 1)  >=  tokens / C(n)

While a step is bound by reading weights, C hardly grows and drafts cost next to nothing. Where a step is
bound by computing (many rows, or a slow processor), a draft must be nearly certain, and with more rows no
draft is worth its time. So speculation ends by itself where it would lose, and comes back when rows become
few or the text predictable.

The d-th draft of a row counts with chance ** d: it is of use only if all before it are right. Pure
arithmetic.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from penstock.speculation.drafter import Draft

LEAST_CHANCE = 0.2  # a less likely draft is never sent: what a step costs is not known so exactly
_LEAST_S = 1e-9  # no step counts as shorter
_MARGIN = 0.02  # the part of the rate that a draft must gain


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
        drafts: one for each row that has any.
        num_tokens: tokens of the step without drafts, at least one for each row.
        seconds: returns the time of a step of so many tokens, which grows with them.

    Returns:
        [len(drafts)] the number of tokens of each draft.
    """
    sizes = [0] * len(drafts)
    # The next draft of each row, the likeliest first; it can be added only behind the one before it.
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
