"""FuxiCTR's models, made of its own layers, and RecBole's SASRec, for comparisons in one run; nothing else needs them.

    pip install --target DIR --no-deps fuxictr recbole colorlog==4.7.2 colorama texttable thop tabulate plotly narwhals
    pip install --target DIR polars scikit-learn keras_preprocessing h5py pandas PyYAML tqdm

and give DIR as `--peers`. FuxiCTR's package holds its layers and DIN; its other models, which are in its repository
alone, are put together here of its layers as the papers have them.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


def use(folder: Path | None) -> None:
    """Packages of `folder` are found after those that are installed."""
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))


def feature_map(numbers: Sequence[str], vocabularies: Mapping[str, int], labels: Sequence[str]) -> Any:
    """What FuxiCTR's models are made from; id 0 is its padding."""
    from fuxictr.features import FeatureMap

    made = FeatureMap("peer", ".")
    made.features = OrderedDict({name: {"type": "numeric", "source": ""} for name in numbers})
    for name, size in vocabularies.items():
        made.features[name] = {"type": "categorical", "source": "", "vocab_size": size + 1, "padding_idx": 0}
    made.labels, made.num_fields = list(labels), len(made.features)
    made.total_features, made.input_length = sum(vocabularies.values()), len(made.features)
    made.set_column_index()
    return made


class FuxiExperts(nn.Module):
    """MMoE (`own` 0) or PLE of one level, of FuxiCTR's `FeatureEmbedding` and `MLP_Block`; probabilities `[B, T]`."""

    def __init__(
        self, features: Any, dim: int, own: int, shared: int, expert: Sequence[int], tower: Sequence[int]
    ) -> None:
        super().__init__()
        from fuxictr.pytorch.layers import FeatureEmbedding, MLP_Block

        tasks, width = len(features.labels), dim * features.num_fields
        self.embedding = FeatureEmbedding(features, dim)

        def blocks(count: int) -> nn.ModuleList:
            return nn.ModuleList(MLP_Block(width, hidden_units=list(expert)) for _ in range(count))

        self.own, self.shared = nn.ModuleList(blocks(own) for _ in range(tasks)), blocks(shared)
        self.gates = nn.ModuleList(nn.Linear(width, own + shared) for _ in range(tasks))
        self.towers = nn.ModuleList(
            MLP_Block(expert[-1], hidden_units=list(tower), output_dim=1, output_activation="Sigmoid")
            for _ in range(tasks)
        )

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        x = self.embedding(inputs, flatten_emb=True)
        common = [expert(x) for expert in self.shared]
        outs = []
        for own, gate, tower in zip(self.own, self.gates, self.towers, strict=True):
            found = torch.stack([*(expert(x) for expert in own), *common], dim=1)
            outs.append(tower((gate(x).softmax(1).unsqueeze(-1) * found).sum(1)))
        return torch.cat(outs, dim=1)


class FuxiDIN(nn.Module):
    """DIN over one item table, of FuxiCTR's `DIN_Attention` and `MLP_Block`; histories are padded with item 0."""

    def __init__(self, items: int, dim: int, attention: Sequence[int], over: Sequence[int]) -> None:
        super().__init__()
        from fuxictr.pytorch.layers import DIN_Attention, MLP_Block

        self.items = nn.Embedding(items + 1, dim, padding_idx=0)
        self.attention = DIN_Attention(dim, list(attention), "Sigmoid", use_softmax=True)
        self.over = MLP_Block(2 * dim, hidden_units=list(over), output_dim=1, output_activation="Sigmoid")

    def forward(self, item_B: torch.Tensor, history_BN: torch.Tensor) -> torch.Tensor:
        target, history = self.items(item_B), self.items(history_BN)
        pooled = self.attention(target, history, history_BN > 0)
        return self.over(torch.cat([target, pooled], dim=1)).squeeze(1)


