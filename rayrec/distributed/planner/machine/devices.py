"""Device presets: memory, bandwidths and latencies from data sheets; `jobs/calibrate.py` measures real ones."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of one rank. Bandwidths are bytes per second in one direction.

    Args:
        memory_bytes: memory of the compute device (RAM per rank for "cpu").
        host_bytes: RAM per GPU rank; 0 for "cpu".
        memory_bw: reading embedding rows from the device's memory.
        host_to_device_bw: reading rows of a UVM table over the bus.
        intra_host_bw: to the other ranks of the host (NVLink; loopback for gloo).
        inter_host_bw: to ranks of other hosts.
        sector_bytes: minimum bytes moved by one row read.
        id_s: seconds per id without its bytes, once in the lookup and once in the update.
        row_s: seconds per updated row without its bytes.
        route_s: seconds to check and route one id of the rank's batch, per copy sent.
        cut_s: additional seconds to find an id's row block in a row-wise table.
        partial_s: additional seconds per bag of a row-wise table, per further row block.
        sort_s: seconds per row number when replicas sort the rows they touched.
        replica_bw: summing and applying the gradients of those rows, without the links' time.
        collective_s: seconds per collective without its bytes.
        begin_s: host seconds around each collective: packing, launch, unpacking.
        table_s: host seconds per shard and step.
        step_s: host seconds per step that do not depend on the plan and are not hidden by the device.
        alone: factor on a rank's work while the other ranks of its host wait.
    """

    kind: str
    memory_bytes: int
    host_bytes: int
    memory_bw: float
    host_to_device_bw: float
    intra_host_bw: float
    inter_host_bw: float
    sector_bytes: int
    id_s: float
    row_s: float
    route_s: float
    cut_s: float
    partial_s: float
    sort_s: float
    replica_bw: float
    collective_s: float
    begin_s: float
    table_s: float
    step_s: float
    alone: float


def _gpu(memory_gib: int, memory_tb_s: float, nvlink_gb_s: float, network_gb_s: float, bus_gb_s: float) -> Device:
    return Device(
        kind="cuda",
        memory_bytes=memory_gib * GIB,
        host_bytes=192 * GIB,
        memory_bw=memory_tb_s * 1e12,
        host_to_device_bw=bus_gb_s * 1e9,
        intra_host_bw=nvlink_gb_s * 1e9,
        inter_host_bw=network_gb_s * 1e9,
        sector_bytes=64,
        id_s=5e-11,
        row_s=1e-10,
        route_s=1e-10,
        cut_s=1e-10,
        partial_s=1e-10,
        sort_s=1e-9,
        replica_bw=memory_tb_s * 1e12 / 8,
        collective_s=3e-5,
        begin_s=0.0,
        table_s=1e-6,
        step_s=0.0,
        alone=1.0,
    )


# NVIDIA data sheets: HBM size and peak, NVLink one way, one NIC a GPU (DGX A100 200 Gb/s, DGX H100/H200/B200 400 Gb/s),
# PCIe 4 or 5 x16. Sustained rates are lower; only the ratios matter to the search.
DEVICES: dict[str, Device] = {
    "a100_40": _gpu(40, 1.555, 300, 25, 24),
    "a100_80": _gpu(80, 2.039, 300, 25, 24),
    "h100": _gpu(80, 3.35, 450, 50, 50),
    "h200": _gpu(139, 4.8, 450, 50, 50),
    "b200": _gpu(178, 8.0, 900, 50, 50),
    "cpu": Device(
        kind="cpu",
        memory_bytes=16 * GIB,
        host_bytes=0,
        memory_bw=5e9,
        host_to_device_bw=5e9,
        intra_host_bw=1.5e9,
        inter_host_bw=1.0e9,
        sector_bytes=64,
        id_s=2e-8,
        row_s=5e-7,
        route_s=3e-8,
        cut_s=3e-9,
        partial_s=2e-7,
        sort_s=2e-7,
        replica_bw=4e8,
        collective_s=5e-5,
        begin_s=1.5e-4,
        table_s=5e-6,
        step_s=3e-4,
        alone=0.8,
    ),
}

DEFAULT_GPU = "a100_40"


def device(name: str) -> Device:
    """The preset `name` (case and dashes are ignored).

    Raises:
        ValueError: an unknown preset.
    """
    key = name.lower().replace("-", "_")
    if key == "a100":
        key = "a100_40"
    if key not in DEVICES:
        raise ValueError(f"device {name!r} is not known; known: {', '.join(DEVICES)}")
    return DEVICES[key]


def preset_of(gpu_name: str) -> str | None:
    """The preset for a GPU name such as "NVIDIA H100 80GB HBM3"; None for other GPUs."""
    return next((g for g in ("a100", "h100", "h200", "b200") if g in gpu_name.lower()), None)
