"""Cases on drawn inputs of the public classes beside the tables' optimizers, and the types of their errors."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import torch

from tests.torchrec.case import Cases
from tests.torchrec.cases_modules import fill, gradients, inputs, kjt
from tests.torchrec.cases_sparse import draw, ints
from tests.torchrec.package import Package

CASES = case = Cases()
WRONG = "what does not fit raises ValueError with a text, where TorchRec fails an assertion, a look-up, or later"
BUILT_IN = (
    KeyError,
    IndexError,
    NotImplementedError,
    ValueError,
    TypeError,
    AssertionError,
    AttributeError,
    RuntimeError,
)


def error_of(call: Callable[[], Any]) -> str:
    """The built-in type of the error that a call raises, by which a program may catch it; "none" if it returns."""
    try:
        call()
    except Exception as error:
        return next((kind.__name__ for kind in BUILT_IN if isinstance(error, kind)), "another")
    return "none"


def jagged(rec: Package, numbers: random.Random) -> Any:
    """A JaggedTensor with numbers or vectors as values, by lengths or offsets, weighted or not."""
    lengths = [numbers.choice([0, 0, 1, 2, 4]) for _ in range(numbers.randint(1, 5))]
    total, width = sum(lengths), numbers.choice([0, 0, 1, 3])
    values = torch.arange(total * max(width, 1), dtype=numbers.choice([torch.float32, torch.int64, torch.int32]))
    values = values.view(total, width) if width else values
    weights = torch.arange(total) / 8 if numbers.random() < 0.5 else None
    if numbers.random() < 0.5:
        return rec.JaggedTensor(values, weights, lengths=ints(*lengths))
    return rec.JaggedTensor(values, weights, offsets=torch.tensor([0, *lengths]).cumsum(0).int())


@case("1/jt.JaggedTensor")
def drawn_jts(rec: Package) -> Any:
    numbers, out = random.Random(5), []
    for _ in range(12):
        one = jagged(rec, numbers)
        kept = pickle.loads(pickle.dumps(one))
        wanted = numbers.choice([None, 0, 1, 3, 6])
        found = [one, kept, copy.deepcopy(one), one.offsets(), str(one), one.to_dense()]
        found.append(one.to_padded_dense(wanted, -2.0))
        if one.weights_or_none() is not None:
            found += [one.to_dense_weights(), one.to_padded_dense_weights(wanted, 0.5)]
        out.append([*found, rec.JaggedTensor.empty_like(one), one.to(torch.device("cpu"))])
    return out


@case("1/kjt.KeyedJaggedTensor")
def drawn_kjt_forms(rec: Package) -> Any:
    numbers, out = random.Random(6), []
    for _ in range(10):
        one = draw(rec, numbers)
        buffer = io.BytesIO()
        torch.save(one, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        moved = one.to(torch.device("cpu"), dtype=torch.float64 if one.weights_or_none() is not None else None)
        empty = rec.KeyedJaggedTensor.empty_like(one)
        parts = [one.length_per_key(), one.offset_per_key(), one.lengths_offset_per_key(), one.index_per_key()]
        strides = [one.stride_per_key(), one.stride_per_key_per_rank(), one.variable_stride_per_key()]
        items = {key: one[key].to_dense() for key in one.keys()}
        out.append([loaded, moved, empty.keys(), copy.deepcopy(one), *parts, *strides, items])
        out.append([one.flatten_lengths().lengths(), one.offsets(), one.sync().lengths(), one.unsync().values()])
        if len(set(one.stride_per_key())) == 1:
            out.append(rec.KeyedJaggedTensor.from_jt_dict(one.to_dict()))
    return out


@case("1/kjt.to_dict")
def drawn_kjt_rebuilt(rec: Package) -> Any:
    numbers, out = random.Random(8), []
    for _ in range(12):
        one = draw(rec, numbers)
        make = rec.KeyedJaggedTensor.from_offsets_sync if numbers.random() < 0.5 else None
        strides = one.stride_per_key_per_rank() if one.variable_stride_per_key() else None
        common = {"weights": one.weights_or_none(), "stride_per_key_per_rank": strides}
        again = (
            make(one.keys(), one.values(), one.offsets(), **common)
            if make
            else rec.KeyedJaggedTensor.from_lengths_sync(one.keys(), one.values(), one.lengths(), **common)
        )
        first, rest = [again.keys()[0]], again.keys()[1:]
        segments = [1, len(rest)] if rest else [1]
        pieces = again.split(segments)
        joined = rec.KeyedJaggedTensor.concat(pieces)
        out.append([again, [piece.to_dict() for piece in pieces], joined, joined.offset_per_key(), first])
        out.append([again.permute([*range(len(again.keys()))][::-1]).to_dict(compute_offsets=False), len(segments)])
    return out


@case("1/kjt.KeyedJaggedTensor")
def errors_of_sparse(rec: Package) -> Any:
    both, single = kjt(rec), rec.JaggedTensor(torch.arange(3), lengths=ints(1, 2))
    tensor = rec.KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(2, 3))
    calls = {
        "key that there is not": lambda: both["z"],
        "kt key that there is not": lambda: tensor["z"],
        "index out of range": lambda: both.permute([5]),
        "concat nothing": lambda: rec.KeyedJaggedTensor.concat([]),
        "concat mixed weights": lambda: rec.KeyedJaggedTensor.concat([both, kjt(rec, weighted=True)]),
        "concat of other strides": lambda: rec.KeyedJaggedTensor.concat(
            [both, rec.KeyedJaggedTensor(["c"], torch.arange(3), lengths=ints(1, 1, 1))]
        ),
        "regroup unknown": lambda: rec.KeyedTensor.regroup([tensor], [["z"]]),
        "weights in dense": single.to_dense_weights,
        "weights in padded": lambda: single.to_padded_dense_weights(2),
        "from no tensors": lambda: rec.KeyedTensor.from_tensor_list(["a"], []),
    }
    return {name: error_of(call) for name, call in calls.items()}


@case("1/kjt.KeyedJaggedTensor", WRONG)
def errors_of_asserts(rec: Package) -> Any:
    both, single = kjt(rec), rec.JaggedTensor(torch.arange(3), lengths=ints(1, 2))
    calls = (
        both.weights,
        single.weights,
        both.inverse_indices,
        lambda: both.split([3, 4]),
        lambda: rec.JaggedTensor(torch.arange(3)),
    )
    return [error_of(call) for call in calls]


@case("1/kjt.KeyedJaggedTensor")
def nothing_of_any_type(rec: Package) -> Any:
    """`torch.tensor([])` has numbers of float32."""
    none, make = torch.tensor([]), rec.KeyedJaggedTensor
    by_lengths, by_offsets = make(["a"], none, lengths=none), make(["b"], none, offsets=none)
    varying = make(["a"], none, lengths=none, stride_per_key_per_rank=[[]])
    both = rec.KeyedJaggedTensor.concat([by_lengths, by_offsets])
    lists = [kjt[key].lengths().numel() for kjt in (by_lengths, by_offsets, both) for key in kjt.keys()]
    two = make(["a", "b"], none, lengths=torch.tensor([[], []]), length_per_key=[0, 0]).to_dict()
    shapes = [list(two["b"].values().shape), rec.JaggedTensor(none, lengths=none).lengths().numel()]
    return [lists, both.keys(), varying.stride(), shapes, str(make([], none)), make([], none).keys()]


def drawn_tables(rec: Package, kind: str, numbers: random.Random, dims: list[int]) -> tuple[list[Any], list[str]]:
    """One to four tables, some of which share features."""
    configs, features = [], [f"f{n}" for n in range(numbers.randint(1, 4))]
    for place in range(numbers.randint(1, 4)):
        more = {"pooling": numbers.choice([rec.PoolingType.SUM, rec.PoolingType.MEAN])} if "Bag" in kind else {}
        chosen = sorted(numbers.sample(features, numbers.randint(1, len(features))))
        dim, rows = numbers.choice(dims), numbers.randint(3, 20)
        configs.append(
            getattr(rec, kind)(name=f"t{place}", embedding_dim=dim, num_embeddings=rows, feature_names=chosen, **more)
        )
    return configs, features


def drawn_batch(rec: Package, features: list[str], numbers: random.Random, **more: Any) -> Any:
    batch = numbers.randint(1, 4)
    lengths = [numbers.choice([0, 1, 3]) for _ in range(batch * len(features))]
    ids = torch.tensor([numbers.randint(0, 2) for _ in range(sum(lengths))], dtype=torch.int64)
    return rec.KeyedJaggedTensor(features, ids, lengths=ints(*lengths), **more)


@case("2/EmbeddingBagCollection")
def drawn_bags(rec: Package) -> Any:
    numbers, out = random.Random(9), []
    for _ in range(12):
        configs, features = drawn_tables(rec, "EmbeddingBagConfig", numbers, [4, 8])
        module = fill(rec.EmbeddingBagCollection(tables=configs))
        pooled = module(drawn_batch(rec, [*features, "unused"], numbers))
        grads = gradients(module, pooled.values())
        meta = rec.EmbeddingBagCollection(tables=copy.deepcopy(configs), device=torch.device("meta"))
        shapes = {name: [list(value.shape), str(value.device)] for name, value in meta.state_dict().items()}
        facts = [module.is_weighted(), [config.name for config in module.embedding_bag_configs()]]
        out.append([pooled, grads, sorted(module.state_dict()), shapes, *facts, str(type(pooled).__name__)])
    return out


@case("2/EmbeddingCollection")
def drawn_sequences(rec: Package) -> Any:
    numbers, out = random.Random(10), []
    for _ in range(12):
        configs, features = drawn_tables(rec, "EmbeddingConfig", numbers, [4])
        indices = numbers.random() < 0.5
        module = fill(rec.EmbeddingCollection(tables=configs, need_indices=indices))
        found = module(drawn_batch(rec, [*features, "unused"], numbers))
        total = torch.cat([found[key].values().flatten() for key in sorted(found)])
        facts = [module.need_indices(), module.embedding_dim(), module.embedding_names_by_table()]
        out.append([found, gradients(module, total), sorted(module.state_dict()), *facts])
    return out


@case("2/EmbeddingBagCollection")
def errors_of_collections(rec: Package) -> Any:
    def config(**more: Any) -> Any:
        return rec.EmbeddingBagConfig(
            **{"name": "t", "embedding_dim": 4, "num_embeddings": 5, "feature_names": ["a"]} | more
        )

    def sequence(**more: Any) -> Any:
        return rec.EmbeddingConfig(
            **{"name": "t", "embedding_dim": 4, "num_embeddings": 5, "feature_names": ["a"]} | more
        )

    bags = rec.EmbeddingBagCollection(tables=[config()])
    calls = {
        "two of a name": lambda: rec.EmbeddingBagCollection(tables=[config(), config()]),
        "two sequences of a name": lambda: rec.EmbeddingCollection(tables=[sequence(), sequence()]),
        "widths differ": lambda: rec.EmbeddingCollection(tables=[sequence(), sequence(name="u", embedding_dim=8)]),
        "state missing": lambda: bags.load_state_dict({}),
        "argument unknown": lambda: rec.EmbeddingBagCollection(tables=[config()], wrong=1),
        "config argument unknown": lambda: config(wrong=1),
        "mlp of no layers": lambda: rec("modules.mlp").MLP(4, []),
        "dlrm of other width": lambda: rec("models.dlrm").DLRM(bags, 3, [8, 6], [4, 1]),
    }
    return {name: error_of(call) for name, call in calls.items()}


@case("2/EmbeddingBagCollection", WRONG)
def errors_of_batches(rec: Package) -> Any:
    facts = {"name": "t", "embedding_dim": 4, "num_embeddings": 5}
    config = rec.EmbeddingBagConfig(**facts, feature_names=["a"])
    weighted = rec.EmbeddingBagCollection(tables=[config], is_weighted=True)
    calls = (
        lambda: rec.EmbeddingBagConfig(**facts, feature_names=[]),
        lambda: rec.EmbeddingBagCollection(tables=[config])(drawn_batch(rec, ["z"], random.Random(1))),
        lambda: weighted(drawn_batch(rec, ["a"], random.Random(1))),
    )
    return [error_of(call) for call in calls]


@case("2/MLP")
def drawn_layers(rec: Package) -> Any:
    numbers, out = random.Random(11), []
    for _ in range(4):
        width, sizes = numbers.randint(2, 6), [numbers.randint(2, 6) for _ in range(numbers.randint(1, 3))]
        layers = [
            rec("modules.mlp").MLP(width, sizes, bias=numbers.random() < 0.5),
            rec("modules.crossnet").CrossNet(width, numbers.randint(1, 3)),
            rec("modules.crossnet").LowRankCrossNet(width, numbers.randint(1, 3), numbers.randint(1, 3)),
            rec("modules.crossnet").VectorCrossNet(width, numbers.randint(1, 3)),
            rec("modules.crossnet").LowRankMixtureCrossNet(width, 2, numbers.randint(1, 3), numbers.randint(1, 2)),
            rec("modules.activation").SwishLayerNorm(width),
        ]
        for layer in layers:
            given = inputs(3, width).requires_grad_()
            found = fill(layer)(given)
            out.append([found, gradients(layer, found), given.grad, sorted(layer.state_dict())])
    return out


@case("3/dlrm.DLRM")
def drawn_models(rec: Package) -> Any:
    home, numbers, out = rec("models.dlrm"), random.Random(12), []
    for place in range(6):
        features = [f"f{n}" for n in range(numbers.randint(2, 4))]
        sizes = {"embedding_dim": 4, "num_embeddings": 5}
        configs = [rec.EmbeddingBagConfig(name=f"t_{one}", feature_names=[one], **sizes) for one in features]
        collection = rec.EmbeddingBagCollection(tables=configs)
        kinds = (home.DLRM, home.DLRM_DCN, home.DLRM_Projection)
        more = (
            {},
            {"dcn_num_layers": 2, "dcn_low_rank_dim": 3},
            {"interaction_branch1_layer_sizes": [8, 8], "interaction_branch2_layer_sizes": [8, 8]},
        )[place % 3]
        model = fill(kinds[place % 3](collection, 3, [6, 4], [5, 1], **more))
        batch = drawn_batch(rec, features, numbers)
        train = home.DLRMTrain(model)
        labels = torch.ones(batch.stride())
        loss, (shown, logits, _) = train(rec("datasets.utils").Batch(inputs(batch.stride(), 3), batch, labels))
        out.append([loss, shown, logits, gradients(train, loss[None]), sorted(train.state_dict())])
    return out


@case("4/KeyedOptimizer")
def errors_of_optimizers(rec: Package) -> Any:
    home, weight = rec("optim.keyed"), torch.nn.Parameter(torch.ones(2))
    one = home.KeyedOptimizerWrapper({"a": weight}, lambda given: torch.optim.SGD(given, lr=0.1))
    other = home.KeyedOptimizerWrapper({"a": weight}, lambda given: torch.optim.SGD(given, lr=0.1))
    calls = {
        "one key twice": lambda: home.CombinedOptimizer([one, other]),
        "state of another key": lambda: one.load_state_dict({"state": {"b": {}}, "param_groups": []}),
        "no state": lambda: one.load_state_dict({}),
        "group of another": lambda: one.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}),
        "filter of tensors": lambda: home.KeyedOptimizer({"a": weight}, {}, [{"params": []}]),
        "state of none": lambda: home.KeyedOptimizer({"a": weight}, {torch.nn.Parameter(torch.ones(1)): {}}, []),
    }
    return {name: error_of(call) for name, call in calls.items()}
