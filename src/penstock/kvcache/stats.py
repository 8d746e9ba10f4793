"""The statistics of the KV cache, of the store behind it and of sessions, as plain data."""

from __future__ import annotations

import msgspec

from penstock.batch import NO_STORE_USE, StoreUse


class CacheStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The counts of the pool's KV blocks, and of the tokens that were found in the prefix cache."""

    num_blocks: int = 0
    free_blocks: int = 0
    prefix_tokens: int = 0  # of requests that have started, or started again
    prefix_hit_tokens: int = 0  # those of `prefix_tokens` that were found in the prefix cache
    cached_blocks: int = 0  # blocks that a request could find, held ones included
    evicted_blocks: int = 0  # cached blocks that were given up for other content


class StoreStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The counts of KV blocks copied to the store and from it since the start, and how the store was used."""

    stored_blocks: int = 0  # whose parts all ranks have put into the store
    loaded_blocks: int = 0  # whose parts all ranks have got from it
    failed_blocks: int = 0  # that could not be stored or loaded
    use: StoreUse = NO_STORE_USE  # by ranks and core together


class SessionStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The counts of open sessions, of the KV blocks that they keep, and of sessions closed because idle."""

    num_open: int = 0
    kept_blocks: int = 0
    num_reaped: int = 0  # closed because they were idle
