"""What TorchRec has and rayrec does not, with what to use instead: a row for each module, and for names in modules that
there are. `COMPATIBILITY.md` prints it; importing one of them raises `NotOffered` with the text."""

from __future__ import annotations

_EXCHANGES = "write the model's own exchanges with torch.distributed.nn; the collections have theirs inside"
_COLLISIONS = (
    "rayrec.torchrec.modules.mc_modules has managed collisions; DistributedModelParallel shards the tables behind them"
)
_INFERENCE = "`rayrec export` and rayrec.inference.Model; rayrec.torchrec.inference.modules quantizes in the process"
_STORE = "fused_uvm_caching keeps hot rows on the device; there is no other store of rows"
_ENGINE = "the collections look up, exchange and update inside; DistributedModelParallel makes them"
_ESTIMATE = (
    "EmbeddingEnumerator sets the costs of shards; for costs of your own, derive from planner.types.ShardEstimator"
)
_LOGS = "rayrec logs with Python's logging, under the names of its modules"
_TRACING = "no forward is replaced and nothing is traced: TrainPipelineSparseDist sends ids by the batch's features"
_TESTS = "torchrec.distributed.test_utils.multi_process runs ranks; models and inputs of tests are the program's own"

# Module, and what to use instead. A row stands for the modules below it too.
MODULES: dict[str, str] = {
    "datasets.scripts": "data/criteo/prepare.py prepares the files",
    "datasets.test_utils": _TESTS,
    "distributed.batched_embedding_kernel": _ENGINE,
    "distributed.comm_ops": _EXCHANGES,
    "distributed.composable": _ENGINE,
    "distributed.dist_data": _EXCHANGES,
    "distributed.embedding_dim_bucketer": _ENGINE,
    "distributed.embedding_kernel": _ENGINE,
    "distributed.embedding_lookup": _ENGINE,
    "distributed.embedding_sharding": _ENGINE,
    "distributed.embedding_tower_sharding": "DistributedModelParallel finds the collections inside a tower",
    "distributed.feature_score_utils": _COLLISIONS,
    "distributed.fp_embeddingbag": "DistributedModelParallel shards the collection inside; no sharder of its own is needed",
    "distributed.fused_params": "pass the optimizer's settings to the sharder as fused_params; others have no effect here",
    "distributed.grouped_position_weighted": "rayrec.torchrec.modules.feature_processor_.PositionWeightedModuleCollection",
    "distributed.infer_utils": _INFERENCE,
    "distributed.itep_embeddingbag": _COLLISIONS,
    "distributed.keyed_jagged_tensor_pool": _STORE,
    "distributed.logger": _LOGS,
    "distributed.logging_handlers": _LOGS,
    "distributed.logging_utils": _LOGS,
    "distributed.mc_embedding": _COLLISIONS,
    "distributed.mc_embedding_modules": _COLLISIONS,
    "distributed.mc_embeddingbag": _COLLISIONS,
    "distributed.mc_modules": _COLLISIONS,
    "distributed.memory_stashing": "the planner counts the memory of a step; give tables to fused_uvm_caching",
    "distributed.model_tracker": "rayrec.train publishes deltas of the rows that changed; a checkpoint holds every row",
    "distributed.object_pool": _STORE,
    "distributed.pec_collision_handlers": _COLLISIONS,
    "distributed.pec_comm_ops": _COLLISIONS,
    "distributed.pec_embedding": _COLLISIONS,
    "distributed.planner.estimator": _ESTIMATE,
    "distributed.quant_embedding": _INFERENCE,
    "distributed.quant_embedding_kernel": _INFERENCE,
    "distributed.quant_embeddingbag": _INFERENCE,
    "distributed.quant_state": _INFERENCE,
    "distributed.sharded_relay_utils": "DMPCollection averages replicas by an all-reduce, or by set_all_reduce_hook",
    "distributed.sharding": _ENGINE,
    "distributed.shards_wrapper": "a state_dict holds ShardedTensors, of each table its local shards",
    "distributed.tensor_pool": _STORE,
    "distributed.tensor_sharding": _STORE,
    "distributed.test_utils.emb_sharder": _TESTS,
    "distributed.test_utils.infer_utils": _TESTS,
    "distributed.test_utils.input_config": _TESTS,
    "distributed.test_utils.metric_config": _TESTS,
    "distributed.test_utils.model_config": _TESTS,
    "distributed.test_utils.model_input": _TESTS,
    "distributed.test_utils.pipeline_config": _TESTS,
    "distributed.test_utils.process_runner": _TESTS,
    "distributed.test_utils.sharding_config": _TESTS,
    "distributed.test_utils.table_config": _TESTS,
    "distributed.test_utils.test_model": _TESTS,
    "distributed.test_utils.test_model_parallel": _TESTS,
    "distributed.test_utils.test_model_parallel_base": _TESTS,
    "distributed.test_utils.test_modules": _TESTS,
    "distributed.test_utils.test_sharding": _TESTS,
    "distributed.train_pipeline.backward_injection": "torch's hooks on tensors and modules",
    "distributed.train_pipeline.experimental_pipelines": "TrainPipelineSparseDist",
    "distributed.train_pipeline.postproc": _TRACING,
    "distributed.train_pipeline.runtime_forwards": _TRACING,
    "distributed.train_pipeline.tracing": _TRACING,
    "distributed.train_pipeline.types": _TRACING,
    "inference.client": _INFERENCE,
    "inference.dlrm_packager": _INFERENCE,
    "inference.dlrm_predict": _INFERENCE,
    "inference.inference_legacy": _INFERENCE,
    "inference.model_packager": _INFERENCE,
    "inference.state_dict_transform": _INFERENCE,
    "metrics.cpu_comms_metric_module": "metric_module.RecMetricModule: one all-reduce adds all of its sums up",
    "metrics.cpu_offloaded_metric_module": "metric_module.RecMetricModule: one all-reduce adds all of its sums up",
    "metrics.deferrable_metrics": "metric_module.RecMetricModule: one all-reduce adds all of its sums up",
    "metrics.hindsight_target_pr": "RecMetricEnum.PRECISION and RECALL with a threshold",
    "metrics.metric_job_types": "metric_module.RecMetricModule computes where it is called",
    "metrics.metric_state_snapshot": "copy.deepcopy of a metric's state_dict",
    "metrics.multi_label_precision": "a task for each label, with RecMetricEnum.PRECISION",
    "metrics.noop_metric_module": "metrics_config.EmptyMetricsConfig",
    "metrics.output": "RecMetricEnum.SCALAR of a task whose label is that output",
    "metrics.test_utils": _TESTS,
    "models.cuda_graph_utils": "models.dlrm.DLRM, on one process",
    "models.experimental": "a model of your own: TransformerEncoder over the vectors of models.dlrm.SparseArch",
    "modules.debug_embedding_modules": "the collections name the feature, table and id of a bad batch",
    "modules.embedding_tower": "a tower is a module of your own that holds a collection; DistributedModelParallel finds it",
    "modules.hash_mc_evictions": _COLLISIONS,
    "modules.hash_mc_metrics": _COLLISIONS,
    "modules.hash_mc_modules": _COLLISIONS,
    "modules.itep_embedding_modules": _COLLISIONS,
    "modules.itep_modules": _COLLISIONS,
    "modules.keyed_jagged_tensor_pool": _STORE,
    "modules.mc_adapter": _COLLISIONS,
    "modules.object_pool": _STORE,
    "modules.object_pool_lookups": _STORE,
    "modules.pec_embedding_modules": _COLLISIONS,
    "modules.pruning_logger": _LOGS,
    "modules.tensor_pool": _STORE,
    "optim.test_utils": _TESTS,
    "pt2": "compile the dense part with torch.compile; `rayrec export` exports a whole model",
    "quant.utils": _INFERENCE,
    "schema": "the names that TorchRec has are in COMPATIBILITY.md",
    "sparse.test_utils": "sparse.jagged_tensor.kjt_is_equal",
    "tensor_types": "rayrec.quant keeps tables in fp16, int8 and int4",
    "utils": _LOGS,
}

# Module, names (separated by spaces), and what to use instead of them.
NAMES: tuple[tuple[str, str, str], ...] = ()
