"""Where a rank lives."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from checkpoints import make_checkpoint
from penstock.errors import UsageError
from penstock.process.config import RankConfig
from penstock.rank.loading import build_runner, device_of, load_rank
from rank_configs import make_rank_configs


@pytest.fixture
def rank(tmp_path: Path) -> RankConfig:
    return make_rank_configs(make_checkpoint(tmp_path), 2)[1]


def test_i13_a_rank_lives_where_it_was_put(rank: RankConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of(rank) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of(msgspec.structs.replace(rank, device="cuda:1")) == torch.device("cuda", 1)


@pytest.mark.parametrize(("num_gpus", "seen"), [(0, "sees no GPU"), (1, "sees only 1")])
def test_i13_a_gpu_that_is_not_there_is_refused(
    num_gpus: int, seen: str, rank: RankConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(UsageError, match=f"stage 1 is to run on cuda:1, .* {seen}.*--device cpu"):
        device_of(msgspec.structs.replace(rank, device="cuda:1"))


def test_only_stages_that_embed_or_sample_keep_token_ids(tmp_path: Path) -> None:
    """Issue 25, point 5."""
    sizes = []
    for config in make_rank_configs(make_checkpoint(tmp_path), 3):
        loaded = load_rank(config, lambda done, total: None)
        rows = build_runner(config, loaded, loaded.storage.allocate(4)).rows
        sizes.append(rows.token_ids.size)
    assert sizes == [4 * 257, 0, 4 * 257]  # rows, and positions of each with one to come
