"""The devices that are known by name, with the figures of their maker's data sheets.

Memory, memory bandwidth and dense bfloat16 rates (float16 where a device has no bfloat16; without sparsity,
summed in float32) are those of NVIDIA's data sheets and architecture papers: "A100 Tensor Core GPU" (2021),
"H100 Tensor Core GPU" (2023), "H200 Tensor Core GPU" (2024), "Blackwell Architecture Technical Brief" (2024),
"L4", "L40S", "A10", "RTX A6000", "T4" and "V100" data sheets, "NVIDIA Ampere GA102", "NVIDIA Ada GPU
Architecture" and "NVIDIA RTX Blackwell GPU Architecture" papers. NVLink and PCIe rates count both directions,
as these papers do. A latency is the time of one small message between two processes, rounded to what NCCL's
own tests show: 10 us over NVLink, 20 us over PCIe; 1 us through the memory of one host.

A device reaches less than its data sheet says: `layouts.stage_times` takes a share of each figure.
"""

from __future__ import annotations

from penstock.layouts.devices import GIB, Device, Link

_GB = 1e9
_TERA = 1e12

PCIE_3 = Link(kind="pcie", bytes_per_s=32 * _GB, latency_s=20e-6)  # 16 lanes, both directions
PCIE_4 = Link(kind="pcie", bytes_per_s=64 * _GB, latency_s=20e-6)
PCIE_5 = Link(kind="pcie", bytes_per_s=128 * _GB, latency_s=20e-6)


def nvlink(bytes_per_s: float) -> Link:
    """Return NVLink at this rate of both directions together."""
    return Link(kind="nvlink", bytes_per_s=bytes_per_s, latency_s=10e-6)


# name: (GiB, GB/s, dense bfloat16 TFLOP/s, GB/s of NVLink or 0, PCIe)
_TABLE: dict[str, tuple[int, float, float, float, Link]] = {
    "a10": (24, 600, 125, 0, PCIE_4),
    "a100-40g": (40, 1555, 312, 600, PCIE_4),
    "a100-80g": (80, 2039, 312, 600, PCIE_4),
    "a100-80g-pcie": (80, 1935, 312, 0, PCIE_4),
    "a6000": (48, 768, 154.8, 0, PCIE_4),
    "b200": (180, 8000, 2250, 1800, PCIE_5),
    "h100": (80, 3350, 989, 900, PCIE_5),
    "h100-nvl": (94, 3938, 835, 600, PCIE_5),
    "h100-pcie": (80, 2039, 756, 0, PCIE_5),
    "h200": (141, 4800, 989, 900, PCIE_5),
    "l4": (24, 300, 121, 0, PCIE_4),
    "l40s": (48, 864, 362, 0, PCIE_4),
    "rtx3090": (24, 936, 71, 0, PCIE_4),
    "rtx4080": (16, 717, 97.5, 0, PCIE_4),
    "rtx4090": (24, 1008, 165.2, 0, PCIE_4),
    "rtx5090": (32, 1792, 209.5, 0, PCIE_5),
    "t4": (16, 320, 65, 0, PCIE_3),
    "v100-16g": (16, 900, 125, 300, PCIE_3),
    "v100-32g": (32, 900, 125, 300, PCIE_3),
}
_OTHER_NAMES = {"a100": "a100-80g", "h100-80g": "h100", "h200-141g": "h200", "v100": "v100-32g"}

KNOWN_NAMES = tuple(sorted((*_TABLE, *_OTHER_NAMES)))

MEMORY = Link(kind="memory", bytes_per_s=10 * _GB, latency_s=1e-6)  # between ranks of one CPU
NETWORK = Link(kind="network", bytes_per_s=10e9 / 8, latency_s=100e-6)  # 10 Gbit/s, if no figure is given

CPU_BYTES_PER_S = 40 * _GB  # two channels of DDR5, if no figure is given
FLOPS_PER_CORE = 50e9  # one core with 256-bit vectors


def known_device(name: str) -> Device | None:
    """Return the device of a name, which is in small letters; None: the table does not have the name."""
    figures = _TABLE.get(_OTHER_NAMES.get(name, name))
    if figures is None:
        return None
    memory_gib, gb_per_s, teraflops, _, _ = figures
    return Device(
        kind=_OTHER_NAMES.get(name, name),
        memory_bytes=memory_gib * GIB,
        read_bytes_per_s=gb_per_s * _GB,
        flops_per_s=teraflops * _TERA,
    )


def pcie_of(kind: str) -> Link:
    """Return the PCIe link of a known device; for any other device PCIe 4."""
    return _TABLE[kind][4] if kind in _TABLE else PCIE_4


def nvlink_of(kind: str) -> Link | None:
    """Return the NVLink of a known device; None: it has none, or the table does not have the device."""
    rate = _TABLE[kind][3] if kind in _TABLE else 0
    return nvlink(rate * _GB) if rate else None
