"""Times a training step of `hstu_ranker`, dense part only, against the same layers in plain, padded PyTorch.

    python jobs/bench/hstu_ranker.py [--length N] [--rows N] [--candidates N] [--rounds N] [--stored EVENTS] [--json]

Lengths of histories are lognormal as in data/synthetic/plays.py, the median a tenth of `--length`, and cut to it.
`jagged` is the model's encoder: histories without padding, rows of a request in one sequence. `padded` has the same
formula and weights: every row has its own copy of the history, padded to the longest. Both have forward and backward on
the same vectors, in turns. Prints the median seconds and the ratio, and checks that the outputs are equal.

With `--stored`, instead trains the whole model from files, with histories joined from a log of so many events and with
the same histories stored in the rows, in turns; prints rows per second and the ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from events import schema_of, write_log
from harness import arguments, in_turns, machine, paired_ratio, print_json

from rayrec.data import BatchStream, Cursor, DataSet, Manifest, ReadOptions
from rayrec.data.tools.histories import Log, make_sequences
from rayrec.data.tools.times import TimeColumn
from rayrec.modules.attention import Layout
from rayrec.modules.hstu import HSTUConfig, HSTUEncoder, HSTULayer
from rayrec.train import TrainConfig, parse_config
from rayrec.train.run.log import Mailbox
from rayrec.train.setup import build
from rayrec.train.worker.learner import make_learner
from rayrec.train.worker.session import Job, session_alone

EPOCH_EVENTS = 1 << 17  # about, of the histories of an epoch with `--stored`
LOG = Log(user="user", times=(TimeColumn("at"),), columns=("item",))


def padded_layer(layer: HSTULayer, x_BND: torch.Tensor, visible_BNN: torch.Tensor) -> torch.Tensor:
    """The layer's formula on padded rows."""
    width = x_BND.shape[1]
    u, v, q, k = F.silu(layer.uvqk(layer.norm(x_BND))).split(layer.widths, dim=2)
    q, k, v = (part.unflatten(2, (layer.heads, -1)) for part in (q, k, v))
    positions = torch.arange(width, device=x_BND.device)
    bias = F.embedding(positions[None, :] - positions[:, None] + layer.N - 1, layer.bias.by_distance[:, None])[..., 0]
    scores = F.silu(layer.qk_dim**-0.5 * torch.einsum("bihd,bjhd->bhij", q, k) + bias) / layer.N
    attended = torch.einsum("bhij,bjhd->bihd", scores * visible_BNN[:, None], v).flatten(2)
    return x_BND + layer.out(layer.norm_attended(attended) * u)


@dataclass(frozen=True)
class Forms:
    """Both forms of a batch: each computes the vectors of the candidates."""

    encoder: HSTUEncoder
    lengths: torch.Tensor
    jagged: Callable[[], torch.Tensor]
    padded: Callable[[], torch.Tensor]


def forms(args: argparse.Namespace, device: torch.device | str = "cpu") -> Forms:
    """Of `args.rows` rows, `args.candidates` of which share a history."""
    torch.manual_seed(0)
    requests, per = args.rows // args.candidates, args.candidates
    drawn = np.random.default_rng(0).lognormal(np.log(args.length / 10), 1.133, requests)
    lengths = torch.from_numpy(np.clip(drawn, 1, args.length).astype(np.int64))
    config = HSTUConfig(dim=args.dim, max_length=args.length + 1, blocks=args.blocks, heads=2)
    encoder = HSTUEncoder(config).to(device)
    items, candidates = torch.randn(int(lengths.sum()), args.dim), torch.randn(requests * per, args.dim)
    histories = items.split(lengths.tolist())

    offsets = F.pad((lengths + per).cumsum(0), (1, 0))
    at_candidates = torch.cat([torch.arange(end - per, end) for end in offsets[1:].tolist()]).to(device)
    jagged_TD = torch.cat(
        [part for n in range(requests) for part in (histories[n], candidates[n * per : (n + 1) * per])]
    ).to(device)

    width = int(lengths.max()) + 1
    padded_BND = torch.zeros(requests * per, width, args.dim)
    of_row = torch.arange(requests).repeat_interleave(per)
    for row, request in enumerate(of_row.tolist()):
        padded_BND[row, : lengths[request]] = histories[request]
        padded_BND[row, lengths[request]] = candidates[row]
    ends, rows = lengths[of_row].to(device), torch.arange(len(of_row), device=device)
    positions = torch.arange(width, device=device)
    visible = (positions[None, :] <= positions[:, None]) & (positions <= ends[:, None])[:, None, :]
    padded_BND = padded_BND.to(device)

    def jagged() -> torch.Tensor:
        parts, widths = Layout(offsets, total=len(jagged_TD), items=None if per == 1 else lengths).parts()
        layout = Layout.of_parts({name: part.to(device, non_blocking=True) for name, part in parts.items()}, widths)
        if per > 1:
            layout.items = lengths.to(device, non_blocking=True)
        encoded: torch.Tensor = encoder(jagged_TD, layout)[at_candidates]
        return encoded

    def padded() -> torch.Tensor:
        x_BND = padded_BND
        for layer in encoder.layers:
            x_BND = padded_layer(layer, x_BND, visible)
        return x_BND[rows, ends]

    return Forms(encoder, lengths, jagged, padded)


