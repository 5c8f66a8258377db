"""Cases of tracing: what a graph computes, and which modules are one node."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.torchrec.case import Cases
from tests.torchrec.cases_modules import fill, kjt, tables
from tests.torchrec.package import Package, attempt

CASES = case = Cases()


class Model(nn.Module):
    def __init__(self, rec: Package) -> None:
        super().__init__()
        self.ebc = rec.EmbeddingBagCollection(tables=tables(rec))
        self.over = nn.Sequential(nn.Linear(12, 3), nn.ReLU())

    def forward(self, features: Any, scale: torch.Tensor) -> torch.Tensor:
        return self.over(self.ebc(features).values()) * scale


@case("11/fx.symbolic_trace")
def a_graph_computes_the_same(rec: Package) -> Any:
    model = fill(Model(rec))
    graph, scale = rec("fx").symbolic_trace(model, leaf_modules=["EmbeddingBagCollection"]), torch.tensor(2.0)
    nodes = [(node.op, str(node.target)) for node in graph.graph.nodes]
    return [nodes, graph(kjt(rec), scale), model(kjt(rec), scale), sorted(graph.state_dict()), type(graph).__name__]


@case("11/fx.Tracer")
def leaves(rec: Package) -> Any:
    model, tracer = Model(rec), rec("fx").Tracer(leaf_modules=["Sequential"])
    leaf = [tracer.is_leaf_module(module, "path") for module in (model, model.over, model.over[0])]
    return [leaf, isinstance(tracer, torch.fx.Tracer), rec("fx.tracer").is_fx_tracing()]


@case("11/fx.Tracer", "embedding collections are always one node: their checks of ids are not traced")
def a_collection_is_a_leaf(rec: Package) -> Any:
    return rec("fx").Tracer().is_leaf_module(Model(rec).ebc, "ebc")


class Choice(nn.Module):
    def forward(self, values: torch.Tensor, double: bool) -> torch.Tensor:
        return values * 2 if double else values


class ByData(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values if values.sum() > 0 else -values


@case("11/fx.symbolic_trace")
def constants_and_branches(rec: Package) -> Any:
    trace = rec("fx").symbolic_trace
    graph = trace(Choice(), concrete_args={"double": True})
    return [attempt(lambda: trace(ByData())), graph(torch.ones(2), True)]


class OnTensors(nn.Module):
    """Makes its sparse tensors of a request's tensors, as a model that is exported does."""

    def __init__(self, rec: Package) -> None:
        super().__init__()
        self.rec, self.ebc = rec, Model(rec).ebc

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
        rec, keys = self.rec, ["a", "b"]
        one = rec.KeyedJaggedTensor.from_lengths_sync(keys, values, lengths)
        first, second = one.split([1, 1])
        joined = rec.KeyedJaggedTensor.concat([second, first]).permute([1, 0])
        pooled = self.ebc(rec.KeyedJaggedTensor(keys=keys, values=joined.values(), lengths=joined.lengths()))
        groups = rec.KeyedTensor.regroup_as_dict([pooled], [["a"], ["b@t", "a"]], ["x", "y"])
        again = rec.KeyedTensor(["z"], [groups["x"].shape[1]], groups["x"])
        jagged = rec.JaggedTensor(one["a"].values(), lengths=one["a"].lengths())
        return [groups["y"], again["z"], jagged.to_padded_dense(3), rec.KeyedTensor.regroup([pooled], [["b@u"]])[0]]


@case("11/fx.symbolic_trace")
def sparse_tensors_made_inside(rec: Package) -> Any:
    model, one = fill(OnTensors(rec)), kjt(rec)
    graph = rec("fx").symbolic_trace(model, leaf_modules=["EmbeddingBagCollection"])
    return [graph(one.values(), one.lengths()), model(one.values(), one.lengths())]
