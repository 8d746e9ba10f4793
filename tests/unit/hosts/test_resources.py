"""What a host says that it can give."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.hosts import resources
from penstock.hosts.resources import HostResources
from penstock.kernels.cpu.compiler import Machine
from penstock.kernels.cpu.targets import targets_of


def test_g1_a_host_says_in_which_classes_its_cpu_can_compute() -> None:
    machine = Machine.detect()
    found = HostResources.detect().numeric_classes
    assert list(found) == targets_of(machine.architecture, machine.cpu_flags)


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [
        (
            "processor : 0\nmodel : 85\nmodel name\t: Intel(R) Xeon(R)  \n\nmodel name : another\n",
            "Intel(R) Xeon(R)",
        ),
        ("processor : 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd08\n", "0x41 0xd08"),
        (f"model name : {'x' * 300}\n", "x" * 256),
        ("", ""),
    ],
)
def test_g1_a_host_names_its_cpu_as_far_as_the_kernel_does(tmp_path: Path, cpuinfo: str, model: str) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert resources._cpu_model(tmp_path / "cpuinfo") == model
    assert resources._cpu_model(tmp_path / "gone") == ""


def test_g1_a_host_names_its_gpus(tmp_path: Path) -> None:
    for address, model in (("0000:81:00.0", "NVIDIA L4"), ("0000:01:00.0", "NVIDIA H100")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(f"Model: \t\t {model}\nIRQ: 33\n")
    assert resources._gpu_models(tmp_path) == ("NVIDIA H100", "NVIDIA L4")
    assert resources._gpu_models(tmp_path / "gone") == ()
