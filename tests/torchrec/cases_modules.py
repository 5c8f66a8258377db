"""Cases of the modules: same weights in, same numbers out."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.torchrec.case import Cases
from tests.torchrec.package import Package, attempt

CASES = case = Cases()


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def fill(module: nn.Module) -> nn.Module:
    """Weights that depend on their place alone, so that both packages' modules have the same."""
    with torch.no_grad():
        for place, (_, weight) in enumerate(sorted(module.named_parameters())):
            numbers = torch.arange(weight.numel(), dtype=torch.float32).view(weight.shape)
            weight.copy_(torch.sin(numbers * 0.7 + place) / 2)
    return module


def shapes(module: nn.Module) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in module.state_dict().items()}


def tables(rec: Package, kind: str = "EmbeddingBagConfig", **more: Any) -> list[Any]:
    config = getattr(rec, kind)
    return [
        config(num_embeddings=6, embedding_dim=4, name="t", feature_names=["a", "b"], **more),
        config(num_embeddings=5, embedding_dim=4, name="u", feature_names=["b"], **more),
    ]


def bags(rec: Package, is_weighted: bool = False, **more: Any) -> Any:
    return fill(rec.EmbeddingBagCollection(tables=tables(rec, **more), is_weighted=is_weighted))


def kjt(rec: Package, weighted: bool = False) -> Any:
    values, lengths = ints(0, 3, 4, 1, 1, 2), ints(2, 0, 1, 1, 1, 1)
    return rec.KeyedJaggedTensor(["a", "b"], values, torch.arange(6) / 4 if weighted else None, lengths)


def inputs(*shape: int) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    return torch.cos(torch.arange(count, dtype=torch.float32) * 0.3).view(shape)


