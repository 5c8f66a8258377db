"""Built-in models; each takes a `Batch` and returns the loss and logits `[B]`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from rayrec.models.autoint import AutoInt
from rayrec.models.batch import Batch, Sequence
from rayrec.models.bst import bst
from rayrec.models.dcn import DCN
from rayrec.models.deepfm import DeepFM
from rayrec.models.din import DIN
from rayrec.models.dlrm import DLRM
from rayrec.models.esmm import ESMM
from rayrec.models.finalmlp import FinalMLP
from rayrec.models.gdcn import GDCN
from rayrec.models.hstu_ranker import HSTURanker
from rayrec.models.item_features import ItemFeatures
from rayrec.models.loss import mean_loss
from rayrec.models.masknet import MaskNet
from rayrec.models.next_item import hstu, sasrec
from rayrec.models.ple import PLE, mmoe
from rayrec.models.ranker import Ranker
from rayrec.models.retriever import Retriever
from rayrec.models.two_tower import TwoTower
from rayrec.models.wide_deep import WideDeep
from rayrec.models.wukong import Wukong
from rayrec.models.xdeepfm import XDeepFM

# factory(tables, num_dense, device=..., **settings); the tables stay on the meta device until they are sharded.
MODELS: dict[str, Callable[..., nn.Module]] = {
    "dlrm": DLRM,
    "dcn": DCN,
    "gdcn": GDCN,
    "deepfm": DeepFM,
    "xdeepfm": XDeepFM,
    "wide_deep": WideDeep,
    "autoint": AutoInt,
    "masknet": MaskNet,
    "finalmlp": FinalMLP,
    "wukong": Wukong,
    "din": DIN,
    "bst": bst,
    "hstu_ranker": HSTURanker,
    "mmoe": mmoe,
    "ple": PLE,
    "esmm": ESMM,
}
# The same arguments; these return a `Retriever`.
RETRIEVERS: dict[str, Callable[..., Retriever]] = {"sasrec": sasrec, "hstu": hstu, "two_tower": TwoTower}
BUILT_IN: dict[str, Callable[..., nn.Module]] = {**MODELS, **RETRIEVERS}

__all__ = [
    "BUILT_IN",
    "DCN",
    "DIN",
    "DLRM",
    "ESMM",
    "GDCN",
    "MODELS",
    "PLE",
    "RETRIEVERS",
    "AutoInt",
    "Batch",
    "DeepFM",
    "FinalMLP",
    "HSTURanker",
    "ItemFeatures",
    "MaskNet",
    "Ranker",
    "Retriever",
    "Sequence",
    "WideDeep",
    "Wukong",
    "XDeepFM",
    "bst",
    "hstu",
    "mean_loss",
    "mmoe",
    "sasrec",
]