class FuxiRanker(nn.Module):
    """A model of one label, of FuxiCTR's layers where its package has them; logits `[B]`.

    Args:
        name: one of `MODELS` of rayrec.
        features: of `feature_map`.
        dim: width of the vectors.
        args: widths, by the names of rayrec's arguments.
    """

    def __init__(self, name: str, features: Any, dim: int, args: Mapping[str, Any]) -> None:
        super().__init__()
        from fuxictr.pytorch import layers

        count, width = features.num_fields, dim * features.num_fields
        self.numbers = [name for name, spec in features.features.items() if spec["type"] == "numeric"]
        self.name, self.args, self.dim = name, args, dim
        self.embedding = layers.FeatureEmbedding(features, dim)

        def mlp(size: int, sizes: Sequence[int]) -> nn.Module:
            return layers.MLP_Block(size, hidden_units=list(sizes[:-1]), output_dim=sizes[-1])

        def hidden(size: int, sizes: Sequence[int]) -> nn.Module:
            return layers.MLP_Block(size, hidden_units=list(sizes))

        match name:
            case "dlrm":
                self.embedding = layers.FeatureEmbedding(features, dim, not_required_feature_columns=self.numbers)
                vectors = count - len(self.numbers) + 1
                self.bottom = hidden(len(self.numbers), args["dense_arch"])
                self.products = layers.InnerProductInteraction(vectors, output="inner_product")
                self.over = mlp(dim + vectors * (vectors - 1) // 2, args["over_arch"])
            case "dcn":
                self.cross = layers.CrossNetV2(width, args["cross_layers"])
                self.over = mlp(width, args["over_arch"])
            case "deepfm":
                self.machine = layers.FactorizationMachine(features)
            case "wide_deep":
                self.linear = layers.LogisticRegression(features)
            case "xdeepfm":
                self.linear = layers.LogisticRegression(features)
                self.cin = layers.CompressedInteractionNet(count, list(args["cin"]))
            case "autoint":
                self.attend, out = layers.ScaledDotProductAttention(), args["heads"] * args["head_dim"]
                sizes = [dim] + [out] * (args["layers"] - 1)
                self.q_k_v = nn.ModuleList(
                    nn.ModuleList(nn.Linear(size, out, bias=False) for _ in range(4)) for size in sizes
                )
                self.fc = nn.Linear(count * out, 1)
            case "masknet":
                out, between = args["block_dim"], int(width * args["reduction"])
                self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(count))
                self.masks = nn.ModuleList(
                    nn.Sequential(nn.Linear(width, between), nn.ReLU(), nn.Linear(between, width))
                    for _ in range(args["blocks"])
                )
                self.blocks = nn.ModuleList(
                    nn.Sequential(nn.Linear(width, out, bias=False), nn.LayerNorm(out), nn.ReLU())
                    for _ in range(args["blocks"])
                )
                self.over = mlp(out * args["blocks"], args["over_arch"])
            case "finalmlp":
                self.first, self.second = hidden(width, args["first"]), hidden(width, args["second"])
                self.gates = nn.ModuleList(_Gate(dim, mlp(dim, [*args["gate"], width])) for _ in range(2))
                self.x, self.y = nn.Linear(args["first"][-1], 1), nn.Linear(args["second"][-1], 1)
                parts = [args[name][-1] // args["heads"] for name in ("first", "second")]
                self.xy = nn.Parameter(nn.init.xavier_normal_(torch.empty(args["heads"], *parts)))
            case "gdcn":
                self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(args["cross_layers"]))
                self.gates = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(args["cross_layers"]))
                self.over = mlp(width, args["over_arch"])
            case "wukong":
                out = args["fm_vectors"] + args["linear_vectors"]
                self.layers = nn.ModuleList()
                for vectors in [count] + [out] * (args["layers"] - 1):
                    size = vectors * args["rank"]
                    parts = {"rank": nn.Linear(vectors, args["rank"], bias=False), "norm": nn.LayerNorm(size)}
                    parts |= {"mlp": mlp(size, [*args["fm_hidden"], args["fm_vectors"] * dim])}
                    parts |= {"linear": nn.Linear(vectors, args["linear_vectors"], bias=False)}
                    parts |= {"residual": nn.Linear(vectors, out, bias=False) if vectors != out else nn.Identity()}
                    self.layers.append(nn.ModuleDict({**parts, "last": nn.LayerNorm(dim)}))
                self.over = mlp(out * dim, args["over_arch"])
        if name in ("deepfm", "wide_deep", "xdeepfm", "autoint"):
            self.deep = mlp(width, args["deep_arch"])

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        fields = self.embedding(inputs)
        x = fields.flatten(1)
        match self.name:
            case "dlrm":
                dense = self.bottom(torch.stack([inputs[name] for name in self.numbers], dim=1))
                products = self.products(torch.cat([dense[:, None], fields], dim=1))
                out = self.over(torch.cat([dense, products], dim=1))
            case "dcn":
                out = self.over(self.cross(x))
            case "deepfm":
                out = self.machine(inputs, fields) + self.deep(x)
            case "wide_deep":
                out = self.linear(inputs) + self.deep(x)
            case "xdeepfm":
                out = self.linear(inputs) + self.cin(fields) + self.deep(x)
            case "autoint":
                found = fields
                for layer in self.q_k_v:
                    q, k, v, rest = (linear(found) for linear in layer)
                    q, k, v = (part.unflatten(2, (self.args["heads"], -1)).transpose(1, 2) for part in (q, k, v))
                    found = torch.relu(self.attend(q, k, v)[0].transpose(1, 2).flatten(2) + rest)
                out = self.fc(found.flatten(1)) + self.deep(x)
            case "masknet":
                normed = torch.cat([norm(fields[:, place]) for place, norm in enumerate(self.norms)], dim=1)
                pairs = zip(self.masks, self.blocks, strict=True)
                out = self.over(torch.cat([block(mask(x) * normed) for mask, block in pairs], dim=1))
            case "finalmlp":
                a, b = (mlp(x * gate()) for mlp, gate in zip((self.first, self.second), self.gates, strict=True))
                a_h, b_h = (part.unflatten(1, (self.args["heads"], -1)) for part in (a, b))
                out = self.x(a) + self.y(b) + torch.einsum("bhi,hij,bhj->b", a_h, self.xy, b_h)[:, None]
            case "gdcn":
                crossed = x
                for cross, gate in zip(self.crosses, self.gates, strict=True):
                    crossed = x * cross(crossed) * gate(crossed).sigmoid() + crossed
                out = self.over(crossed)
            case _:
                for layer in self.layers:
                    across = fields.transpose(1, 2)
                    fm = layer["mlp"](layer["norm"]((fields @ layer["rank"](across)).flatten(1)))
                    joined = torch.cat([fm.unflatten(1, (-1, self.dim)), layer["linear"](across).mT], dim=1)
                    fields = layer["last"](joined + layer["residual"](across).mT)
                out = self.over(fields.flatten(1))
        return out.squeeze(1)