def measure_stored(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Seconds of processor time of an epoch of training, joined over stored."""
    write_log(folder / "log.parquet", args.stored)
    make_sequences([str(folder / "log.parquet")], folder / "all", LOG, length=args.length)
    count = EPOCH_EVENTS // args.length
    rows = pq.read_table(folder / "all").slice(args.stored - count, count)
    pq.write_table(rows, folder / "stored.parquet", row_group_size=1024)
    pq.write_table(rows.select(["user", "at", "item", "label"]), folder / "joined.parquet", row_group_size=1024)
    hashed, sides = {"mapping": {"kind": "hash"}}, {}
    features = ["item", "history_item"]
    for side, log in (("joined", folder / "log.parquet"), ("stored", None)):
        schema = schema_of(log, args.length).model_dump(mode="json", exclude_none=True)
        schema["sparse"].append({"name": "item"} | hashed)
        ranker = {"attention": [{"history": ["history_item"], "target": ["item"]}], "max_length": args.length}
        model = {"name": "hstu_ranker", "args": ranker | {"blocks": args.blocks, "heads": 2, "over_arch": [64, 1]}}
        raw = {
            "name": side,
            "data": {"train": str(folder / f"{side}.parquet")},
            "schema": schema,
            "tables": [{"name": "item", "rows": 1 << 17, "dim": args.dim, "features": features}],
            "model": model,
            "optimizers": {"dense": {"kind": "adam", "lr": 0.001}, "sparse": {"kind": "rowwise_adagrad", "lr": 0.01}},
            "trainer": {"num_workers": 0, "batch_size": args.rows},
            "storage": {"path": str(folder)},
        }
        sides[side] = training(parse_config(raw), folder)
    seconds = in_turns(sides, args.rounds, warmup=1)
    ratio = paired_ratio(seconds["stored"], seconds["joined"])
    rate = count / statistics.median(seconds["joined"])
    lengths = pc.list_value_length(rows.column("history_item"))
    print(f"history up to {args.length} ({pc.mean(lengths).as_py():.0f} on average), {args.stored:,} events:")
    print(f"{rate:,.0f} rows per second of a core with joined histories; {ratio:.2f} of the rate of stored ones")
    return {"rows_per_second": rate, "rate_of_stored": ratio}


def training(config: TrainConfig, folder: Path) -> Callable[[], float]:
    """Trains an epoch; returns its processor time."""
    assert isinstance(config.data.train, DataSet)
    manifest = Manifest.of(config.data.train, config.training_schema)
    job = Job(config=config, train=manifest, eval=None, folder=folder, checkpoints=str(folder))
    learner = make_learner(job, session_alone(Mailbox()))
    options = ReadOptions(reader="local")

    def epoch() -> float:
        start, number = time.process_time(), 0
        with BatchStream(
            manifest, config.training_schema, build.rows_of(config), batch_rows=config.trainer.batch_size, rank=0,
            world_size=1, cursor=Cursor.start(0), seed=0, shuffle=False, options=options,
        ) as stream:  # fmt: skip
            for number, (batch, _) in enumerate(stream):
                learner.step(batch, 1.0, number)
        return time.process_time() - start

    return epoch


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--stored", type=int, metavar="EVENTS")
    for name, default in (("length", 256), ("rows", 64), ("candidates", 1), ("dim", 64), ("blocks", 2), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    print(machine())
    torch.set_num_threads(1)
    if args.stored is not None:
        with tempfile.TemporaryDirectory() as name:
            os.environ["XDG_CACHE_HOME"] = str(Path(name) / "cache")
            figures = measure_stored(args, Path(name))
        print_json(args, figures)
        return
    made, per = forms(args), args.candidates
    encoder, lengths, jagged, padded = made.encoder, made.lengths, made.jagged, made.padded

    def step(forward: Callable[[], torch.Tensor]) -> Callable[[], float]:
        def run() -> float:
            start = time.process_time()
            encoder.zero_grad()
            forward().square().mean().backward()
            return time.process_time() - start

        return run

    with torch.no_grad():
        torch.testing.assert_close(jagged(), padded(), rtol=1e-4, atol=1e-5)
    seconds = in_turns({"jagged": step(jagged), "padded": step(padded)}, args.rounds, warmup=1)
    ratio = paired_ratio(seconds["jagged"], seconds["padded"])
    rate = args.rows / statistics.median(seconds["jagged"])
    print(f"history up to {args.length} ({float(lengths.float().mean()):.0f} on average), {per} candidates a request:")
    print(f"{rate:,.0f} rows per second of a core; {ratio:.2f} of the time of padded rows")
    print_json(args, {"rows_per_second": rate, "of_padded": ratio})


if __name__ == "__main__":
    main()
