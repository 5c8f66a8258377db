"""DLRM-DCNv2 as MLPerf trains it on Criteo 1TB with several ids a feature, for `simulate.py --mlperf`, beside what
others have published of it.

Facts: MLPerf training rules v3.0 (tables of at most 40M rows, width 128, ids a feature, layers); TorchRec's and
HugeCTR's published speeds. Tables' embedding part is the planner's. The dense part is its multiplications at the
device's peak, and its gradients once over the link: both a bound that no program reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rayrec.distributed.planner import Topology
from rayrec.train.config.file import apply_override, parse_config
from rayrec.train.planning.shapes import Shape, compare

# fmt: off
ROWS = (40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209,
        11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36)
IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# fmt: on
DIM, NUM_DENSE = 128, 13
BOTTOM, TOP = (512, 256, 128), (1024, 1024, 512, 256, 1)
CROSS_LAYERS, CROSS_RANK = 3, 512
PEAK_FLOPS = {
    "a100_40": 312e12,
    "a100_80": 312e12,
    "h100": 989e12,
    "h200": 989e12,
    "b200": 2250e12,
}  # bf16, no sparsity


@dataclass(frozen=True)
class Published:
    """What others have measured."""

    who: str
    gpu: str
    world: str
    batch_size: int
    samples_per_s: float


PUBLISHED = (
    Published("TorchRec, 8 x A100-40G", "a100_40", "1x8", 131_072, 1.19e6),
    Published(
        "HugeCTR, 8 x H100 (MLPerf 3.0: 4.184 min to AUC 0.80275, one epoch at most)", "h100", "1x8", 65_536, 16.7e6
    ),
)


def config(batch_size: int, settings: Sequence[str] = ()) -> Any:
    """The model, as rayrec's own `dcn`; `settings` as of `--set`."""
    names = [f"C{number}" for number in range(1, len(ROWS) + 1)]
    tables = [
        {"name": name, "rows": rows, "dim": DIM, "features": [name]} for name, rows in zip(names, ROWS, strict=True)
    ]
    sparse = [{"name": name, "kind": "id_list", "mapping": {"kind": "hash"}} for name in names]
    raw: dict[str, Any] = {
        "name": "mlperf",
        "data": {"train": "criteo"},
        "schema": {
            "label": {"column": "label"},
            "dense": [{"name": f"I{number}"} for number in range(1, NUM_DENSE + 1)],
            "sparse": sparse,
        },
        "tables": tables,
        "model": {
            "name": "dcn",
            "args": {
                "dense_arch": list(BOTTOM),
                "over_arch": list(TOP),
                "cross_layers": CROSS_LAYERS,
                "cross_rank": CROSS_RANK,
            },
        },
        "optimizers": {"dense": {"kind": "adagrad"}, "sparse": {"kind": "rowwise_adagrad"}},
        "trainer": {"num_workers": 8, "batch_size": batch_size},
        "sharding": {"constraints": {name: {"pooling_factor": ids} for name, ids in zip(names, IDS, strict=True)}},
    }
    for setting in settings:
        raw = apply_override(raw, setting)
    return parse_config(raw)


def dense_parameters() -> int:
    """Weights of the layers; biases are few."""
    width = (len(ROWS) + 1) * DIM
    bottom, top = (NUM_DENSE, *BOTTOM), (width, *TOP)
    nets = sum(a * b for net in (bottom, top) for a, b in zip(net, net[1:], strict=False))
    return nets + CROSS_LAYERS * 2 * width * CROSS_RANK


def dense_seconds(shape: Shape, gpu: str) -> tuple[float, float]:
    """(multiplications forward and backward, the gradients' all-reduce) of a step, at the data sheet's peaks."""
    topology, weights = Topology.from_world(shape.world, gpu=gpu), dense_parameters()
    device = topology.device
    link = device.intra_host_bw if len(topology.hosts) == 1 else device.inter_host_bw
    sent = 4 * weights * 2 * (shape.ranks - 1) / shape.ranks
    return 6 * weights * shape.batch_size / shape.ranks / PEAK_FLOPS[gpu], sent / link


def told(shape: Shape, gpu: str) -> dict[str, Any]:
    """The shape with a bound of the whole step: embedding part, then multiplications, beside which gradients travel."""
    if shape.step_s is None:
        return shape.to_dict()
    work, link = dense_seconds(shape, gpu)
    step_s = shape.step_s + max(work, link)
    whole = {"dense_s": work, "dense_link_s": link, "bound_s": step_s, "bound_samples_per_s": shape.batch_size / step_s}
    return shape.to_dict() | whole


def curves(
    worlds: Sequence[str], gpu: str, settings: Sequence[str] = (), batch_size: int = 65_536
) -> dict[str, list[dict[str, Any]]]:
    """Every cluster under strong and weak scaling (of MLPerf's batch on 8 GPUs)."""
    made = config(batch_size, settings)
    return {kind: [told(shape, gpu) for shape in compare(made, worlds, gpu, kind)] for kind in ("strong", "weak")}


def beside_published() -> list[dict[str, Any]]:
    """What is predicted of the clusters whose speed is published, and how much of it was reached there."""
    out = []
    for known in PUBLISHED:
        (shape,) = compare(config(known.batch_size), [known.world], known.gpu)
        bound = told(shape, known.gpu)
        reached = known.samples_per_s / bound["bound_samples_per_s"]
        out.append({"who": known.who, "published_samples_per_s": known.samples_per_s, "reached": reached, **bound})
    return out
