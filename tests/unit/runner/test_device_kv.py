"""How many blocks a rank offers, and what it allocates: A17, D9."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.attention.torch_paged import TorchPagedAttention
from penstock.errors import NotEnoughMemoryError
from penstock.kernels.cpu.ops import HeadShape
from penstock.process.host_memory import _cgroup_available, _host_available
from penstock.runner.device_kv import DeviceKV
from penstock.runner.kv_demand import KVDemand

MIB = 1 << 20


def storage(num_layers: int = 2, block_size: int = 16) -> DeviceKV:
    backend = TorchPagedAttention(HeadShape(num_heads=8, num_kv_heads=4, head_dim=8), torch.bfloat16)
    return DeviceKV(backend, num_layers=num_layers, block_size=block_size, device=torch.device("cpu"))


def demand(**changes: int | None) -> KVDemand:
    values = {
        "max_model_len": 100,
        "max_num_seqs": 3,
        "num_blocks": None,
        "kv_cache_bytes": None,
        "num_sharers": 2,
    }
    return KVDemand(**{**values, **changes})


def test_a17_storage_is_for_the_own_layers_only() -> None:
    kv = storage(num_layers=3).allocate(5)
    assert len(kv) == 3
    assert all(layer.key.shape == layer.value.shape == (80, 4, 8) for layer in kv)
    assert sum(layer.key.nbytes + layer.value.nbytes for layer in kv) == 5 * storage(num_layers=3).block_bytes
    addresses = {tensor.data_ptr() for layer in kv for tensor in (layer.key, layer.value)}
    assert len(addresses) == 6


def test_unused_storage_is_zero_and_costs_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    kv = storage(num_layers=4).allocate(32 * 1024)  # 256 MiB
    assert resident() - before < 32 * MIB
    assert not kv[3].key[-1].any()
    kv[0].key[12345] = 1.5
    assert kv[0].key[12345].tolist() == [[1.5] * 8] * 4
    assert not kv[0].value[12345].any()


def test_the_default_is_a_share_of_the_memory_but_no_more_than_can_be_used() -> None:
    block = storage().block_bytes
    assert block == 16 * 2 * 2 * 4 * 8 * 2
    # 100 tokens are 7 blocks; 3 requests of full length use 21 at most.
    assert storage().max_blocks(demand(), available=10**9) == 21
    assert storage().max_blocks(demand(), available=8 * 10 * block) == 10  # a quarter, by two ranks
    with pytest.raises(NotEnoughMemoryError, match=r"6400 tokens needs 1\.6 MiB .* has 1\.5 MiB"):
        storage().max_blocks(demand(max_model_len=6400), available=12 * MIB)


def test_a_budget_in_bytes_is_kept() -> None:
    block = storage().block_bytes
    assert storage().max_blocks(demand(kv_cache_bytes=50 * block + 7), available=100 * block) == 50
    with pytest.raises(NotEnoughMemoryError, match="50 KV blocks need"):
        storage().max_blocks(demand(kv_cache_bytes=50 * block), available=99 * block)  # for two ranks
    with pytest.raises(NotEnoughMemoryError, match="max-model-len"):
        storage().max_blocks(demand(kv_cache_bytes=6 * block), available=10**9)


def test_a_number_of_blocks_is_kept_unless_it_cannot_fit() -> None:
    block = storage().block_bytes
    assert storage().max_blocks(demand(num_blocks=2), available=10**9) == 2
    with pytest.raises(NotEnoughMemoryError, match=r"9 KV blocks need .* Use --num-blocks 8 or fewer"):
        storage().max_blocks(demand(num_blocks=9), available=17 * block)  # for two ranks


def test_free_memory_is_what_the_host_and_the_control_group_leave(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:   64 kB\n")
    assert _host_available(meminfo) == 65536
    assert _cgroup_available(tmp_path, 77) == 77  # no control group
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert _cgroup_available(tmp_path, 77) == 77
    (tmp_path / "memory.max").write_text("1500\n")
    (tmp_path / "memory.stat").write_text("anon 300\nfile 700\ninactive_file 500\nactive_file 100\n")
    assert _cgroup_available(tmp_path, 77) == 1100  # files that were read are given up
    (tmp_path / "memory.stat").write_text("anon 1000\n")
    assert _cgroup_available(tmp_path, 77) == 500


@pytest.mark.parametrize(("device", "budget"), [("cuda", 1000 - 300), ("cpu", 250)])
def test_f9_the_cache_gets_what_plans_and_margin_leave_and_of_a_cpu_a_quarter(
    device: str, budget: int
) -> None:
    """In MiB; one rank, and requests that could use all of it."""
    large = {"max_model_len": 1 << 20, "max_num_seqs": 1 << 10, "num_sharers": 1}
    wanted = demand(**large, reserved_bytes=300 * MIB)
    blocks = wanted.max_blocks(block_bytes=MIB, block_size=1 << 20, available=1000 * MIB, device=device)
    assert blocks == budget


def test_f9_a_cpu_with_little_memory_gives_the_cache_less_than_a_quarter() -> None:
    large = {"max_model_len": 1 << 20, "max_num_seqs": 1 << 10, "num_sharers": 2}
    wanted = demand(**large, reserved_bytes=40 * MIB)
    assert wanted.max_blocks(block_bytes=MIB, block_size=1 << 20, available=100 * MIB, device="cpu") == 10
    with pytest.raises(NotEnoughMemoryError, match=r"has 0\.0 MiB \(60\.0 MiB .*; 40\.0 MiB are reserved"):
        demand(**large, reserved_bytes=40 * MIB).max_blocks(
            block_bytes=MIB, block_size=1 << 20, available=60 * MIB, device="cuda"
        )


def test_f9_of_a_cpu_not_all_is_kept_for_plans_and_nothing_where_the_user_has_said_how_much() -> None:
    wanted = demand(max_model_len=1 << 20, max_num_seqs=1 << 10, num_sharers=1, reserved_bytes=1000 * MIB)
    assert wanted.max_blocks(block_bytes=MIB, block_size=1 << 20, available=100 * MIB, device="cpu") == 10
    wanted = demand(num_blocks=99, num_sharers=1, reserved_bytes=1000 * MIB)
    assert wanted.max_blocks(block_bytes=MIB, block_size=16, available=100 * MIB, device="cpu") == 99


def test_f9_blocks_that_leave_no_room_for_plans_are_refused() -> None:
    wanted = demand(num_blocks=61, num_sharers=1, reserved_bytes=40 * MIB)
    with pytest.raises(NotEnoughMemoryError, match=r"but 60\.0 MiB are free; 40\.0 MiB .* --num-blocks 60"):
        wanted.max_blocks(block_bytes=MIB, block_size=16, available=100 * MIB, device="cuda")
