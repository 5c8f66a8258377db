"""FuxiCTR's models, made of its own layers, and RecBole's SASRec, for comparisons in one run; nothing else needs them.

    pip install --target DIR --no-deps fuxictr recbole colorlog==4.7.2 colorama texttable thop tabulate plotly narwhals
    pip install --target DIR polars scikit-learn keras_preprocessing h5py pandas PyYAML tqdm

and give DIR as `--peers`. FuxiCTR's package holds its layers and DIN; its MMoE and PLE, which are in its repository
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
