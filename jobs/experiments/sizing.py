"""Prints the sizing table of deploy/README.md: `python jobs/experiments/sizing.py --gpu h100`. Needs no GPU.

Each line is Criteo's model (or `--config`) with its tables scaled to the given weight bytes, at dimension 128, and the
smallest cluster of 8-GPU hosts that holds it with 8,192 samples per GPU and step. Times are of the embedding part of a
step at the speeds of the preset: an upper bound of training speed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rayrec.distributed.planner import Topology
from rayrec.distributed.planner.report.text import human_bytes
from rayrec.train import TrainConfig, load_config
from rayrec.train.config.file import parse_config
from rayrec.train.planning.shapes import Shape, compare

GIGABYTES = (10, 100, 300, 1000, 3000)
WORLDS = ("1x1", "1x2", "1x4", "1x8", "2x8", "4x8", "8x8", "16x8")
DIM, ROWS_A_GPU = 128, 8192


def scaled(config: TrainConfig, weight_bytes: float) -> TrainConfig:
    """Return the config with tables of dimension `DIM`, scaled to about `weight_bytes`."""
    raw = config.to_dict()
    factor = weight_bytes / (4 * DIM) / sum(table["rows"] for table in raw["tables"])
    for table in raw["tables"]:
        table |= {"rows": max(16, round(table["rows"] * factor)), "dim": DIM}
    raw["model"]["args"]["dense_arch"][-1] = DIM
    raw["trainer"] |= {"num_workers": 1, "batch_size": ROWS_A_GPU}
    return parse_config(raw)


def smallest(config: TrainConfig, gpu: str) -> Shape | None:
    """Return the first of `WORLDS` that holds the model."""
    weights = sum(4 * each.rows * each.dim for each in config.tables)
    for world in WORLDS:
        topology = Topology.from_world(world, gpu=gpu)
        if weights > topology.world_size * topology.host_of(0).memory_bytes:
            continue
        (shape,) = compare(config, [world], gpu, "weak")
        if shape.step_s is not None:
            return shape
    return None


def table(config: TrainConfig, gpu: str) -> str:
    """Return the table as Markdown."""
    heads = (
        "weights",
        "rows of all tables",
        "GPUs",
        "memory of the fullest",
        "embedding part of a step",
        "rows a second",
    )
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for gigabytes in GIGABYTES:
        one = scaled(config, gigabytes * 1e9)
        rows = sum(each.rows for each in one.tables)
        shape = smallest(one, gpu)
        if shape is None or shape.step_s is None or shape.memory_bytes is None:
            cells = [f"more than {WORLDS[-1]}", "", "", ""]
        else:
            speed = shape.batch_size / shape.step_s / 1e6
            hosts, each = shape.world.split("x")
            gpus = each if hosts == "1" else f"{hosts} × {each}"
            cells = [gpus, human_bytes(shape.memory_bytes), f"{shape.step_s * 1e3:.1f} ms", f"{speed:,.0f}M"]
        size = f"{gigabytes:,} GB" if gigabytes < 1000 else f"{gigabytes // 1000:,} TB"
        lines.append(f"| {' | '.join([size, f'{rows / 1e6:,.0f}M', *cells])} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[2] / "data" / "criteo" / "train.yaml")
    parser.add_argument("--gpu", default="h100")
    args = parser.parse_args(argv)
    print(table(load_config(args.config), args.gpu))


if __name__ == "__main__":
    main()
