"""The ids that would complete a bad word next, on the last stage.

A word is a sequence of ids. Its last id is forbidden while the newest generated tokens are its other ids.
Only generated tokens count: a word that would begin in the prompt is not forbidden. No state is kept beside
the words, so that a request which starts again in another row forbids the same. Used by
`sample.logit_changes`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BadWords:
    """The bad words of one request.

    Args:
        words: sequences of ids, none empty.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self.last_ids = sorted({word[-1] for word in words})
        self._always = np.array(sorted({word[-1] for word in words if len(word) == 1}), dtype=np.int64)
        # Last but one id of a word -> its ids but the last, and the last.
        self._behind: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for word in words:
            if len(word) > 1:
                self._behind[word[-2]].append((list(word[:-1]), word[-1]))
        self._longest = max(map(len, words), default=1) - 1

    def forbidden(self, output: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ids that may not come next, each one of `last_ids`; an id may be repeated.

        Args:
            output: [num_generated] the ids that the request has generated so far.
        """
        if not self._behind or not len(output):
            return self._always
        tail = output[-self._longest :].tolist()
        ends = [last for begin, last in self._behind.get(tail[-1], ()) if tail[-len(begin) :] == begin]
        return np.concatenate([self._always, np.array(ends, dtype=np.int64)]) if ends else self._always
