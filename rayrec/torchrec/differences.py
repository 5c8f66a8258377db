"""Differences in behaviour from TorchRec 1.8. `--check` reports a row if a program uses its name; README.md lists all
rows with the same text."""

from __future__ import annotations

WRONG = "what does not fit raises ValueError with a text, where TorchRec fails an assertion, a look-up, or later"

# (name, difference). A name is a class or function, a method (`Class.method`), or an argument (`Class(argument)`).
DIFFERENCES: tuple[tuple[str, str], ...] = (
    (
        "sparse.jagged_tensor.JaggedTensor",
        "weights that do not match the values are refused at construction",
    ),
    (
        "sparse.jagged_tensor.JaggedTensor.empty",
        "offsets of no lists are [0]: offsets always end with the number of values",
    ),
    (
        "sparse.jagged_tensor.KeyedJaggedTensor",
        "lengths that are not a multiple of the keys, or do not match the stride, are refused",
    ),
    (
        "sparse.jagged_tensor.KeyedJaggedTensor",
        "a tensor without lengths and offsets is refused; it would be read as no examples",
    ),
    (
        "sparse.jagged_tensor.KeyedJaggedTensor.from_jt_dict",
        "weighted and unweighted features are refused; what TorchRec makes of them cannot be read",
    ),
    (
        "sparse.jagged_tensor.KeyedJaggedTensor.split",
        "segments that omit keys are refused; TorchRec drops these keys",
    ),
    (
        "sparse.jagged_tensor.KeyedJaggedTensor.permute",
        "inverse indices stay with their keys; TorchRec drops them, and the batch can no longer be read",
    ),
    (
        "sparse.jagged_tensor.KeyedJaggedTensor(stride_per_key_per_rank)",
        "variable batch sizes stay on the host: 5 leaves, not 6",
    ),
    (
        "sparse.jagged_tensor.KeyedJaggedTensor",
        "an exported model gets its features by name; TorchRec passes them in the input's order",
    ),
    ("sparse.jagged_tensor.KeyedJaggedTensor", WRONG),
    ("modules.embedding_modules.EmbeddingBagCollection", WRONG),
    ("sparse.jagged_tensor.KeyedTensor", "widths that do not add up to the tensor's are refused"),
    ("sparse.jagged_tensor_validator.validate_keyed_jagged_tensor", "negative lengths are refused"),
    (
        "modules.embedding_configs.EmbeddingBagConfig",
        "init_fn stays None where none was given, so that equal configs compare equal",
    ),
    (
        "modules.embedding_modules.EmbeddingBagCollection",
        "a collection without tables is refused: it has no device and no output",
    ),
    ("modules.embedding_configs.DataType.BF16", "BF16 tables are bfloat16, not float16"),
    (
        "modules.embedding_modules.EmbeddingBagCollection(is_weighted)",
        "a weighted mean is defined: it divides by the number of ids, as fbgemm does",
    ),
    (
        "modules.embedding_modules.EmbeddingBagCollection",
        "a batch without examples gives [0, D], as needed by ranks that run out of data",
    ),
    (
        "modules.embedding_modules.EmbeddingBagCollection.device",
        "`device` is the device of the parameters, also after `.to`, and always a torch.device",
    ),
    (
        "modules.embedding_modules.EmbeddingBagCollection",
        "tables are initialized in blocks with separate seeds, so values do not depend on the plan",
    ),
    (
        "modules.mlp.MLP(activation)",
        "an unknown activation name is refused; TorchRec builds a net without layers",
    ),
    ("modules.fused_embedding_modules.FusedEmbeddingCollection", "it works on a CPU too"),
    (
        "modules.fused_embedding_modules.FusedEmbeddingBagCollection",
        "tables of one name are refused; TorchRec's state dict has only the last one",
    ),
    (
        "modules.embedding_modules.EmbeddingCollection",
        "it has no result on the meta device, where the number of ids of a feature is unknown",
    ),
    (
        "modules.feature_processor.PositionWeightedProcessor",
        "other features are kept, positions beyond the last share its weight, weights of the input multiply",
    ),
    (
        "modules.mc_embedding_modules.ManagedCollisionEmbeddingCollection",
        "a feature of several tables is refused: only the last table's rows would be used",
    ),
    (
        "modules.mc_embedding_modules.ManagedCollisionEmbeddingBagCollection",
        "a feature of several tables is refused: only the last table's rows would be used",
    ),
    (
        "models.deepfm.SimpleDeepFMNNWrapper",
        "the loss is computed from probabilities; TorchRec treats them as logits",
    ),
    (
        "optim.keyed.KeyedOptimizer.load_state_dict",
        "a stepped state loads into a fresh optimizer, which resumes exactly",
    ),
    ("optim.warmup.WarmupPolicy.INVSQRT", "INVSQRT is 1 at iteration 0, where TorchRec divides by zero"),
    (
        "optim.rowwise_adagrad.RowWiseAdagrad(weight_decay)",
        "weight decay acts on the rows that a batch touched, as in the fused update",
    ),
    (
        "optim.rowwise_adagrad.RowWiseAdagrad",
        "the default of eps is 1e-8, as in the fused update of both packages; TorchRec's class has 1e-10 as a dense "
        "optimizer",
    ),
    ("optim.optimizers.SGD", "they step as torch's do; TorchRec's only name a fused update and raise"),
    (
        "distributed.model_parallel.DistributedModelParallel",
        "a model without a collection is refused: DistributedDataParallel serves it",
    ),
    (
        "distributed.model_parallel.DistributedModelParallel.state_dict",
        "on one rank a table is a plain tensor: it is whole; on several it is a ShardedTensor, as there",
    ),
    ("distributed.types.Awaitable.wait", "the work is done once; every wait gives the same object"),
    ("distributed.types.DeviceToHostTensorAwaitable", "it works on a machine without a GPU too"),
    (
        "distributed.types.Shard",
        "types.Shard is a rectangle of a table; torch's is torch.distributed._shard.sharded_tensor.Shard",
    ),
    ("distributed.utils.sharded_model_copy", "it works in a build without NCCL too, and refuses sharded tables"),
    (
        "distributed.planner.EmbeddingShardingPlanner(constraints)",
        "a constraint for an unknown table is refused: it would have no effect",
    ),
    (
        "distributed.planner.EmbeddingShardingPlanner",
        "without parts passed by hand it searches by a bound; which plan is best is each package's own judgement",
    ),
    (
        "distributed.planner.Topology",
        "default sizes and speeds are from `gpu` (an A100 of 40 GB) or a CPU, not 32 and 128 GiB",
    ),
    (
        "distributed.train_pipeline.TrainPipelineBase(custom_model_fwd)",
        "custom_model_fwd is called; TorchRec's base pipeline ignores it",
    ),
    (
        "distributed.train_pipeline.TrainPipelineSemiSync",
        "rows that are looked up never miss the last step's update",
    ),
    (
        "distributed.train_pipeline.TrainPipelineSparseDist(context_type)",
        "a custom context type is refused: nothing is traced, so nothing would call its methods",
    ),
    ("metrics.gauc.GAUCMetric", "sessions whose length differs from the batch are refused"),
    (
        "metrics.auc.AUCMetric",
        "equal predictions count half each way; TorchRec counts them in sorted order, which is arbitrary",
    ),
    (
        "metrics.gauc.GAUCMetric",
        "equal predictions count half each way; TorchRec counts them in sorted order, which is arbitrary",
    ),
    (
        "metrics.weighted_avg.WeightedAvgMetric",
        "a window counts examples; TorchRec counts a batch as one for averages of outputs",
    ),
    (
        "metrics.scalar.ScalarMetric",
        "a window counts examples; TorchRec counts a batch as one for averages of outputs",
    ),
    (
        "distributed.fbgemm_qcomm_codec.CommType.BF16",
        "BF16 is sent as BF16 over gloo too, where TorchRec falls back to FP16",
    ),
    ("distributed.fbgemm_qcomm_codec.CommType.MX4", "MX4 is refused: it has no operator for CPUs; use FP8 or INT8"),
    (
        "datasets.criteo.InMemoryBinaryCriteoIterDataPipe",
        "validation rows of several files are refused: some would be used for validation and test",
    ),
    (
        "datasets.criteo.InMemoryBinaryCriteoIterDataPipe(stage)",
        "an unknown stage is refused; TorchRec reads all rows",
    ),
    (
        "datasets.criteo.InMemoryBinaryCriteoIterDataPipe(shuffle_batches)",
        "all ranks have the same number of batches also with shuffled rows, so no rank waits forever",
    ),
    (
        "datasets.criteo.InMemoryBinaryCriteoIterDataPipe(path_manager_key)",
        "iopath's path handlers are refused: paths are opened as files",
    ),
    ("fx.Tracer", "embedding collections are always one node: their checks of ids are not traced"),
    (
        "test_utils.assert_state_buffers_parameters_equal",
        "states with different values are not equal; TorchRec compares only names",
    ),
    (
        "distributed.model_parallel.DMPCollection",
        "no DMPCollectionConfig: all collections have one group size; FULLY_SHARDED is refused: use larger groups",
    ),
    (
        "distributed.model_parallel.DMPCollection.sync",
        "it works on CPUs too; TorchRec's `sync` needs a mean all-reduce, which gloo lacks",
    ),
)
