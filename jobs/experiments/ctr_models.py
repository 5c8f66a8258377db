"""AUC of rayrec's rankers beside FuxiCTR's in one run: `python jobs/experiments/ctr_models.py --help`.

Each model is trained on Census-Income and MovieLens-100K (by time) with the same rows, batches, widths, initial
weights, optimizer (Adam on all parameters) and epoch as the peer that is put together of FuxiCTR's layers (see
`peers.py`). Both score all rows equally before the first step, and the epoch is the best of their mean on validation.
The peers of DeepFM, xDeepFM and Wide & Deep have FuxiCTR's weight for each id and number; rayrec's DeepFM and xDeepFM
project the vectors of numbers, and its Wide & Deep has no linear part of the numbers and scales the weights of each
feature.

FuxiCTR's package holds its layers, not its models, and no self-attention between fields, mask blocks, gates or Wukong:
these parts of the peers are plain torch here, by the papers' formulas.

    python jobs/experiments/ctr_models.py --peers DIR --census census_income_test.csv.gz --movielens-parquet FOLDER

`FOLDER` is what `data/movielens/prepare.py` writes. Criteo's files may not be passed on, so they are left out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from peers import FuxiRanker, feature_map, use
from torch import nn
from torchmetrics.functional.classification import binary_auroc

from jobs.experiments.models import Census
from rayrec.models import MODELS, Batch
from rayrec.modules import EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor

DIM, HIDDEN, BATCH, EPOCHS, LR = 8, [64, 32], 1024, 3, 0.002
# Quantiles of Student's distribution for intervals of 95 %, by the number of seeds.
T_95 = (0.0, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
# The widths of both sides; the peers read the same names.
ARGS: dict[str, dict[str, Any]] = {
    "dlrm": {"dense_arch": [32, DIM], "over_arch": [*HIDDEN, 1], "numbers": "plain"},
    "dcn": {"dense_arch": [], "over_arch": [*HIDDEN, 1], "cross_layers": 2, "cross_rank": 0},
    "deepfm": {"deep_arch": [*HIDDEN, 1]},
    "wide_deep": {"deep_arch": [*HIDDEN, 1], "number_dim": DIM},
    "xdeepfm": {"deep_arch": [*HIDDEN, 1], "cin": [8, 8]},
    "autoint": {"layers": 2, "heads": 2, "head_dim": 8, "deep_arch": [*HIDDEN, 1]},
    "masknet": {"over_arch": [32, 1], "blocks": 2, "block_dim": 32, "reduction": 0.5},
    "finalmlp": {"first": HIDDEN, "second": HIDDEN, "gate": [32], "heads": 2},
    "gdcn": {"over_arch": [*HIDDEN, 1], "cross_layers": 2},
    "wukong": {"over_arch": [32, 1], "layers": 2, "fm_vectors": 8, "linear_vectors": 8, "rank": 8, "fm_hidden": [32]},
}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one part of a data set: numbers `[R, N]`, ids `[R, F]` and labels `[R]`."""

    dense: torch.Tensor
    ids: torch.Tensor
    label: torch.Tensor


@dataclass(frozen=True, slots=True)
class Data:
    """A data set.

    Args:
        numbers: names of the numbers.
        rows: table rows of each id column.
        parts: train, validation and test.
    """

    name: str
    numbers: list[str]
    rows: dict[str, int]
    parts: dict[str, Rows]

    @classmethod
    def census(cls, file: Path, folder: Path) -> Data:
        data, parts = Census.write(file, folder), {}
        for part in ("train", "validation", "test"):
            inputs, label = data.tensors(part, ("income",))
            dense = torch.stack([inputs[name] for name in data.numbers], dim=1)
            ids = torch.stack([inputs[name] - 1 for name in data.rows], dim=1)
            parts[part] = Rows(dense.float(), ids, label[:, 0])
        return cls("Census-Income", data.numbers, data.rows, parts)

    @classmethod
    def movielens(cls, folder: Path) -> Data:
        """The prepared rows by time. The eval rows are the test, and nearly all of their users are new; so validation
        has those of the last tenth of the training rows whose users are new."""
        tables = {part: pq.read_table(folder / part).sort_by("timestamp") for part in ("train", "eval")}
        numbers = ["age", "release_year", "user_count", "item_count", "user_lift", "item_mean"]
        id_names = ["user_id", "item_id", "gender", "occupation"]
        dense, ids = {}, {}
        for part, table in tables.items():
            columns = [np.nan_to_num(table[name].to_numpy().astype(np.float64)) for name in numbers]
            columns = [
                np.log1p(values) if name.endswith("count") else values
                for name, values in zip(numbers, columns, strict=True)
            ]
            dense[part] = np.stack(columns, axis=1)
            ids[part] = np.stack([table[name].to_numpy() for name in id_names], axis=1)
        center, spread = dense["train"].mean(0), dense["train"].std(0) + 1e-6
        rows = {name: int(max(ids[part][:, i].max() for part in ids)) + 1 for i, name in enumerate(id_names)}
        whole = {
            part: (
                torch.from_numpy((dense[part] - center) / spread).float(),
                torch.from_numpy(ids[part]).long(),
                torch.from_numpy(tables[part]["label"].to_numpy().astype(np.float32)),
            )
            for part in tables
        }
        cut = len(whole["train"][2]) * 9 // 10
        parts = {"train": Rows(*(x[:cut] for x in whole["train"])), "test": Rows(*whole["eval"])}
        users = whole["train"][1][:, id_names.index("user_id")]
        is_new = ~torch.isin(users[cut:], users[:cut])
        parts["validation"] = Rows(*(x[cut:][is_new] for x in whole["train"]))
        return cls("MovieLens-100K", numbers, rows, parts)


