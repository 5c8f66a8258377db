"""Cases of quantized collections, by TorchRec's paths."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import PlaceholderObserver, QConfig, quantize_dynamic

from tests.torchrec.case import Cases
from tests.torchrec.cases_modules import fill, kjt
from tests.torchrec.package import Package, attempt

CASES = case = Cases()
FORMATS = (torch.qint8, torch.quint8, torch.int8, torch.quint4x2, torch.float16, torch.float32)


def config(dtype: torch.dtype, output: torch.dtype = torch.float32) -> QConfig:
    return QConfig(
        activation=PlaceholderObserver.with_args(dtype=output), weight=PlaceholderObserver.with_args(dtype=dtype)
    )


def bags(rec: Package) -> Any:
    make, mean = rec.EmbeddingBagConfig, rec.PoolingType.MEAN
    tables = [make(name="t", embedding_dim=4, num_embeddings=5, feature_names=["a"])]
    tables += [make(name="u", embedding_dim=8, num_embeddings=5, feature_names=["b"], pooling=mean)]
    return fill(rec.EmbeddingBagCollection(tables=tables))


def sequences(rec: Package) -> Any:
    make = rec.EmbeddingConfig
    return fill(rec.EmbeddingCollection([make(name="v", embedding_dim=4, num_embeddings=5, feature_names=["a"])]))


class Model(nn.Module):
    def __init__(self, rec: Package) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"ebc": bags(rec), "ec": sequences(rec)})

    def forward(self, features: Any) -> Any:
        return [self.inner["ebc"](features).values(), self.inner["ec"](features)["a"].values()]


@case("10/EmbeddingBagCollection")
def bags_from_float(rec: Package) -> Any:
    found = []
    for dtype in FORMATS:
        module = bags(rec)
        module.qconfig = config(dtype)
        quantized = rec("quant.embedding_modules").EmbeddingBagCollection.from_float(module)
        kinds = [each.data_type.value for each in quantized.embedding_bag_configs()]
        found.append([quantized(kjt(rec)), kinds, quantized.output_dtype(), quantized.is_weighted(), quantized.device])
    return found


@case("10/EmbeddingBagCollection")
def sequences_from_float(rec: Package) -> Any:
    module = sequences(rec)
    module.qconfig = config(torch.qint8)
    quantized = rec("quant.embedding_modules").EmbeddingCollection.from_float(module)
    facts = [quantized.embedding_dim(), quantized.need_indices(), quantized.embedding_names_by_table()]
    return [quantized(kjt(rec))["a"], facts, quantized.output_dtype()]


@case("10/EmbeddingBagCollection")
def formats_of_single_tables_and_of_the_output(rec: Package) -> Any:
    module = bags(rec)
    part = PlaceholderObserver.with_args
    module.qconfig = rec("modules.embedding_configs").QuantConfig(
        part(dtype=torch.float16), part(dtype=torch.qint8), {"t": torch.float16}
    )
    quantized = rec("quant").EmbeddingBagCollection.from_float(module)
    return [quantized(kjt(rec)), [each.data_type.value for each in quantized.embedding_bag_configs()]]


@case("10/EmbeddingBagCollection")
def without_a_qconfig(rec: Package) -> Any:
    return attempt(lambda: rec("quant").EmbeddingBagCollection.from_float(bags(rec)))


@case("10/quantize_embeddings")
def models(rec: Package) -> Any:
    home, found = rec("inference.modules"), []
    for inplace in (False, True):
        model = Model(rec)
        quantized = home.quantize_embeddings(model, torch.qint8, inplace)
        kinds = [type(part.inner["ebc"]) is rec("quant").EmbeddingBagCollection for part in (model, quantized)]
        found.append([quantized is model, kinds, quantized(kjt(rec))])
    return found


@case("10/quantize_embeddings")
def further_types_and_outputs(rec: Package) -> Any:
    home, quant = rec("inference.modules"), rec("quant.embedding_modules")
    kind = rec.EmbeddingCollection
    found = home.quantize_embeddings(
        Model(rec), torch.qint8, True, [kind], {kind: quant.EmbeddingCollection}, output_dtype=torch.float16
    )
    by_table = home.quantize_embeddings(Model(rec), torch.qint8, True, per_table_weight_dtype={"t": torch.float16})
    return [found(kjt(rec)), by_table(kjt(rec))[0][:, :4]]


@case("10/quantize_embeddings")
def inference_models(rec: Package) -> Any:
    model = Model(rec)
    return [rec("inference.modules").quantize_inference_model(model) is model, model(kjt(rec))]


@case("10/quantize_embeddings")
def torchs_own_conversion(rec: Package) -> Any:
    kind, model = rec.EmbeddingBagCollection, Model(rec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that it goes away
        quantized = quantize_dynamic(
            model, qconfig_spec={kind: config(torch.qint8)}, mapping={kind: rec("quant").EmbeddingBagCollection}
        )
    return quantized(kjt(rec))
