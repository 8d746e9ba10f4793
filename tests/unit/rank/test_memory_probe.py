"""F9: what the largest plan of a rank takes is measured before the KV cache is sized."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from checkpoints import make_checkpoint
from kernel_builds import built
from penstock.distributed.group import MemoryGroup, TensorGroup, memory_meeting
from penstock.errors import NotEnoughMemoryError
from penstock.kernels.cpu.collective import SharedGroup
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from penstock.models.decoder import Decoder
from penstock.process.config import FirstLoad, RankConfig
from penstock.process.host_memory import forget_peak, peak_resident_bytes
from penstock.rank import memory_probe
from penstock.rank.loading import LoadedRank, load_rank
from penstock.rank.memory_probe import (
    DeviceMeter,
    MemoryProbe,
    NoProbe,
    ResidentMeter,
    meter_of,
    probe_of,
)
from penstock.sample import sampler
from rank_configs import make_rank_configs

MIB = 1 << 20


class ScriptedMeter:
    """Says what it was told to: of few prompt tokens and of more, of decodes, of few samples and of more."""

    def __init__(self, *growths: int) -> None:
        self._growths = list(growths)
        self.is_begun = self.is_ended = False

    def begin(self) -> None:
        self.is_begun = True

    def growth(self) -> int:
        assert self.is_begun
        return self._growths.pop(0)

    def end(self) -> None:
        self.is_ended = True


def loaded(config: RankConfig) -> LoadedRank:
    return load_rank(config, lambda done, total: None)


def configs(directory: Path, num_stages: int = 1, **changes: Any) -> list[RankConfig]:
    return make_rank_configs(make_checkpoint(directory), num_stages, are_threads=True, **changes)


def never_late() -> float:
    return 0.0


def test_f9_torch_takes_memory_for_each_step_and_the_most_at_once_counts(tmp_path: Path) -> None:
    (config,) = configs(tmp_path, kernels="off")
    rank = loaded(config)
    meter = ScriptedMeter(30, 90, 20, 50)
    probe = MemoryProbe(meter, never_late)
    assert probe.peak_bytes(config, rank) == 90, "prompts take more than decodes and samples"
    assert meter.is_ended
    probe = MemoryProbe(ScriptedMeter(30, 60, 20, 50), never_late)
    assert probe.peak_bytes(config, rank) == 70


def test_f9_a_part_of_a_plan_on_a_cpu_stands_for_all_of_it(tmp_path: Path) -> None:
    """With each look at the clock an hour has passed: only the fewest tokens run, 64 of 256."""
    (config,) = configs(tmp_path, kernels="off")
    seconds = count(0, 3600)
    probe = MemoryProbe(ScriptedMeter(100, 100, 0, 0), lambda: float(next(seconds)))
    assert probe.peak_bytes(config, loaded(config)) == 400


def test_f9_the_outputs_of_our_kernels_are_counted_as_a_whole(tmp_path: Path) -> None:
    built()
    few, many = (
        MemoryProbe(ScriptedMeter(0, 0, 0, 0), never_late).peak_bytes(config, loaded(config))
        for config in (*configs(tmp_path), *configs(tmp_path, max_num_batched_tokens=1024))
    )
    assert many == pytest.approx(4 * few, rel=0.01)
    config = configs(tmp_path)[0]
    assert (
        MemoryProbe(ScriptedMeter(0, few + 7, 0, 5), never_late).peak_bytes(config, loaded(config))
        == few + 12
    )


def test_f9_windows_of_drafts_sample_more_rows(tmp_path: Path) -> None:
    (config,) = configs(tmp_path, kernels="off", max_drafts=4)
    meter = ScriptedMeter(0, 0, 0, 10)
    assert MemoryProbe(meter, never_late).peak_bytes(config, loaded(config)) == 50


def test_f9_what_is_taken_once_does_not_grow_with_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that the first samples load took 7000 bytes; each row takes 100 more, up to 64 rows."""
    (config,) = configs(tmp_path, kernels="off", max_num_seqs=16, max_drafts=3)
    rank = loaded(config)
    monkeypatch.setattr(sampler, "_LOGITS_AT_ONCE", 100 * rank.spec.vocab_size)
    meter = ScriptedMeter(0, 0, 0, 7000 + 4 * 100, 7000 + 16 * 100)
    assert MemoryProbe(meter, never_late).peak_bytes(config, rank) == 7000 + 64 * 100


