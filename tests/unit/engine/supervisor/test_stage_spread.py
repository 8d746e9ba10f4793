"""How stages are spread over hosts anew: blocks of neighbours, as even as memory allows, few moved."""

from __future__ import annotations

import pytest

from penstock.engine.supervisor.stage_spread import MAX_PERMUTED, HostRoom, StageDemand, spread
from penstock.errors import NotEnoughMemoryError

MIB = 1 << 20


def stages(*hosts: str) -> list[StageDemand]:
    """Stages of 10 MiB, of which 8 are weights; "" stands for a host that is lost."""
    return [StageDemand(host=host, num_bytes=10 * MIB, held_bytes=8 * MIB if host else 0) for host in hosts]


def rooms(**free: float) -> list[HostRoom]:
    return [HostRoom(name=name, free_bytes=int(mib * MIB)) for name, mib in free.items()]


@pytest.mark.parametrize(
    ("before", "left", "after"),
    [
        ("a a b b", "a", "a a a a"),
        ("a b c", "a b", "a b b"),
        ("a b c", "a c", "a a c"),
        ("a a b b c c", "a c", "a a a c c c"),
        ("a b b c", "a c", "a a c c"),
        ("a a", "a b", "a b"),
    ],
)
def test_r15_stages_of_a_lost_host_go_to_the_others_evenly(before: str, left: str, after: str) -> None:
    there = left.split()
    own = stages(*(host if host in there else "" for host in before.split()))
    assert spread(own, rooms(**dict.fromkeys(there, 100.0))) == after.split()


def test_r15_memory_decides_where_even_parts_do_not_fit() -> None:
    own = stages("a", "", "", "c")
    assert spread(own, rooms(a=0, c=20)) == ["a", "c", "c", "c"]
    assert spread(own, rooms(a=10, c=10)) == ["a", "a", "c", "c"]
    assert spread(own, rooms(a=20, c=9)) == ["a", "a", "a", "c"]


def test_r15_weights_that_are_let_go_make_room_on_their_host() -> None:
    own = stages("a", "b", "")
    with pytest.raises(NotEnoughMemoryError):
        spread(own, rooms(a=1, b=1))
    assert spread(own, rooms(a=10, b=2)) == ["a", "a", "b"], "8 MiB of stage 1 and 2 that were free"


def test_r15_a_rank_that_is_lost_on_a_host_that_is_there_needs_its_memory_again() -> None:
    dead = StageDemand(host="a", num_bytes=10 * MIB, missing_bytes=10 * MIB)
    assert spread([dead, *stages("b")], rooms(a=10, b=0)) == ["a", "b"]
    with pytest.raises(NotEnoughMemoryError, match="need 10 MiB; 9 MiB on a, 0 MiB on b are free"):
        spread([dead, *stages("b")], rooms(a=9, b=-1))


def test_r15_a_host_gets_another_stage_where_the_host_tiers_of_its_own_have_room_to_fill_up() -> None:
    kept = StageDemand(host="a", num_bytes=15 * MIB, held_bytes=8 * MIB, growth_bytes=5 * MIB)
    assert spread([kept, *stages("")], rooms(a=15)) == ["a", "a"]
    with pytest.raises(NotEnoughMemoryError) as caught:
        spread([kept, *stages("")], rooms(a=14))
    assert caught.value.message.endswith(
        "14 MiB on a are free, of which KV blocks of other stages may use 5 MiB."
    )
    assert "lower --kv-cache-bytes or --kv-host-bytes" in caught.value.remedy
    assert spread([kept, *stages("")], rooms(a=0, c=10)) == ["a", "c"], "who gets no more stays as it is"


def test_r15_where_nothing_fits_the_numbers_are_named() -> None:
    with pytest.raises(NotEnoughMemoryError) as caught:
        spread(stages("a", "", ""), rooms(a=5, b=6))
    assert caught.value.message == (
        "weights and KV cache of the lost stages need 20 MiB; 5 MiB on a, 6 MiB on b are free."
    )
    assert caught.value.remedy


def test_r15_a_stage_on_a_gpu_gets_one_that_no_other_stage_has() -> None:
    own = [StageDemand(host=host, num_bytes=0, num_gpus=1) for host in ("a", "")]
    assert spread(own, [HostRoom(name="a", free_bytes=0, num_gpus=2)]) == ["a", "a"]
    with pytest.raises(NotEnoughMemoryError, match="0 MiB and 1 GPU; 0 MiB and 0 GPUs on a are free"):
        spread(own, [HostRoom(name="a", free_bytes=0, num_gpus=1)])


def test_r15_a_new_host_stands_where_the_lost_one_stood() -> None:
    free = rooms(a=0, c=0, d=100)
    assert spread(stages("a", "", "c"), free) == ["a", "d", "c"], "and c keeps its stage"


def test_hosts_of_which_there_are_many_keep_their_order() -> None:
    names = [f"h{number}" for number in range(MAX_PERMUTED + 2)]
    assert spread(stages(*names), rooms(**dict.fromkeys(names, 0))) == names


def test_the_head_keeps_a_stage_and_another_host_may_have_none() -> None:
    assert spread(stages("a", ""), rooms(a=10, b=0)) == ["a", "a"]
    with pytest.raises(NotEnoughMemoryError):
        spread(stages("", ""), rooms(a=0, b=100))
