"""Cases on drawn inputs beside those of `cases_sparse` and `cases_optim`: tables that are trained inside backward."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from tests.torchrec.case import Cases
from tests.torchrec.cases_distributed import one_rank, whole
from tests.torchrec.cases_modules import fill
from tests.torchrec.package import Package

CASES = case = Cases()
KINDS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)


def drawn_collection(rec: Package, numbers: random.Random) -> tuple[Any, list[str], bool]:
    """An unsharded collection of one to three tables, some of which share a feature; its features."""
    weighted, configs = numbers.random() < 0.3, []
    for place in range(numbers.randint(1, 3)):
        features = [f"f{place}"] + (["f0"] if place and numbers.random() < 0.4 else [])
        pooling = rec.PoolingType.SUM if weighted or numbers.random() < 0.5 else rec.PoolingType.MEAN
        dim, rows = 4 * numbers.randint(1, 3), numbers.randint(2, 9)
        configs.append(
            rec.EmbeddingBagConfig(
                name=f"t{place}", embedding_dim=dim, num_embeddings=rows, feature_names=features, pooling=pooling
            )
        )
    collection = rec.EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=torch.device("cpu"))
    return fill(collection), [f"f{place}" for place in range(len(configs))], weighted


def drawn_ids(rec: Package, features: list[str], weighted: bool, generator: torch.Generator) -> Any:
    """Ids that every table has; some bags are empty."""
    lengths = torch.randint(0, 4, (len(features) * 3,), generator=generator)
    ids = torch.randint(0, 2, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    return rec.KeyedJaggedTensor(keys=features, values=ids, weights=weights, lengths=lengths)


def trained(rec: Package, seed: int) -> Any:
    """Outputs, weights and the optimizer's state after three steps."""
    numbers, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    collection, features, weighted = drawn_collection(rec, numbers)
    params = {
        "optimizer": KINDS[seed % 3],
        "learning_rate": numbers.uniform(0.01, 0.5),
        "eps": numbers.uniform(1e-8, 0.1),
    }
    sharder = rec("distributed.embeddingbag").EmbeddingBagCollectionSharder(fused_params=params)
    model = torch.nn.ModuleDict({"ebc": collection})
    weights = copy.deepcopy(model.state_dict())
    home = rec("distributed.sharding_plan")
    cuts = {config.name: home.table_wise(rank=0) for config in collection.embedding_bag_configs()}
    plan = home.construct_module_sharding_plan(collection, cuts, sharder, 1, 1, "cpu")
    parallel = rec("distributed.model_parallel").DistributedModelParallel(
        model, device=torch.device("cpu"), plan=rec("distributed.types").ShardingPlan({"ebc": plan}), sharders=[sharder]
    )
    parallel.load_state_dict(weights)
    outputs = []
    for _ in range(3):
        pooled = parallel.module["ebc"](drawn_ids(rec, features, weighted, generator)).wait()
        outputs.append({key: pooled[key].detach().clone() for key in sorted(pooled.keys())})
        factor = torch.rand(pooled.values().shape[1], generator=generator)
        sum((pooled[key] * factor[: pooled[key].shape[1]]).sum() for key in pooled.keys()).backward()
    state = parallel.fused_optimizer.state_dict()["state"]
    moments = {key: {name: whole(value) for name, value in of.items()} for key, of in state.items()}
    return [outputs, {key: whole(value) for key, value in parallel.state_dict().items()}, moments]


@case("4/fused.FusedOptimizer")
def drawn_table_optimizers(rec: Package) -> Any:
    with one_rank():
        return [trained(rec, seed) for seed in range(18)]


@case("1/kt.regroup")
def drawn_gradients_of_regrouped(rec: Package) -> Any:
    numbers, found = random.Random(3), []
    for place in range(12):
        torch.manual_seed(place)
        widths = [numbers.randint(1, 4) for _ in range(numbers.randint(2, 4))]
        values = torch.rand(3, sum(widths), requires_grad=True)
        tensor = rec.KeyedTensor([f"k{n}" for n in range(len(widths))], widths, values)
        groups = [[f"k{numbers.randrange(len(widths))}" for _ in range(2)] for _ in range(2)]
        for factor, group in enumerate(rec.KeyedTensor.regroup([tensor], groups)):
            (group.square().sum() * (factor + 1)).backward(retain_graph=True)
        found.append(values.grad)
    return found