def batches(rows: Rows, order: torch.Tensor, size: int) -> Iterator[Rows]:
    for index in order.split(size):
        yield Rows(rows.dense[index], rows.ids[index], rows.label[index])


def ours(data: Data, name: str, seed: int) -> tuple[nn.Module, Callable[[Rows], torch.Tensor]]:
    """rayrec's model, and its logits of rows."""
    names = list(data.rows)
    tables = [
        EmbeddingBagConfig(name=table, num_embeddings=rows, embedding_dim=DIM, feature_names=[table])
        for table, rows in data.rows.items()
    ]
    args = {"numbers": "linear", **ARGS[name]}
    if name in ("deepfm", "xdeepfm", "wide_deep"):  # a weight for each id, as the paper and FuxiCTR have it
        wide = [replace(table, name=f"{table.name}_wide", embedding_dim=1) for table in tables]
        args["wide"] = [f"{table}@{table}_wide" for table in names]
        tables += wide
    model = MODELS[name](tables, len(data.numbers), tables_device="cpu", seed=seed, **args)

    def logits(rows: Rows) -> torch.Tensor:
        count = len(rows.label)
        lengths = torch.ones(count * len(names), dtype=torch.int64)
        sparse = KeyedJaggedTensor(names, rows.ids.T.reshape(-1), lengths=lengths, stride=count)
        scored: torch.Tensor = model(Batch(rows.dense, sparse, rows.label))[1]
        return scored

    return model, logits


def peer(data: Data, name: str) -> tuple[nn.Module, Callable[[Rows], torch.Tensor]]:
    """The same of FuxiCTR's layers."""
    model = FuxiRanker(name, feature_map(data.numbers, data.rows, ["label"]), DIM, ARGS[name])

    def logits(rows: Rows) -> torch.Tensor:
        inputs = dict(zip(data.numbers, rows.dense.unbind(1), strict=True))
        # FuxiCTR's id 0 is padding.
        inputs |= dict(zip(data.rows, (rows.ids + 1).unbind(1), strict=True))
        scored: torch.Tensor = model(inputs)
        return scored

    return model, logits


def train(data: Data, model: nn.Module, logits: Callable[[Rows], torch.Tensor], seed: int) -> np.ndarray:
    """AUC of validation and test after each epoch, `[EPOCHS, 2]`."""
    adam, found = torch.optim.Adam(model.parameters(), lr=LR), []
    generator, rows = torch.Generator().manual_seed(seed), data.parts["train"]
    for _ in range(EPOCHS):
        model.train()
        for batch in batches(rows, torch.randperm(len(rows.label), generator=generator), BATCH):
            adam.zero_grad(set_to_none=True)
            F.binary_cross_entropy_with_logits(logits(batch), batch.label).backward()
            adam.step()
        model.eval()
        with torch.no_grad():
            aucs = []
            for part in (data.parts["validation"], data.parts["test"]):
                scored = torch.cat([logits(b) for b in batches(part, torch.arange(len(part.label)), 8192)])
                aucs.append(float(binary_auroc(scored, part.label.long())))
        found.append(aucs)
    return np.array(found)


