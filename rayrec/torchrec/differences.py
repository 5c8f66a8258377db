"""What works differently than in TorchRec 1.8. `--check` reports a row where a program uses what it names; README.md
lists every row, with the same text."""

from __future__ import annotations

WRONG = "what does not fit raises ValueError with a text, where TorchRec fails an assertion, a look-up, or later"

# What: a class or function, one of its methods (`Class.method`), or an argument of it (`Class(argument)`).
DIFFERENCES: tuple[tuple[str, str], ...] = (
    (
        "sparse.jagged_tensor.JaggedTensor",
        "weights that do not fit the values are refused where they come from",
    ),
    (
        "sparse.jagged_tensor.JaggedTensor.empty",
        "offsets of no lists are [0], as those of any number of lists end with the number of values",
    ),
    (
        "sparse.jagged_tensor.KeyedJaggedTensor",
        "lengths that the keys do not divide, and a stride that they do not fit, are refused",
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
        "segments that leave keys out are refused; TorchRec drops those keys",
    ),
    (
        "sparse.jagged_tensor.KeyedJaggedTensor.permute",
        "inverse indices stay with their keys; TorchRec drops them, and the batch can no longer be read",
    ),
    (
        "sparse.jagged_tensor.KeyedJaggedTensor(stride_per_key_per_rank)",
        "batch sizes that vary are facts of the host and stay there: 5 leaves, not 6",
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
        "a batch without examples gives [0, D]; ranks that run out of data bring such batches",
    ),
    (
        "modules.embedding_modules.EmbeddingBagCollection.device",
        "the device is that of the parameters, also after `.to`, and always a torch.device",
    ),
    (
        "modules.embedding_modules.EmbeddingBagCollection",
        "a table is filled in blocks from seeds of their own, so that it is alike under every plan",
    ),
    (
        "modules.mlp.MLP(activation)",
        "an activation of an unknown name is refused; TorchRec makes a net without layers of it",
    ),
    ("modules.fused_embedding_modules.FusedEmbeddingCollection", "it works on a CPU too"),
    (
        "modules.feature_processor.PositionWeightedProcessor",
        "features that are not named stay, positions beyond the last share its weight, weights of the input multiply",
    ),
    (
        "modules.mc_embedding_modules.ManagedCollisionEmbeddingCollection",
        "a feature of several tables is refused: its rows would be those of the last one",
    ),
    (
        "modules.mc_embedding_modules.ManagedCollisionEmbeddingBagCollection",
        "a feature of several tables is refused: its rows would be those of the last one",
    ),
    (
        "models.deepfm.SimpleDeepFMNNWrapper",
        "the loss is that of the probabilities; TorchRec takes them for logits",
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
        "eps is 1e-8 unless it is given, as that of the fused update in both packages; TorchRec's class has 1e-10 "
        "where it steps as a dense optimizer",
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
        "a constraint for a table that there is not is refused: it would be without effect",
    ),
    (
        "distributed.planner.EmbeddingShardingPlanner",
        "without parts passed by hand it searches by a bound; which plan is best is each package's own judgement",
    ),
    (
        "distributed.planner.Topology",
        "sizes and speeds that are not given are those of `gpu` (an A100 of 40 GB) or of a CPU, not 32 and 128 GiB",
    ),
    (
        "distributed.train_pipeline.TrainPipelineBase(custom_model_fwd)",
        "custom_model_fwd is called; TorchRec's base pipeline leaves it out",
    ),
    (
        "distributed.train_pipeline.TrainPipelineSemiSync",
        "rows that are looked up never miss the last step's update",
    ),
    (
        "distributed.train_pipeline.TrainPipelineSparseDist(context_type)",
        "a context of a type of your own is refused: nothing is traced, so nothing would call its methods",
    ),
    ("metrics.gauc.GAUCMetric", "sessions that are not as long as the batch are refused"),
    (
        "metrics.auc.AUCMetric",
        "equal predictions count half each way; TorchRec counts them in the order that the sort leaves them in",
    ),
    (
        "metrics.gauc.GAUCMetric",
        "equal predictions count half each way; TorchRec counts them in the order that the sort leaves them in",
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
        "validation rows of several files are refused: some would be both validated and tested on",
    ),
    (
        "datasets.criteo.InMemoryBinaryCriteoIterDataPipe(stage)",
        "a stage that there is not is refused; TorchRec reads all rows",
    ),
    (
        "datasets.criteo.InMemoryBinaryCriteoIterDataPipe(shuffle_batches)",
        "all ranks have equally many batches when rows are shuffled too, so that none waits for another for ever",
    ),
    (
        "datasets.criteo.InMemoryBinaryCriteoIterDataPipe(path_manager_key)",
        "iopath's handlers of paths are refused: paths are opened as files",
    ),
    ("fx.Tracer", "embedding collections are always one node: their checks of ids are not traced"),
    (
        "test_utils.assert_state_buffers_parameters_equal",
        "states of which the values differ are not equal; TorchRec compares names alone",
    ),
    (
        "distributed.model_parallel.DMPCollection",
        "no DMPCollectionConfig: all collections have one group size; FULLY_SHARDED is refused: take larger groups",
    ),
    (
        "distributed.model_parallel.DMPCollection.sync",
        "gloo's all-reduce has no mean, so that TorchRec's `sync` needs GPUs",
    ),
)
