"""What a host says that it can give."""

from __future__ import annotations

from penstock.hosts.resources import HostResources
from penstock.kernels.cpu.compiler import Machine
from penstock.kernels.cpu.targets import targets_of


def test_g1_a_host_says_in_which_classes_its_cpu_can_compute() -> None:
    machine = Machine.detect()
    found = HostResources.detect().numeric_classes
    assert list(found) == targets_of(machine.architecture, machine.cpu_flags)
