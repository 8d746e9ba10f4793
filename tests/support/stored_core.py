"""A core with a store, over ranks that hold tokens where keys and values would be."""

from __future__ import annotations

from typing import Any

from fake_catalogue import FakeCatalogue
from fakes import CoreRig

BLOCK = 4


def rig(**settings: Any) -> tuple[CoreRig, FakeCatalogue]:
    """An engine with a store, and what the store has."""
    catalogue = settings.pop("catalogue", None) or FakeCatalogue()
    return CoreRig(**{"eviction": "lru", "block_size": BLOCK, "catalogue": catalogue, **settings}), catalogue


def again(one: CoreRig, catalogue: FakeCatalogue, **settings: Any) -> CoreRig:
    """Another engine over the same store."""
    other, _ = rig(catalogue=catalogue, **settings)
    other.executor.stored = one.executor.stored
    return other


def run(one: CoreRig, name: str, prompt: list[int], **sampling: Any) -> int:
    """Tokens that were found for it."""
    one.add(name, prompt, **{"max_tokens": 4, "ignore_eos": True, **sampling})
    one.run_until_idle()
    return one.updates[name][0].num_cached_tokens


def settle_store(one: CoreRig) -> None:
    """Let what was named last be stored: its order goes out with the next plan, at the latest a probe."""
    for _ in range(8):
        one.clock.advance(1.0)
        one.step(timeout_s=1.0)


def tokens_of(one: CoreRig, name: str) -> list[int]:
    """What a request has got so far."""
    return [token for update in one.updates[name] for token in update.token_ids]