def test_f9_whole_logits_are_there_for_all_rows_and_their_copies_for_a_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row more is copied than the 16 that were sampled, and 48 more have logits."""
    (config,) = configs(tmp_path, kernels="off", max_num_seqs=16, max_drafts=3)
    rank = loaded(config)
    monkeypatch.setattr(sampler, "_LOGITS_AT_ONCE", 2 * rank.spec.vocab_size)
    meter = ScriptedMeter(0, 0, 0, 500, 9000)
    assert MemoryProbe(meter, never_late).peak_bytes(config, rank) == 9000 + 48 * 4 * rank.spec.vocab_size


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_f9_each_stage_measures_its_own_and_the_model_says_the_same_as_before(
    tmp_path: Path, kernels: str
) -> None:
    for config in configs(tmp_path, 3, kernels=kernels):
        rank = loaded(config)
        assert isinstance(rank.model, Decoder)
        before = [parameter.clone() for parameter in rank.model.parameters()]
        assert MemoryProbe().peak_bytes(config, rank) >= 0
        assert all(map(torch.equal, before, rank.model.parameters()))


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_f9_a_rank_of_a_shared_stage_waits_for_nobody(tmp_path: Path, kernels: str) -> None:
    """The other one has not come, and the group was not joined."""
    config = make_rank_configs(
        make_checkpoint(tmp_path), 1, tp=[2], are_threads=True, kernels=kernels, wait_timeout_s=0.01
    )[1]
    assert MemoryProbe().peak_bytes(config, loaded(config)) >= 0


@pytest.mark.parametrize("carrier", ["memory", "shared"])
def test_f9_a_group_that_has_rehearsed_meets_the_others_as_before(carrier: str) -> None:
    def group(rank: int) -> TensorGroup:
        if carrier == "memory":
            return MemoryGroup(rank, 2, name="stage 0", timeout_s=10.0)
        return SharedGroup(
            CpuKernels(built(), frozenset(KERNEL_NAMES)), rank, 2, name="stage 0", timeout_s=0.01
        )

    one = group(0)
    x = torch.ones(3, 4)
    with one.rehearsing():
        assert [part.tolist() for part in one.all_gather(x)] == [x.tolist()] * 2
        assert one.all_reduce(x).shape == x.shape
        one.check()
    one.join(memory_meeting(2))
    if carrier == "shared":
        with pytest.raises(Exception, match="rank 1"):
            one.all_reduce(x)


def test_f9_a_plan_for_which_there_is_no_memory_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config,) = configs(tmp_path, kernels="off")
    rank = loaded(config)

    def forward(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(rank.model, "forward", forward)
    with pytest.raises(NotEnoughMemoryError, match=r"lacks memory for a plan of .* --max-num-batched-tokens"):
        MemoryProbe(ScriptedMeter(0), never_late).peak_bytes(config, rank)


def test_f9_who_takes_the_place_of_another_measures_nothing(tmp_path: Path) -> None:
    (config,) = configs(tmp_path)
    config = msgspec.structs.replace(config, are_threads=False)
    assert isinstance(probe_of(config), MemoryProbe)
    again = msgspec.structs.replace(config, first_load=FirstLoad(identity=b"x"))
    assert not isinstance(probe_of(again), MemoryProbe)
    assert NoProbe().peak_bytes(again, loaded(config)) == 0


def test_f9_threads_of_a_process_measure_on_a_device_of_their_own_alone(tmp_path: Path) -> None:
    (config,) = configs(tmp_path)
    threads, on_gpu = (
        msgspec.structs.replace(config, are_threads=True, device=device) for device in ("cpu", "cuda:1")
    )
    assert not isinstance(probe_of(threads), MemoryProbe)
    assert isinstance(probe_of(on_gpu), MemoryProbe)
    assert isinstance(meter_of(config), ResidentMeter)
    assert isinstance(meter_of(on_gpu), DeviceMeter)


def test_f9_resident_memory_counts_from_the_beginning_and_anew_after_each_look() -> None:
    peaks = iter([100, 130, 90])
    forgotten: list[None] = []
    meter = ResidentMeter(lambda: next(peaks), lambda: forgotten.append(None))
    meter.begin()
    assert [meter.growth(), meter.growth()] == [30, 0]
    assert len(forgotten) == 3


def test_f9_the_peak_of_resident_memory_is_read_and_forgotten(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmPeak:\t 900 kB\nVmHWM:\t 512 kB\nVmRSS:\t 100 kB\n")
    (tmp_path / "clear_refs").write_text("")
    assert peak_resident_bytes(tmp_path) == 512 * 1024
    forget_peak(tmp_path)
    assert (tmp_path / "clear_refs").read_text() == "5"
    forget_peak(tmp_path / "not there")
    (tmp_path / "status").write_text("Name:\tx\n")
    with pytest.raises(OSError, match="VmHWM"):
        peak_resident_bytes(tmp_path)
    assert peak_resident_bytes() > MIB


def test_f9_a_gpu_goes_by_what_its_allocator_has_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none: torch's names are played."""
    reserved, peaks, calls = [10], iter([75, 40]), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[0])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: next(peaks))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    meter = DeviceMeter(torch.device("cuda", 0))
    meter.begin()
    assert calls == ["synchronize", "empty", "reset"]
    assert [meter.growth(), meter.growth()] == [65, 30]
    meter.end()
    assert calls[-1] == "empty"


def test_f9_the_fewest_tokens_of_a_rehearsal_are_few() -> None:
    assert memory_probe.REHEARSAL_S <= 0.5
    assert memory_probe._FEWEST_TOKENS <= 64
