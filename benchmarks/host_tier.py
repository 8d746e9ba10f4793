"""What a losslessly packed host tier would bring where pool and tier share one memory: size and speed.

    python benchmarks/host_tier.py MODEL [--text FILE] [--tokens 2048]

Runs a text through the model, takes the blocks out of the cache as `kvstore` would keep them, and packs them:
as they are, and with the two bytes of each bfloat16 number apart, where most of the redundancy is (exponents
lie close together, mantissas look like noise). For each codec that is installed: what is left of the bytes,
and MB/s of raw bytes in and out on one thread. Then what that is worth: blocks that a pool of the same memory
finds in a trace of conversations, with a part of it packed and without. Prints Markdown.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from prefix_trace import conversations, lru_hits

from penstock import LLM, SamplingParams
from penstock.batch import TierOrder
from penstock.runner.kv_transfer import KVTransfer

BLOCK = 32  # the default
Codec = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]


def codecs() -> dict[str, Codec]:
    """Those of the standard library, and of others if they are there."""
    found: dict[str, Codec] = {"zlib 1": (lambda raw: zlib.compress(raw, 1), zlib.decompress)}
    try:
        import zstandard

        for level in (1, 3):
            pack = zstandard.ZstdCompressor(level=level).compress
            found[f"zstd {level}"] = pack, zstandard.ZstdDecompressor().decompress
    except ModuleNotFoundError:
        pass
    try:
        import lz4.frame

        found["lz4"] = lz4.frame.compress, lz4.frame.decompress
    except ModuleNotFoundError:
        pass
    return found


def keep_what_is_saved() -> dict[bytes, bytes]:
    """From now on whatever is taken out of a cache is kept here too."""
    taken: dict[bytes, bytes] = {}
    save = KVTransfer._save

    def save_and_keep(self: KVTransfer, orders: Sequence[TierOrder]) -> None:
        for order in orders:
            exported = self._codec.export_blocks([(kv, order.block) for kv in self._kv])
            taken.update(zip(self._all_keys(order.name), exported, strict=True))
        save(self, orders)

    KVTransfer._save = save_and_keep  # type: ignore[method-assign]
    return taken


def blocks_of(model: str, text: Path | None, num_tokens: int) -> list[bytes]:
    """Records of the whole blocks of a text's beginning, or of random ids, layer by layer."""
    taken = keep_what_is_saved()
    with LLM(model, distributed_executor_backend="inprocess", dtype="bfloat16", kv_host_bytes=1 << 30) as llm:
        prompt = [int(token) for token in np.random.default_rng(0).integers(100, 400, num_tokens)]
        if text is not None:
            prompt = llm.get_tokenizer().encode(text.read_text()[: 8 * num_tokens])[:num_tokens]
        one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        llm.generate({"prompt_token_ids": prompt}, one)
        while (stats := llm.stats()) is None or stats.store.stored_blocks < len(prompt) // BLOCK:
            llm.generate({"prompt_token_ids": [5]}, one)
    return list(taken.values())


def apart(raw: bytes) -> bytes:
    """The low bytes of all 16-bit numbers, then the high ones."""
    return np.frombuffer(raw, np.uint8).reshape(-1, 2).T.tobytes()


def together(packed: bytes) -> bytes:
    return np.frombuffer(packed, np.uint8).reshape(2, -1).T.tobytes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, help="of words; random ids without it")
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    blocks = blocks_of(options.model, options.text, options.tokens)
    num_bytes = sum(map(len, blocks))
    print(f"{len(blocks)} records, {num_bytes / 1e6:.2f} MB\n")
    print("| codec | bytes | left of them | packs, MB/s | unpacks, MB/s |\n|---|---|---|---|---|")
    best = 1.0
    for name, (pack, unpack) in codecs().items():
        for form, before, after in (("as they are", bytes, bytes), ("bytes apart", apart, together)):
            began = time.perf_counter()
            packed = [pack(before(block)) for block in blocks]
            packed_at = time.perf_counter()
            back = [after(unpack(block)) for block in packed]
            took = time.perf_counter() - packed_at
            assert back == blocks, "nothing is lost"
            share = sum(map(len, packed)) / num_bytes
            best = min(best, share)
            speeds = f"{num_bytes / 1e6 / (packed_at - began):.0f} | {num_bytes / 1e6 / took:.0f}"
            print(f"| {name} | {form} | {share:.2f} | {speeds} |")
    print(f"\nA pool of the same memory, half of it packed to {best:.2f}:\n")
    print("| blocks of memory | found, all of it a pool | found, if packed blocks cost nothing to unpack |")
    print("|---|---|---|")
    trace = conversations(seed=0, num_requests=600)
    wanted = sum(len(request.hashes) for request in trace)
    for num_blocks in (256, 512, 1024, 2048):
        more = round(num_blocks / 2 + num_blocks / 2 / best)
        plain, packed_too = sum(lru_hits(trace, num_blocks)), sum(lru_hits(trace, more))
        print(f"| {num_blocks} | {plain / wanted:.1%} | {packed_too / wanted:.1%} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