@torch.no_grad()
def start_alike(mine: Any, theirs: Any, data: Data) -> None:
    """Gives the peer the initial weights of rayrec's model, so that both score all rows equally before the first step.

    Tables are normal and biases 0 in both. The weights of both come in the same order; those of layers that one side
    stacks are the same numbers in the same order.
    """
    tables = {}
    for name, parameter in (*mine.named_parameters(), *theirs.named_parameters()):
        if "embedding_bags" in name:
            nn.init.normal_(parameter, std=0.01)
            tables[name.split(".")[-2]] = parameter
        elif "bias" in name:
            nn.init.zeros_(parameter)
    vectors_ND = None
    if theirs.name != "dlrm":  # FuxiCTR's vectors of numbers have no bias
        vectors_ND = mine.input.number_vectors.weight_ND
        mine.input.number_vectors.bias_ND.requires_grad_(False)
    for name, layer in theirs.embedding.embedding_layer.embedding_layers.items():
        if name in data.rows:
            layer.weight[1:] = tables[name]
        elif vectors_ND is not None:
            layer.weight.copy_(vectors_ND[data.numbers.index(name), :, None])
    own = _first_order(mine, theirs, data, vectors_ND, tables)
    skipped = ("input.", "embedding", "norm", "bias", "last", "blocks.0.1", "blocks.1.1")
    flat, into = (
        [
            weight
            for name, weight in model.named_parameters()
            if weight.requires_grad and not name.startswith(own) and not any(word in name for word in skipped)
        ]
        for model in (mine, theirs)
    )
    values = torch.cat([weight.flatten() for weight in flat]).split([weight.numel() for weight in into])
    for weight, same in zip(into, values, strict=True):
        weight.copy_(same.view_as(weight))
    if theirs.name == "deepfm":  # rayrec's numbers come last
        theirs.deep.mlp[0].weight.copy_(theirs.deep.mlp[0].weight.roll(DIM * len(data.numbers), 1))
    if theirs.name == "xdeepfm":
        theirs.cin.fc.weight.copy_(mine.linear.weight[:, -theirs.cin.fc.in_features :])
        fields = len(data.numbers) + len(data.rows)
        for layer in theirs.cin.cin_layer.values():  # FuxiCTR's products have the fields first
            layer.weight.copy_(layer.weight.unflatten(1, (-1, fields)).transpose(1, 2).flatten(1, 2))


def _first_order(
    mine: Any, theirs: Any, data: Data, vectors_ND: torch.Tensor | None, tables: dict[str, torch.Tensor]
) -> tuple[str, ...]:
    """Gives the peer a weight for each id and number that has the value of rayrec's projection of its vector.

    Returns:
        Beginnings of the names of parameters that have no equal on the other side.
    """
    numbers = len(data.numbers)
    match theirs.name:
        case "deepfm":
            first_FD = torch.cat([mine.projection_FD, torch.zeros(len(data.rows), DIM)])
        case "xdeepfm":
            projection_FD = mine.linear.weight[0, : -theirs.cin.fc.in_features].view(-1, DIM)
            first_FD = torch.cat([projection_FD, torch.zeros(len(data.rows), DIM)])
        case "wide_deep":
            first_FD = torch.cat([torch.zeros(numbers, 1), mine.wide.weight.T])
        case _:
            return ("-",)
    assert vectors_ND is not None
    ones = next(module for module in theirs.modules() if type(module).__name__ == "LogisticRegression")
    for place, (name, layer) in enumerate(ones.embedding_layer.embedding_layer.embedding_layers.items()):
        if theirs.name == "wide_deep" and name in data.rows:
            layer.weight[1:] = tables[f"{name}_wide"] @ first_FD[place, :, None]
        elif name in data.rows:
            layer.weight[1:] = tables[f"{name}_wide"]
        elif theirs.name == "wide_deep":
            nn.init.zeros_(layer.weight)
        else:
            layer.weight.copy_(vectors_ND[place] @ first_FD[place])
    return ("projection_FD", "wide.", "linear.", "cin.fc")


def compare(data: Data, name: str, seeds: int) -> None:
    """Prints a row of the table: both models' mean AUC, and the mean of their differences by seed."""
    start, pairs = time.monotonic(), []
    for seed in range(seeds):
        torch.manual_seed(seed)
        both = ours(data, name, seed), peer(data, name)
        start_alike(both[0][0], both[1][0], data)
        aucs = np.stack([train(data, model, logits, seed) for model, logits in both])
        # One epoch for both: after some overfitting, choosing twice may find two epochs by chance.
        pairs.append(aucs[:, aucs[:, :, 0].mean(0).argmax(), 1].tolist())
    mine, theirs = (mean(aucs) for aucs in zip(*pairs, strict=True))
    differences = [a - b for a, b in pairs]
    count = len(differences)
    error = T_95[min(count, len(T_95)) - 1] * stdev(differences) / count**0.5 if count > 1 else 0.0
    seconds = time.monotonic() - start
    print(
        f"| {data.name} | {name} | {mine:.4f} | {theirs:.4f} | {mine - theirs:+.4f} ± {error:.4f} | {seconds:.0f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with FuxiCTR; see peers.py")
    parser.add_argument("--census", type=Path, help="census_income_test.csv.gz")
    parser.add_argument("--movielens-parquet", type=Path, help="folder that data/movielens/prepare.py wrote")
    parser.add_argument("--only", default=",".join(ARGS), help="models, by comma")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    use(args.peers)
    torch.set_num_threads(1)
    print("| data | model | rayrec | FuxiCTR | difference, 95 % interval | seconds |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        sets = []
        if args.census is not None:
            sets.append(Data.census(args.census, Path(folder) / "census"))
        if args.movielens_parquet is not None:
            sets.append(Data.movielens(args.movielens_parquet))
        for data in sets:
            for name in args.only.split(","):
                compare(data, name, args.seeds)


if __name__ == "__main__":
    main()
