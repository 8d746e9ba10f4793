"""From measured costs to a choice: interpolation, the mix, memory, and the report. Rows d5, d16, I13."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from penstock.errors import NotEnoughMemoryError, UsageError
from penstock.planner.hops import Hop
from penstock.planner.memory import kv_tokens
from penstock.planner.mix import Mix
from penstock.planner.partition_search import Split
from penstock.planner.performance import PartitionChoice, choose, request_s, rows_of_a_step
from penstock.planner.report import partition_lines
from penstock.planner.stage_costs import StageCosts, StepCosts, interpolate
from penstock.process.config import RankConfig
from rank_configs import make_rank_configs

MIB = 1 << 20
NUM_LAYERS = 8


def step(num_tokens: int, *, layer: float, head: float = 0.0) -> StepCosts:
    return StepCosts(
        num_tokens=num_tokens, layer_s=layer, fixed_s=0.25, embed_s=0.0, head_s=head, link_s=0.25
    )


def costs(*, layer: float = 1.0, head: float = 0.0, **changes: int) -> StageCosts:
    """A layer takes `layer` seconds at one row and a quarter more for each further four; weights 1 MiB."""
    made = StageCosts(
        decode=[step(1, layer=layer, head=head), step(5, layer=1.25 * layer, head=head)],
        prefill=step(100, layer=10 * layer),
        layer_bytes=MIB,
        end_bytes=2 * MIB,
        kv_block_bytes=16 * 1024,
        block_size=16,
        available_bytes=1 << 30,
        num_sharers=2,
        has_kernels=True,
    )
    return msgspec.structs.replace(made, **changes)


def ranks(num_stages: int = 2, **changes: object) -> list[RankConfig]:
    """Of a model of `NUM_LAYERS` layers with requests of 256 tokens, 4 at a time; KV cache by free memory."""
    demo = Path(__file__).parents[3] / "src" / "penstock" / "assets" / "demo"
    defaults: dict[str, object] = {"num_blocks": None, "end_layer": NUM_LAYERS}
    return make_rank_configs(demo, num_stages, **(defaults | changes))


def chosen(all_costs: Sequence[StageCosts], mix: str = "0:100", **changes: object) -> PartitionChoice:
    return choose(all_costs, ranks(len(all_costs), **changes), Mix.parse(mix), (4, 4))


@pytest.mark.parametrize(
    ("x", "expected"), [(1, 10.0), (2, 15.0), (3, 20.0), (5, 30.0), (9, 50.0), (13, 70.0), (0, 5.0)]
)
def test_times_between_and_beyond_the_measured_points(x: int, expected: float) -> None:
    assert interpolate([(1, 10.0), (3, 20.0), (5, 30.0)], x) == expected
    assert interpolate([(4, 7.0)], x) == 7.0


def test_a_step_is_the_sum_of_its_parts() -> None:
    own = costs(head=3.0)
    assert own.decode_step_s(4, 1) == 4 + 3 + 0.5
    assert own.decode_step_s(4, 3) == 4.5 + 3 + 0.5
    assert own.prefill_token_s(4) == 40.5 / 100
    assert own.weight_bytes(4) == 6 * MIB


def test_d5_a_request_is_prefill_and_decode_in_the_stated_mix() -> None:
    own = costs()
    assert request_s(own, Mix(0, 100), 4, 5) == pytest.approx(100 * 5.5 / 5)
    assert request_s(own, Mix(200, 100), 4, 5) == pytest.approx(200 * 0.405 + 100 * 5.5 / 5)


@pytest.mark.parametrize("text", ["", "512", "512:", ":128", "512:0", "-1:5", "a:b", "1:2:3", "0x1:2", "1,5"])
def test_a_bad_mix_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(UsageError, match="which is not a mix of prefill and decode") as caught:
        Mix.parse(text)
    assert caught.value.param == "partition_mix"
    assert "512:128" in caught.value.remedy


def test_the_mean_length_of_a_request() -> None:
    assert Mix.parse("512:128").mean_length(4096) == 576
    assert Mix.parse("0:1").mean_length(4096) == 1
    assert Mix.parse("512:128").mean_length(100) == 100
    assert Mix.parse(" 512:128 ") == Mix(512, 128)


def test_d5_kv_memory_limits_the_rows_of_a_step() -> None:
    rank, mix = ranks(max_num_seqs=32)[0], Mix(0, 100)  # 50 tokens on average
    assert [rows_of_a_step(count, rank, mix) for count in (0, 16, 150, 200, 800, 1600, 99999)] == [
        0, 1, 1, 2, 8, 16, 16,
    ]  # fmt: skip


def test_d5_the_head_counts_like_layers() -> None:
    assert chosen([costs(), costs()]).best.layers == (4, 4)
    assert chosen([costs(), costs(head=2.0)]).best.layers == (5, 3)
    assert chosen([costs(), costs(head=4.0)]).best.layers == (6, 2)


def test_d5_the_mix_moves_the_split() -> None:
    """The head is paid for each decode, and hardly for a prompt."""
    stages = [costs(), costs(head=4.0)]
    assert chosen(stages, "0:100").best.layers == (6, 2)
    assert chosen(stages, "10000:1").best.layers == (4, 4)


def test_i13_a_throttled_rank_gets_fewer_layers() -> None:
    choice = chosen([costs(layer=3.0), costs(layer=1.0)])
    assert choice.best.layers == (2, 6)
    assert choice.even is not None
    assert choice.even.slowest_ns > choice.best.slowest_ns
    assert choice.runner_up is not None
    assert choice.runner_up.layers in [(1, 7), (3, 5)]


def test_d16_weights_and_one_request_must_fit_each_memory() -> None:
    """Two memories of their own: the smaller one holds 2 layers and their share of the KV cache."""
    small = costs(layer=1.0, num_sharers=1, available_bytes=5 * MIB)
    large = costs(layer=9.0, num_sharers=1)
    device = {"device": "cuda", "max_num_seqs": 4}
    tokens = kv_tokens([small, large], ranks(**device))
    assert [bool(count) for count in tokens[0]] == [False, True, True, *[False] * 6]
    assert chosen([small, large], **device).best.layers == (2, 6)


def test_d16_on_one_host_all_weights_are_in_one_memory() -> None:
    """8 layers and 2 ends are 12 MiB; of what is left, a quarter is for the KV cache of both stages."""
    own = [costs(available_bytes=76 * MIB)] * 2
    tokens = kv_tokens(own, ranks(max_num_seqs=1000))
    assert tokens[0] == tokens[1]
    assert tokens[0][1] == 8 * MIB // (16 * 1024) * 16
    assert tokens[0][8] == tokens[0][1] // 8
    assert kv_tokens([costs(available_bytes=12 * MIB - 1)] * 2, ranks()) == [[0] * 9] * 2


def test_the_users_own_number_of_blocks_is_kept() -> None:
    tokens = kv_tokens([costs()] * 2, ranks(num_blocks=10))
    assert set(tokens[0][1:]) == {160}
    too_many = kv_tokens([costs()] * 2, ranks(num_blocks=10_000))
    assert too_many[0][1:4] == [160_000] * 3
    assert too_many[0][8] == 0


def test_no_split_that_fits_is_an_error_with_a_remedy() -> None:
    with pytest.raises(NotEnoughMemoryError, match="no split of 8 layers over 2 stages") as caught:
        chosen([costs(available_bytes=MIB)] * 2)
    assert "--max-model-len" in caught.value.remedy


def test_d16_the_report_shows_the_table_and_what_is_stranded() -> None:
    choice = chosen([costs(layer=3.0), costs(layer=1.0)], "10:100", kv_cache_bytes=32 * MIB)
    lines = partition_lines(choice)
    assert lines[0].startswith("partition 2,6: ")
    assert lines[0].endswith(" requests/s of 10 + 100 tokens, 2 rows a step")
    assert [line.split() for line in lines[2:4]] == [
        ["0", "2", "6875.000", "605.0000", "4.0", "16384", "21.3"],
        ["1", "6", "6875.000", "605.0000", "8.0", "5456", "0.0"],
    ]
    assert lines[4].startswith("even 4,4: ")
    assert lines[5].startswith("runner-up ")
    assert all(line.endswith(" % fewer") for line in lines[4:])
    assert len({len(line) for line in lines[1:4]}) == 1, "columns are aligned"


def test_the_report_of_an_even_split_names_the_runner_up_only() -> None:
    lines = partition_lines(chosen([costs(), costs()]))
    assert lines[0].startswith("partition 4,4: ")
    assert lines[2].split()[3] == "-", "without prompts, no prefill was measured"
    assert [line.split()[0] for line in lines[4:]] == ["runner-up"]


def with_hop(bytes_per_s: float) -> PartitionChoice:
    """Two stages and a wire between them."""
    hop = Hop(
        stage=0,
        sender="tower",
        receiver="desk",
        token_bytes=1000,
        bytes_per_s=bytes_per_s,
        round_trip_s=0.002,
    )
    return replace(chosen([costs(), costs()]), hops=[hop])


def test_g1_a_fast_wire_changes_nothing_but_a_line() -> None:
    plain, wired = chosen([costs(), costs()]), with_hop(1e6)
    lines = partition_lines(wired)
    assert lines[0] == partition_lines(plain)[0]
    assert lines[4] == (
        "link from stage 0 on tower to desk: 8 Mbit/s, round trip 2.00 ms, 10 requests/s at most"
    )


def test_g1_a_slow_wire_is_the_speed_of_the_pipeline_and_is_said() -> None:
    choice = with_hop(100.0)
    lines = partition_lines(choice)
    assert ": 0.001 requests/s of" in lines[0]
    assert lines[4].endswith("0.001 requests/s at most; it is slower than every stage")
    assert choice.request_s(Split(1, 1, (4, 4), 1)) == 1000.0
    assert any(line.endswith("0.0 % fewer") for line in lines[5:])
