"""Cases of the models: TorchRec's state names and arguments, same weights in, same numbers out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.torchrec.case import Cases
from tests.torchrec.cases_modules import fill, gradients, inputs, ints, shapes
from tests.torchrec.package import Package, attempt

CASES = case = Cases()


def bags(rec: Package, dims: tuple[int, int] = (4, 4)) -> Any:
    config = rec.EmbeddingBagConfig
    return rec.EmbeddingBagCollection(
        tables=[
            config(num_embeddings=6, embedding_dim=dims[0], name="t", feature_names=["a", "b"]),
            config(num_embeddings=5, embedding_dim=dims[1], name="u", feature_names=["c"]),
        ]
    )


def kjt(rec: Package) -> Any:
    return rec.KeyedJaggedTensor(["a", "b", "c"], ints(0, 3, 4, 1, 1, 2), lengths=ints(2, 0, 1, 1, 1, 1))


def run(rec: Package, model: Any) -> Any:
    out = fill(model)(inputs(2, 3), kjt(rec))
    return [shapes(model), out, gradients(model, out)]


@case("3/dlrm.DLRM")
def dlrm(rec: Package) -> Any:
    make = rec("models.dlrm").DLRM
    return [
        run(rec, make(bags(rec), 3, [8, 4], [5, 1])),
        run(rec, make(bags(rec), 3, [8, 4], [5, 3, 2], torch.device("cpu"))),
        attempt(lambda: make(bags(rec), 3, [8, 5], [5, 1])),
        attempt(lambda: make(bags(rec, (4, 8)), 3, [8, 4], [5, 1])),
        hasattr(make, "compile_dense_path"),
    ]


@case("3/dlrm.DLRMTrain")
def dlrm_train(rec: Package) -> Any:
    home = rec("models.dlrm")
    model = fill(home.DLRMTrain(home.DLRM(bags(rec), 3, [8, 4], [5, 1])))
    batch = rec("datasets.utils").Batch(inputs(2, 3), kjt(rec), ints(0, 1))
    loss, parts = model(batch)
    loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    return [shapes(model), loss, parts, [part.requires_grad for part in parts], grads]


@case("3/dlrm.DLRM_DCN")
def dlrm_dcn(rec: Package) -> Any:
    make = rec("models.dlrm").DLRM_DCN
    return run(rec, make(bags(rec), 3, [8, 4], [5, 1], dcn_num_layers=2, dcn_low_rank_dim=2))


@case("3/dlrm.DLRM_Projection")
def dlrm_projection(rec: Package) -> Any:
    make = rec("models.dlrm").DLRM_Projection
    return [
        run(rec, make(bags(rec), 3, [8, 4], [5, 1], [8, 8], [6, 12])),
        attempt(lambda: make(bags(rec), 3, [8, 4], [5, 1], [8, 7], [6, 12])),
    ]


@case("3/dlrm.SparseArch")
def dlrm_sparse(rec: Package) -> Any:
    make = rec("models.dlrm").SparseArch
    arch = make(bags(rec))
    out = fill(arch)(kjt(rec))
    return [out, arch.sparse_feature_names, arch.F, arch.D]


@case("3/dlrm.DenseArch")
def dlrm_dense(rec: Package) -> Any:
    home = rec("models.dlrm")
    dense, over = fill(home.DenseArch(3, [4, 2], device=torch.device("cpu"))), fill(home.OverArch(3, [4, 2, 1]))
    return [
        [shapes(dense), dense(inputs(2, 3)), shapes(over), over(inputs(2, 3))],
        attempt(lambda: home.OverArch(3, [1])),
    ]


@case("3/dlrm.InteractionArch")
def dlrm_interactions(rec: Package) -> Any:
    home = rec("models.dlrm")
    cross = fill(rec("modules.crossnet").LowRankCrossNet(12, 1, 2))
    branches = [fill(home.DenseArch(12, [5, 8])), fill(home.DenseArch(12, [4]))]
    dense, sparse = inputs(2, 4), inputs(2, 2, 4) + 1
    return [
        home.InteractionArch(2)(dense, sparse),
        home.InteractionArch(num_sparse_features=0)(dense, sparse[:, :0]),
        home.InteractionDCNArch(2, cross)(dense, sparse),
        home.InteractionProjectionArch(2, *branches)(dense, sparse),
    ]


@case("3/dlrm.DLRMWrapper")
def dlrm_wrapper(rec: Package) -> Any:
    home = rec("models.dlrm")
    model = fill(home.DLRMWrapper(bags(rec), 3, [8, 4], [5, 1]))
    given = SimpleNamespace(float_features=inputs(2, 3), idlist_features=kjt(rec), label=torch.tensor([0.0, 1.0]))
    return [model(given), model.eval()(given), [home.choose(*pair) for pair in ((4, 2), (3, 0), (2, 3))]]


@case("3/deepfm.SimpleDeepFMNN")
def deepfm(rec: Package) -> Any:
    make = rec("models.deepfm").SimpleDeepFMNN
    model = make(num_dense_features=3, embedding_bag_collection=bags(rec), hidden_layer_size=6, deep_fm_dimension=5)
    return [run(rec, model), attempt(lambda: make(3, bags(rec, (4, 8)), 6, 5))]


@case("3/deepfm.SparseArch")
def deepfm_parts(rec: Package) -> Any:
    home = rec("models.deepfm")
    dense, over = fill(home.DenseArch(3, 5, 4)), fill(home.OverArch(6))
    sparse = fill(home.SparseArch(bags(rec)))
    inter = fill(home.FMInteractionArch(16, ["a", "b", "c"], 3))
    vectors = sparse(kjt(rec))
    return [
        [dense(inputs(2, 3)), over(inputs(2, 6)), vectors, inter(inputs(2, 4), vectors)],
        [shapes(part) for part in (dense, over, sparse, inter)],
    ]


@case("3/deepfm.SparseArch", "the loss is computed from probabilities; TorchRec treats them as logits")
def deepfm_wrapper(rec: Package) -> Any:
    wrapper = fill(rec("models.deepfm").SimpleDeepFMNNWrapper(3, bags(rec), 6, 5))
    labels = torch.tensor([0.0, 1.0])
    return wrapper(SimpleNamespace(float_features=inputs(2, 3), idlist_features=kjt(rec), label=labels))


@case("3/deepfm.SparseArch")
def deepfm_wrapper_outside_training(rec: Package) -> Any:
    wrapper = fill(rec("models.deepfm").SimpleDeepFMNNWrapper(3, bags(rec), 6, 5)).eval()
    return wrapper(SimpleNamespace(float_features=inputs(2, 3), idlist_features=kjt(rec)))