def gradients(module: nn.Module, out: torch.Tensor) -> dict[str, torch.Tensor]:
    (out * inputs(*out.shape)).sum().backward()
    return {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


# -- configs


@case("2/EmbeddingBagConfig")
def config_by_position(rec: Package) -> Any:
    one = rec.EmbeddingBagConfig(7, 3, "t", rec.DataType.FP16, ["f"], 0.5, -0.5)
    one.feature_names = ["g"]
    names = sorted(vars(one))
    return [one.num_embeddings, one.embedding_dim, one.name, one.data_type, one.feature_names, one.pooling, names]


@case("2/EmbeddingBagConfig", "init_fn stays None where none was given, so that equal configs compare equal")
def equal_configs(rec: Package) -> Any:
    return rec.EmbeddingBagConfig(7, 4) == rec.EmbeddingBagConfig(7, 4)


@case("2/EmbeddingConfig")
def sequence_config(rec: Package) -> Any:
    return [sorted(vars(rec.EmbeddingConfig(7, 5, "t"))), hasattr(rec.EmbeddingConfig(7, 5), "pooling")]


@case("2/weight_init_min")
def first_weights_range(rec: Package) -> Any:
    plain, given = (
        rec.EmbeddingBagConfig(16, 4),
        rec.EmbeddingBagConfig(16, 4, weight_init_max=3.0, weight_init_min=2.0),
    )
    given.name, given.feature_names = "t", ["f", "g"]
    weight = rec.EmbeddingBagCollection(tables=[given]).embedding_bags["t"].weight
    ends = [(one.get_weight_init_min(), one.get_weight_init_max()) for one in (plain, given)]
    return [ends, given.num_features(), bool((weight >= 2).all() and (weight <= 3).all())]


@case("2/need_pos")
def need_pos(rec: Package) -> Any:
    return [rec.EmbeddingBagConfig(4, 4).need_pos, rec.EmbeddingBagConfig(4, 4, need_pos=True).need_pos]


@case("2/EmbeddingTableConfig")
def table_config(rec: Package) -> Any:
    one = rec("modules.embedding_configs").EmbeddingTableConfig(num_embeddings=4, embedding_dim=4, is_weighted=True)
    return [one.pooling, one.is_weighted, one.has_feature_processor, one.embedding_names]


@case("2/DataType")
def data_types(rec: Package) -> Any:
    return [member.value for member in rec.DataType] + [rec("types").DataType is rec.DataType]


@case("2/PoolingType")
def pooling_types(rec: Package) -> Any:
    return [(member.name, member.value) for member in rec.PoolingType]


@case("2/ShardingType")
def sharding_types_of_configs(rec: Package) -> Any:
    return [member.value for member in rec("modules.embedding_configs").ShardingType]


@case("2/data_type_to_dtype")
def conversions(rec: Package) -> Any:
    home = rec("modules.embedding_configs")
    dtypes = [
        home.data_type_to_dtype(home.DataType(name)) for name in ("FP32", "FP16", "BF16", "INT8", "INT64", "UINT8")
    ]
    back = [home.dtype_to_data_type(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    modes = [int(home.pooling_type_to_pooling_mode(kind)) for kind in home.PoolingType]
    texts = [attempt(lambda k=kind: home.pooling_type_to_str(k)) for kind in home.PoolingType]
    sparse = [str(home.data_type_to_sparse_type(home.DataType(name))) for name in ("FP32", "FP16", "INT8", "INT4")]
    return [dtypes, back, modes, texts, sparse, attempt(lambda: home.dtype_to_data_type(torch.float64))]


@case("2/QuantConfig")
def quant_config(rec: Package) -> Any:
    one = rec("modules.embedding_configs").QuantConfig(1, 2)
    return [one.activation, one.weight, one.per_table_weight_dtype]


# -- collections


@case("2/EmbeddingBagCollection")
def bag_state(rec: Package) -> Any:
    ebc = bags(rec)
    twice = [*tables(rec), tables(rec)[0]]
    return [
        shapes(ebc),
        isinstance(ebc.embedding_bags["t"], nn.EmbeddingBag),
        attempt(lambda: rec.EmbeddingBagCollection(tables=twice)),
        attempt(lambda: rec.EmbeddingBagCollection(tables=tables(rec, pooling=rec.PoolingType.NONE))),
    ]


@case("2/EmbeddingBagCollection", "a collection without tables is refused: it has no device and no output")
def bags_without_tables(rec: Package) -> Any:
    return rec.EmbeddingBagCollection(tables=[]).embedding_bag_configs()


@case("2/EmbeddingBagCollection", "BF16 tables are bfloat16, not float16")
def bags_in_bf16(rec: Package) -> Any:
    ebc = rec.EmbeddingBagCollection(tables=tables(rec, data_type=rec.DataType.BF16))
    return str(ebc.embedding_bags["t"].weight.dtype)


@case("2/forward")
def bag_outputs(rec: Package) -> Any:
    out = []
    for pooling in ("SUM", "MEAN"):
        ebc = bags(rec, pooling=rec.PoolingType(pooling))
        pooled = ebc(kjt(rec))
        out.append([pooled, ebc(kjt(rec, weighted=True)).values(), gradients(ebc, pooled.values())])
    weighted = bags(rec, is_weighted=True)
    half = bags(rec, data_type=rec.DataType.FP16)
    missing = rec.KeyedJaggedTensor(["a"], ints(0), lengths=ints(1))
    out.append([weighted(kjt(rec, weighted=True)), str(half(kjt(rec)).values().dtype)])
    return [out, attempt(lambda: weighted(kjt(rec))), attempt(lambda: bags(rec)(missing))]


@case("2/forward", "a weighted mean is defined: it divides by the number of ids, as fbgemm does")
def weighted_mean(rec: Package) -> Any:
    return bags(rec, is_weighted=True, pooling=rec.PoolingType.MEAN)(kjt(rec, weighted=True)).values()


@case("2/variable batch")
def variable_batch(rec: Package) -> Any:
    parts = (["a", "b"], ints(0, 3, 4), None, ints(1, 1, 1))
    inverse = (["a", "b"], torch.tensor([[0, 1, 0], [0, 0, 0]]))
    whole = rec.KeyedJaggedTensor(*parts, stride_per_key_per_rank=[[2], [1]], inverse_indices=inverse)
    without = rec.KeyedJaggedTensor(*parts, stride_per_key_per_rank=[[2], [1]])
    return [bags(rec)(whole).values(), attempt(lambda: bags(rec)(without))]


@case("2/id outside the table's rows")
def ids_outside(rec: Package) -> Any:
    wrong = rec.KeyedJaggedTensor(["a", "b"], ints(6, 0), lengths=ints(1, 1))
    ec = rec.EmbeddingCollection(tables=tables(rec, "EmbeddingConfig"))
    return [attempt(lambda: bags(rec)(wrong)), attempt(lambda: ec(wrong))]


@case("2/empty batch", "a batch without examples gives [0, D], as needed by ranks that run out of data")
def empty_batch(rec: Package) -> Any:
    nothing = rec.KeyedJaggedTensor(["a", "b"], ints(), lengths=ints(), stride=0)
    return bags(rec)(nothing).values()


@case("2/device")
def bag_facts(rec: Package) -> Any:
    meta = rec.EmbeddingBagCollection(tables=tables(rec), device=torch.device("meta"))
    ebc = bags(rec)
    before = ebc.embedding_bags["t"].weight.clone()
    ebc.reset_parameters()
    changed = not torch.equal(before, ebc.embedding_bags["t"].weight)
    names = [config.name for config in ebc.embedding_bag_configs()]
    return [ebc.device, meta.device, ebc.is_weighted(), names, changed, bags(rec, is_weighted=True).is_weighted()]


@case("2/device", "`device` is the device of the parameters, also after `.to`, and always a torch.device")
def device_of_text(rec: Package) -> Any:
    return isinstance(rec.EmbeddingBagCollection(tables=tables(rec), device="meta").device, torch.device)


@case("2/first weights")
def weights_of_a_seed(rec: Package) -> Any:
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(rec.EmbeddingBagCollection(tables=tables(rec)).embedding_bags["t"].weight.detach())
    bound = (1 / 6) ** 0.5
    constant = rec.EmbeddingBagCollection(tables=tables(rec, init_fn=lambda t: nn.init.constant_(t, 0.25)))
    inside = bool((made[0].abs() <= bound).all())
    same = [torch.equal(made[0], other) for other in made[1:]]
    return [inside, same, constant.embedding_bags["u"].weight.detach()]


@case("2/first weights", "tables are initialized in blocks with separate seeds, so values do not depend on the plan")
def weights_themselves(rec: Package) -> Any:
    torch.manual_seed(1)
    return rec.EmbeddingBagCollection(tables=tables(rec)).embedding_bags["t"].weight.detach()


@case("2/EmbeddingCollection")
def sequences(rec: Package) -> Any:
    ec = fill(rec.EmbeddingCollection(tables=tables(rec, "EmbeddingConfig")))
    out = ec(kjt(rec))
    total = sum(part.values().sum() for part in out.values())
    with_ids = fill(rec.EmbeddingCollection(tables=tables(rec, "EmbeddingConfig"), need_indices=True))
    unlike = [rec.EmbeddingConfig(4, 4, "a", feature_names=["a"]), rec.EmbeddingConfig(4, 8, "b", feature_names=["b"])]
    return [
        shapes(ec),
        out,
        gradients(ec, total.view(1)),
        with_ids(kjt(rec)),
        attempt(lambda: rec.EmbeddingCollection(tables=unlike)),
    ]


@case("2/embedding_dim")
def sequence_facts(rec: Package) -> Any:
    ec = rec.EmbeddingCollection(tables=tables(rec, "EmbeddingConfig"), device=torch.device("cpu"))
    return [ec.embedding_dim(), [c.name for c in ec.embedding_configs()], ec.need_indices(), ec.device]


@case("2/embedding_names_by_table")
def names_by_table(rec: Package) -> Any:
    return rec.EmbeddingCollection(tables=tables(rec, "EmbeddingConfig")).embedding_names_by_table()


@case("2/EmbeddingBagCollectionInterface")
def interfaces(rec: Package) -> Any:
    home = rec("modules.embedding_modules")
    ec = rec.EmbeddingCollection(tables=tables(rec, "EmbeddingConfig"))
    return [
        isinstance(bags(rec), home.EmbeddingBagCollectionInterface),
        isinstance(ec, home.EmbeddingCollectionInterface),
        isinstance(ec, home.EmbeddingBagCollectionInterface),
        attempt(lambda: home.EmbeddingBagCollectionInterface() and None),
    ]


@case("2/get_embedding_names_by_table")
def collection_helpers(rec: Package) -> Any:
    home = rec("modules.embedding_modules")
    indices = torch.tensor([[0, 1], [1, 1]])
    blocks = [inputs(2, 3), inputs(2, 2)]
    return [
        home.get_embedding_names_by_table(tables(rec)),
        home.reorder_inverse_indices((["x", "y"], indices), ["y", "x"]),
        home.reorder_inverse_indices(None, ["x"]),
        home.process_pooled_embeddings(blocks, torch.empty(0)),
        home.process_pooled_embeddings(blocks, indices),
    ]


# -- dense layers


@case("2/MLP")
def mlps(rec: Package) -> Any:
    mlp = rec("modules.mlp").MLP
    shared = nn.PReLU()
    made = [
        mlp(3, [4, 2]),
        mlp(3, [4, 2], False, "sigmoid"),
        mlp(3, [4, 2], activation="swish_layernorm"),
        mlp(3, [4, 2], activation=nn.Tanh),
        mlp(3, [4, 2], activation=lambda: nn.PReLU()),
        mlp(3, [4, 2], activation=shared, activation_on_last=False),
        mlp(3, [4, 2], True, torch.tanh, torch.device("cpu"), torch.float64),
        mlp(3, []),
    ]
    out = []
    for net in made:
        given = inputs(2, 3).to(next(iter(net.state_dict().values()), torch.zeros(1)).dtype)
        out.append([shapes(net), fill(net)(given)])
    return out


@case("2/MLP", "an unknown activation name is refused; TorchRec builds a net without layers")
def mlp_of_unknown_activation(rec: Package) -> Any:
    return shapes(rec("modules.mlp").MLP(3, [4], activation="gelu"))


@case("2/Perceptron")
def perceptrons(rec: Package) -> Any:
    one = fill(rec("modules.mlp").Perceptron(3, 2))
    other = fill(rec("modules.mlp").Perceptron(3, 2, False, nn.Sigmoid()))
    return [shapes(one), one(inputs(2, 3)), shapes(other), other(inputs(2, 3))]


@case("2/SwishLayerNorm")
def swish(rec: Package) -> Any:
    one = fill(rec("modules.activation").SwishLayerNorm(4))
    return [shapes(one), one(inputs(3, 4)), shapes(rec("modules.activation").SwishLayerNorm([2, 3]))]


@case("2/CrossNet")
def cross_nets(rec: Package) -> Any:
    home = rec("modules.crossnet")
    made = [
        home.CrossNet(3, 2),
        home.LowRankCrossNet(3, 2, 2),
        home.VectorCrossNet(3, 2),
        home.LowRankMixtureCrossNet(3, 2, 1, 2),
        home.LowRankMixtureCrossNet(3, 2, num_experts=3, low_rank=2, activation=torch.tanh),
    ]
    out = []
    for net in made:
        result = fill(net)(inputs(4, 3))
        out.append([shapes(net), result, gradients(net, result)])
    return out


@case("2/deepfm.FactorizationMachine")
def factorization_machine(rec: Package) -> Any:
    return rec("modules.deepfm").FactorizationMachine()([inputs(2, 3), inputs(2, 2, 2)])


@case("2/deepfm.DeepFM")
def deep_part(rec: Package) -> Any:
    one = rec("modules.deepfm").DeepFM(dense_module=fill(nn.Linear(7, 3)))
    return [shapes(one), one([inputs(2, 3), inputs(2, 2, 2)])]


# -- feature processors


@case("2/feature_processor.BaseFeatureProcessor")
def processor_bases(rec: Package) -> Any:
    home = rec("modules.feature_processor")
    kinds = (home.BaseFeatureProcessor, home.BaseGroupedFeatureProcessor)
    return [issubclass(kind, nn.Module) for kind in kinds]


@case("2/feature_processor.PositionWeightedModule")
def position_weights_by_name(rec: Package) -> Any:
    one = fill(rec("modules.feature_processor").PositionWeightedModule({"a": 3}))
    return [shapes(one), one(kjt(rec).to_dict())["a"], one(kjt(rec).to_dict())["b"].weights_or_none()]


@case(
    "2/feature_processor.PositionWeightedProcessor",
    "other features are kept, positions beyond the last share its weight, weights of the input multiply",
)
def position_weighted_processor(rec: Package) -> Any:
    one = fill(rec("modules.feature_processor").PositionWeightedProcessor({"a": 3}))
    return [shapes(one), one(kjt(rec).sync())]


@case("2/feature_processor_.FeatureProcessor")
def position_weights_of_one(rec: Package) -> Any:
    home = rec("modules.feature_processor_")
    one = fill(home.PositionWeightedModule(max_feature_length=3))
    out = one(kjt(rec)["a"])
    out.weights().sum().backward()
    long = rec.JaggedTensor(ints(1, 2, 3, 4), lengths=ints(4))
    return [
        shapes(one),
        out,
        one.position_weight.grad,
        isinstance(one, home.FeatureProcessor),
        attempt(lambda: one(long)),
    ]


@case("2/feature_processor_.FeatureProcessorsCollection")
def position_weights_of_all(rec: Package) -> Any:
    home = rec("modules.feature_processor_")
    one = fill(home.PositionWeightedModuleCollection({"a": 3, "b": 2}))
    fresh = home.PositionWeightedModuleCollection({"a": 3})
    by_name = {name: weight.shape for name, weight in one.position_weights_dict.items()}
    is_one = isinstance(one, home.FeatureProcessorsCollection)
    return [shapes(one), one(kjt(rec)), is_one, fresh.position_weights["a"], by_name]


@case("2/fp_embedding_modules.FeatureProcessedEmbeddingBagCollection")
def processed_bags(rec: Package) -> Any:
    home, parts = rec("modules.fp_embedding_modules"), rec("modules.feature_processor_")
    make = home.FeatureProcessedEmbeddingBagCollection
    each = {"a": parts.PositionWeightedModule(3), "b": parts.PositionWeightedModule(2)}
    one = fill(make(rec.EmbeddingBagCollection(tables=tables(rec), is_weighted=True), each))
    together = parts.PositionWeightedModuleCollection({"a": 3, "b": 2})
    other = fill(make(rec.EmbeddingBagCollection(tables=tables(rec), is_weighted=True), together))
    outs = [one(kjt(rec)), other(kjt(rec))]
    return [
        [shapes(one), shapes(other), one.is_weighted()],
        outs,
        [gradients(net, out.values()) for net, out in zip((one, other), outs, strict=True)],
        attempt(lambda: make(bags(rec), copy.deepcopy(each))),
        attempt(lambda: make(bags(rec, is_weighted=True), {"a": parts.PositionWeightedModule(3)})),
    ]


# -- regroup, utils


@case("2/regroup.KTRegroupAsDict")
def regroup_module(rec: Package) -> Any:
    one = rec.KeyedTensor(["a", "b"], [1, 2], inputs(2, 3))
    other = rec.KeyedTensor(["c"], [2], inputs(2, 2))
    make = rec("modules.regroup").KTRegroupAsDict
    net = make([["c", "a"], ["b"]], ["x", "y"])
    half = make([["a"]], ["x"], emb_dtype=rec.DataType.FP16)
    twice = [net([one, other]), net([one, other])]
    return [twice, half([one])["x"].dtype, len(net.state_dict()), attempt(lambda: make([["a"]], ["x", "y"]))]


@case("2/utils")
def module_helpers(rec: Package) -> Any:
    home = rec("modules.utils")
    linear = nn.Linear(3, 2)
    linear.apply(home.init_mlp_weights_xavier_uniform)
    single = home.construct_modulelist_from_single_module(nn.Linear(3, 2), (2, 2))
    given = home.convert_list_of_modules_to_modulelist([nn.Linear(3, 2), nn.Linear(3, 2)], (2,))
    extract = home.extract_module_or_tensor_callable
    return [
        home.get_module_output_dimension(linear, 3),
        [home.check_module_output_dimension(m, 3, 2) for m in (linear, given)],
        linear.bias.detach(),
        bool((linear.weight.abs() <= (6 / 5) ** 0.5).all()),
        shapes(single),
        [extract(linear) is linear, isinstance(extract(nn.ReLU), nn.ReLU), extract(torch.relu) is torch.relu],
        home.construct_jagged_tensors(inputs(6, 2), kjt(rec), ["x", "y"], need_indices=True),
    ]


@case("0/torchrec.types")
def copy_mixins(rec: Package) -> Any:
    home = rec("types")
    return [
        isinstance(getattr(home, n), type) for n in ("CacheMixin", "CopyMixIn", "ModuleCopyMixin", "ModuleNoCopyMixin")
    ]


@case("0/torchrec.streamable")
def streamables(rec: Package) -> Any:
    home = rec("streamable")
    sparse = [kjt(rec), kjt(rec)["a"], bags(rec)(kjt(rec))]
    return [
        [isinstance(one, home.Pipelineable) for one in sparse],
        issubclass(home.Pipelineable, home.Multistreamable),
        [attempt(lambda k=kind: k() and None) for kind in (home.Pipelineable, home.Multistreamable)],
    ]


@case("0/torchrec")
def top_level(rec: Package) -> Any:
    names = "JaggedTensor KeyedJaggedTensor KeyedTensor EmbeddingBagCollection EmbeddingCollection EmbeddingBagConfig"
    return [isinstance(getattr(rec, name), type) for name in f"{names} EmbeddingConfig DataType PoolingType".split()]


@case("0/torchrec#2")
def top_level_more(rec: Package) -> Any:
    names = ["EmbeddingBagCollectionInterface", "Multistreamable", "Pipelineable"]
    packages = ["distributed", "modules", "optim", "sparse", "quant"]
    return [
        [isinstance(getattr(rec, n), type) for n in names],
        [hasattr(getattr(rec, p), "__path__") for p in packages],
    ]


def collisions(rec: Package, policy: str, *settings: Any, **more: Any) -> Any:
    home = rec("modules.mc_modules")
    chosen = getattr(home, f"{policy}_EvictionPolicy")(*settings)
    return home.MCHManagedCollisionModule(5, torch.device("cpu"), chosen, 2, **more)


def remapped(rec: Package, module: Any, steps: int = 8) -> Any:
    """The rows of ids that drift over the steps, and the state at the end."""
    out = []
    for step in range(steps):
        ids = torch.tensor([3, 100 + step, 3, 7 * (step // 2), 900, 100 + step % 3, 7 * (step // 2), step])
        features = {"t": rec.JaggedTensor(ids, lengths=torch.tensor([3, 0, 5]))}
        out.append(module(features)["t"].values())
        if step % 3 == 2:
            out.append(module.evict())
        out.append(module.open_slots())
    module.eval()
    return [out, module(features)["t"].values(), module.state_dict()]


@case("2/mc_modules")
def collisions_by_frequency(rec: Package) -> Any:
    return remapped(rec, collisions(rec, "LFU"))


@case("2/mc_modules")
def collisions_by_recency(rec: Package) -> Any:
    return [remapped(rec, collisions(rec, "LRU")), remapped(rec, collisions(rec, "LRU", 0.5))]


@case("2/mc_modules")
def collisions_by_distance(rec: Package) -> Any:
    return [remapped(rec, collisions(rec, "DistanceLFU")), remapped(rec, collisions(rec, "DistanceLFU", 2.0))]


@case("2/mc_modules")
def collisions_filtered(rec: Package) -> Any:
    home = rec("modules.mc_modules")
    average = home.average_threshold_filter
    counts = torch.tensor([1, 5, 2, 40, 3])
    return [
        remapped(rec, collisions(rec, "LFU", average)),
        remapped(rec, collisions(rec, "DistanceLFU", 1.0, average)),
        [average(counts), home.dynamic_threshold_filter(counts), home.dynamic_threshold_filter(counts, 2.0)],
        home.probabilistic_threshold_filter(counts, 1.0)[0],
    ]


@case("2/mc_modules")
def collisions_of_hashed_ids(rec: Package) -> Any:
    hashed = {"input_hash_size": 50, "input_hash_func": lambda ids, size: ids % size, "output_global_offset": 10}
    module = collisions(rec, "LFU", **hashed)
    out = remapped(rec, module)
    again = module.rebuild_with_output_id_range((0, 3), [0, 3, 6])
    return [out, [module.output_size(), module.input_size(), module.buckets()], [again.output_size(), again.buckets()]]


@case("2/mc_modules")
def collisions_saved(rec: Package) -> Any:
    module = collisions(rec, "DistanceLFU")
    remapped(rec, module)
    other = collisions(rec, "DistanceLFU")
    other.load_state_dict(module.state_dict())
    wrong = collisions(rec, "DistanceLFU", output_global_offset=3)
    refused = attempt(lambda: wrong.load_state_dict(module.state_dict()) and None)
    return [remapped(rec, other, 4), refused, attempt(lambda: collisions(rec, "LFU", zch_size=0) and None)]


def managed(rec: Package, kind: str) -> Any:
    home, collected = rec("modules.mc_modules"), rec("modules.mc_embedding_modules")
    config = getattr(rec, kind)
    configs = [
        config(num_embeddings=4, embedding_dim=4, name="u", feature_names=["b"]),
        config(num_embeddings=5, embedding_dim=4, name="t", feature_names=["a"]),
    ]
    make = home.MCHManagedCollisionModule
    modules = {
        c.name: make(c.num_embeddings, torch.device("cpu"), home.DistanceLFU_EvictionPolicy(), 2) for c in configs
    }
    return modules, home.ManagedCollisionCollection(modules, configs), configs, collected


@case("2/mc_embedding_modules")
def managed_bags(rec: Package) -> Any:
    _, collection, configs, home = managed(rec, "EmbeddingBagConfig")
    ebc = fill(rec.EmbeddingBagCollection(tables=configs))
    module = home.ManagedCollisionEmbeddingBagCollection(ebc, collection, return_remapped_features=True)
    out = []
    for _ in range(3):
        vectors, rows = module(kjt(rec))
        out.append([vectors.values(), rows.keys(), rows.values(), rows.lengths()])
    return [out, sorted(module.state_dict()), collection.open_slots(), collection.evict()]


@case("2/mc_embedding_modules")
def managed_sequences(rec: Package) -> Any:
    _, collection, configs, home = managed(rec, "EmbeddingConfig")
    ec = fill(rec.EmbeddingCollection(tables=configs))
    module = home.ManagedCollisionEmbeddingCollection(ec, collection)
    for _ in range(3):
        vectors, rows = module(kjt(rec))
    return [vectors, rows, module._embedding_collection is ec]


@case("2/mc_embedding_modules", "a feature of several tables is refused: only the last table's rows would be used")
def managed_shared(rec: Package) -> Any:
    home, configs = rec("modules.mc_modules"), tables(rec)
    policy, make = home.LFU_EvictionPolicy(), home.MCHManagedCollisionModule
    modules = {c.name: make(c.num_embeddings, torch.device("cpu"), policy, 2) for c in configs}
    return type(home.ManagedCollisionCollection(modules, configs)).__name__


@case("2/mc_embedding_modules")
def managed_wrong(rec: Package) -> Any:
    modules, collection, configs, home = managed(rec, "EmbeddingBagConfig")
    make = rec("modules.mc_modules").ManagedCollisionCollection
    first = configs[0].name
    others = rec.EmbeddingBagCollection(tables=configs[1:])
    return [
        attempt(lambda: make({first: modules[first]}, configs) and None),
        attempt(lambda: home.ManagedCollisionEmbeddingBagCollection(others, collection) and None),
        collection.table_to_number_buckets(),
    ]
