"""Replaces the tokens in a recording by aliases: they show which texts begin alike, and nothing else.

    tokens     t0      t1      t2            state i+1 = hash(key, state i, token i)
    states  s0 ──▶ s1 ──▶ s2 ──▶ s3          alias of token i = 31 bits of state i+1

The scheduler compares tokens only together with all tokens before them: the name of a block follows from the
whole text up to its end, and a guess is compared with the token that came at its position. So an alias may
follow from the whole text before it, too. Texts that begin alike have the same aliases there. The same token
behind another text has another alias, so that a reader of the file cannot count how often a token occurs. The
key is made for each file and written nowhere; without it, a reader cannot try out which tokens give an alias.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

_STATE_BYTES = 16
_ALIAS_MASK = 2**31 - 1  # the core accepts vocabularies of so many ids
NO_ALIAS = 0  # in place of tokens that the scheduler does not compare


class TokenChain:
    """The chain of states for the tokens of one request.

    Args:
        key: the key of the file.
        root: bytes that stand before the first token: two texts have equal aliases only if their roots are
            equal.
    """

    def __init__(self, key: bytes, root: bytes = b"") -> None:
        self._key = key
        self._states = [hashlib.blake2b(root, key=key, digest_size=_STATE_BYTES).digest()]
        self._first = 0  # number of tokens before the first state that is kept

    def copy(self) -> TokenChain:
        """Return another chain that has the same tokens so far."""
        other = TokenChain(self._key)
        other._states, other._first = list(self._states), self._first
        return other

    def extend(self, token_ids: Sequence[int]) -> list[int]:
        """Append tokens to the text, and return their aliases."""
        states = self._following(self._states[-1], token_ids)
        self._states += states
        return _aliases(states)

    def aliases_behind(self, num_known: int, token_ids: Sequence[int]) -> list[int]:
        """Return the aliases that tokens would have behind the first `num_known` tokens of the text.

        If the state there is not kept, the nearest kept state stands in for it.
        """
        index = min(max(num_known - self._first, 0), len(self._states) - 1)
        return _aliases(self._following(self._states[index], token_ids))

    def forget_past(self) -> None:
        """Forget all states but the last one: guesses will be compared only behind the whole text."""
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