class _Gate(nn.Module):
    """FinalMLP's 2 sigmoid(MLP(v)) of a learned vector v."""

    def __init__(self, dim: int, mlp: nn.Module) -> None:
        super().__init__()
        self.vector, self.mlp = nn.Parameter(0.1 * torch.randn(1, dim)), mlp

    def forward(self) -> torch.Tensor:
        gate: torch.Tensor = 2 * self.mlp(self.vector).sigmoid()
        return gate


def recbole_epoch(users: Iterable[Sequence[int]], folder: Path, settings: Mapping[str, Any]) -> Callable[[], float]:
    """Trains RecBole's SASRec for an epoch, leave one out, with its own loader and trainer; returns its loss.

    Args:
        users: items of each, oldest first.
        folder: empty; takes RecBole's files.
        settings: over RecBole's own.
    """
    # RecBole 1.2.1 asks for names that numpy 2 no longer has
    for gone, name in (("float_", "float64"), ("complex_", "complex128"), ("unicode_", "str_")):
        setattr(np, gone, getattr(np, name))
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.model.sequential_recommender import SASRec
    from recbole.trainer import Trainer

    (folder / "log").mkdir()
    rows = [f"{u}\t{item}\t{place}\n" for u, items in enumerate(users) for place, item in enumerate(items)]
    head = "user_id:token\titem_id:token\ttimestamp:float\n"
    (folder / "log" / "log.inter").write_text(head + "".join(rows), encoding="utf-8")
    given = {
        "data_path": str(folder),
        "checkpoint_dir": str(folder / "saved"),
        "use_gpu": False,
        "state": "ERROR",
        "show_progress": False,
        "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
        "eval_args": {"split": {"LS": "valid_and_test"}, "order": "TO", "mode": "full"},
        **settings,
    }
    words, sys.argv = sys.argv, sys.argv[:1]  # RecBole reads them
    try:
        config = Config(model="SASRec", dataset="log", config_dict=given)
    finally:
        sys.argv = words
    loader, _, _ = data_preparation(config, create_dataset(config))
    trainer = Trainer(config, SASRec(config, loader.dataset).to(config["device"]))
    return lambda: float(trainer._train_epoch(loader, 0, show_progress=False))
