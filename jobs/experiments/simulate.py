"""Predicts training speed on clusters of many sizes, without a cluster.

    python jobs/experiments/simulate.py --config data/criteo/train.yaml --gpu h100 --json out.json --html out.html
    python jobs/experiments/simulate.py --mlperf --gpu h100 --json out.json
    python jobs/experiments/simulate.py --check --json

The first plans one config for clusters of 1 to 4096 ranks (`--worlds` names others). For each, under strong and weak
scaling, it prints the predicted time of the embedding part of a step, rows per second, the memory of the fullest rank,
and the bottleneck. The dense part, reading and stragglers are left out, so the speed is an upper bound. Device speeds
are those of the preset, or of `sharding.calibration` if that is for the same kind of device.

`--mlperf` does so for DLRM-DCNv2 on Criteo 1TB, bounds the dense part too, and compares with published speeds.

`--check` compares predictions with steps that it runs here, on 1, 2 and 4 CPU ranks (`--ranks`), or on the ranks that
torchrun has started, on several hosts too. It exits with 1 if one is off by over 20 %.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from rayrec.train import load_config
from rayrec.train.planning.shapes import Shape, compare, shapes_table

WORLDS = "1x1,1x2,1x4,1x8,2x8,4x8,8x8,16x8,32x8,64x8,128x8,256x8,512x8"
STDOUT = Path("-")


def page(title: str, tables: dict[str, list[Shape]]) -> str:
    """A page without links to anywhere: a bar for each cluster, its parts side by side."""
    out = [f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>"]
    out.append(
        "<style>body{font:15px sans-serif;margin:2em}td{padding:2px 8px}i{display:inline-block;height:12px}</style>"
    )
    out.append(f"<h1>{html.escape(title)}</h1><p>The embedding part of a step, as planned; not measured.</p>")
    colours = ("#4477aa", "#66ccee", "#ee6677", "#228833", "#bbbbbb", "#aa3377")
    for scaling, shapes in tables.items():
        longest = max((shape.step_s or 0.0 for shape in shapes), default=0.0) or 1.0
        out.append(f"<h2>{html.escape(scaling)} scaling</h2><table>")
        for shape in shapes:
            if shape.parts_s is None or shape.step_s is None:
                out.append(f"<tr><td>{html.escape(shape.world)}<td colspan=3>{html.escape(shape.problem or '')}")
                continue
            bars = "".join(
                f"<i title='{html.escape(part)}: {seconds * 1e3:.3f} ms' "
                f"style='width:{400 * seconds / longest:.1f}px;background:{colour}'></i>"
                for (part, seconds), colour in zip(shape.parts_s.items(), colours, strict=False)
            )
            speed = f"{shape.batch_size / shape.step_s:,.0f} rows/s"
            out.append(f"<tr><td>{html.escape(shape.world)}<td>{shape.step_s * 1e3:.2f} ms<td>{speed}<td>{bars}")
        out.append("</table>")
    parts = next((shape.parts_s for shapes in tables.values() for shape in shapes if shape.parts_s), {})
    keys = (f"<i style='width:12px;background:{c}'></i> {html.escape(p)}" for p, c in zip(parts, colours, strict=False))
    return "\n".join([*out, f"<p>{' · '.join(keys)}</p>"])


def tell(out: Path | None, found: dict[str, Any]) -> None:
    """Writes what was found, to a file or as one line."""
    if out == STDOUT:
        print(json.dumps(found))
    elif out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


def check(ranks: list[int], cpus: int, out: Path | None) -> int:
    """Predicted beside measured steps; 0 where all are good."""
    from simulate_check import WITHIN, check_here

    found = check_here(ranks, cpus)
    if os.environ.get("RANK", "0") == "0":
        for one in found:
            told = (
                f"{one.predicted_s * 1e3:.2f} ms predicted, {one.measured_s * 1e3:.2f} ms measured ({one.error:+.0%})"
            )
            print(f"{one.world}: {told}; visits {[round(1e3 * s, 2) for s in one.visits_s]} ms")
        tell(out, {"checked": [one.to_dict() for one in found]})
    return int(any(abs(one.error) > WITHIN for one in found))


def _line(shape: dict[str, Any]) -> str:
    if shape["problem"]:
        return str(shape["problem"]).splitlines()[0]
    groups = f", {shape['replicas']} groups" if shape["replicas"] > 1 else ""
    return (
        f"{shape['batch_size']:>11,} rows{groups}: tables {shape['step_s'] * 1e3:.2f} ms (binds: {shape['binds']}), "
        f"dense {shape['dense_s'] * 1e3:.2f} ms, at most {shape['bound_samples_per_s'] / 1e6:.2f}M samples/s"
    )


def mlperf(worlds: list[str], gpu: str, settings: list[str], out: Path | None) -> int:
    """A line a cluster and scaling, and one for each published speed."""
    from simulate_mlperf import beside_published, curves

    found, published = curves(worlds, gpu, settings), beside_published()
    for scaling, shapes in found.items():
        for shape in shapes:
            print(f"{scaling:6} {shape['world']:>6} {_line(shape)}")
    for one in published:
        print(
            f"{one['who']}: {one['published_samples_per_s'] / 1e6:.2f}M samples/s published, at most "
            f"{one['bound_samples_per_s'] / 1e6:.2f}M predicted: {one['reached']:.0%} of the bound"
        )
    tell(out, {"gpu": gpu, **found, "published": published})
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="predicted against measured, on this machine")
    parser.add_argument("--ranks", default="1,2,4", help="with --check: numbers of ranks, with commas between")
    cpus = os.cpu_count() or 1
    parser.add_argument("--cpus", type=int, default=cpus, help="with --check: of a host; fewer where hosts share them")
    parser.add_argument("--mlperf", action="store_true", help="DLRM-DCNv2 on Criteo 1TB, beside published speeds")
    parser.add_argument("--config", help="needed but with --check or --mlperf")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--worlds", default=WORLDS, help="clusters as HOSTSxRANKS, with commas between")
    parser.add_argument("--json", type=Path, nargs="?", const=STDOUT, help="a file; without one, the last line")
    parser.add_argument("--html", type=Path)
    args = parser.parse_args()
    if args.check:
        return check([int(ranks) for ranks in args.ranks.split(",")], args.cpus, args.json)
    if args.mlperf:
        return mlperf(args.worlds.split(","), args.gpu, args.settings, args.json)
    if args.config is None:
        parser.error("give --config, --mlperf or --check")
    config = load_config(args.config, args.settings)
    tables = {scaling: compare(config, args.worlds.split(","), args.gpu, scaling) for scaling in ("strong", "weak")}
    for scaling, shapes in tables.items():
        Console().print(f"\n{scaling} scaling")
        Console().print(shapes_table(shapes, args.gpu))
    told = {scaling: [shape.to_dict() for shape in shapes] for scaling, shapes in tables.items()}
    tell(args.json, {"config": config.name, "gpu": args.gpu, **told})
    if args.html is not None:
        args.html.write_text(page(f"{config.name} on {args.gpu}", tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
