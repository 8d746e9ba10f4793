"""The aliases of tokens, which show which texts begin alike, and nothing else of the texts.

    tokens     t0      t1      t2            state i+1 = hash(key, state i, token i)
    states  s0 ──▶ s1 ──▶ s2 ──▶ s3          alias of token i = 31 bits of state i+1

The scheduler compares tokens only together with all that stand before them: names of blocks hang on the whole
beginning, and a guess is compared with the token that came in its place. So an alias may hang on the whole
beginning, too. Equal texts have equal aliases, and the same token elsewhere has others, so that there is
nothing to count; without the key, which is made up for each file and written nowhere, none can be tried out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

_STATE_BYTES = 16
_ALIAS_MASK = 2**31 - 1  # as many ids as the core takes for a vocabulary
NO_ALIAS = 0  # of tokens that are not compared


class TokenChain:
    """The states of one request's text.

    Args:
        key: the key of the file.
        root: what texts must share besides, to be alike.
    """

    def __init__(self, key: bytes, root: bytes = b"") -> None:
        self._key = key
        self._states = [hashlib.blake2b(root, key=key, digest_size=_STATE_BYTES).digest()]
        self._first = 0  # tokens before the first state that is kept

    def copy(self) -> TokenChain:
        """Return another text that is the same so far."""
        other = TokenChain(self._key)
        other._states, other._first = list(self._states), self._first
        return other

    def extend(self, token_ids: Sequence[int]) -> list[int]:
        """Return the aliases of tokens that follow, and go on behind them."""
        states = self._following(self._states[-1], token_ids)
        self._states += states
        return _aliases(states)

    def aliases_behind(self, num_known: int, token_ids: Sequence[int]) -> list[int]:
        """Return the aliases that tokens would have behind the first `num_known`."""
        index = min(max(num_known - self._first, 0), len(self._states) - 1)
        return _aliases(self._following(self._states[index], token_ids))

    def forget_past(self) -> None:
        """Forget the states before its end: no guess is compared there any more."""
        self._first += len(self._states) - 1
        del self._states[:-1]

    def _following(self, state: bytes, token_ids: Sequence[int]) -> list[bytes]:
        states, key, blake2b = [], self._key, hashlib.blake2b
        for token_id in token_ids:
            state = blake2b(
                state + (token_id & 0xFFFFFFFF).to_bytes(4, "little"), key=key, digest_size=_STATE_BYTES
            ).digest()
            states.append(state)
        return states


def _aliases(states: Sequence[bytes]) -> list[int]:
    return [int.from_bytes(state[:4], "little") & _ALIAS_MASK for state in states]
