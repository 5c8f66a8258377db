"""Names missing from modules that rayrec has, with replacements; see `left_out.py`."""

from __future__ import annotations

from rayrec.torchrec.left_out import COLLISIONS, ENGINE, ESTIMATE, INFERENCE, STORE, TRACING

SUMS = "derive from the module's …Computation class: its states are sums, and `_compute` returns the metrics"
ORDER = "the metric keeps the window's examples; derive from rec_metric.RecMetricComputation"
PLAN = "the planner checks its plans, and DistributedModelParallel checks a given plan"
VIRTUAL = "a dynamic table maps ids to rows"

# Functions in the modules of metrics, by module.
_METRIC_FUNCTIONS = {
    "accuracy": "compute_accuracy compute_accuracy_sum get_accuracy_states",
    "average": "compute_average get_average_states",
    "cali_free_ne": "compute_cali_free_ne compute_cross_entropy get_cali_free_ne_states",
    "calibration": "compute_calibration get_calibration_states",
    "ctr": "compute_ctr get_ctr_states",
    "gauc": "compute_gauc_3d compute_window_auc get_auc_states to_3d",
    "mae": "compute_error_sum compute_mae get_mae_states",
    "mse": "compute_error_sum compute_mse compute_r_squared compute_rmse get_mse_states",
    "multiclass_recall": "compute_multiclass_recall_at_k compute_true_positives_at_k get_multiclass_recall_states",
    "ne": "compute_cross_entropy compute_logloss compute_ne get_ne_states",
    "ne_positive": "compute_cross_entropy_positive compute_ne_positive get_ne_positive_states",
    "nmse": "compute_norm get_norm_mse_states",
    "num_missing_labels": "compute_missing_label_sum get_num_missing_labels_states",
    "num_positive_samples": "compute_weighted_pos_sum get_num_positive_sample_states",
    "precision": "compute_false_pos_sum compute_precision compute_true_pos_sum get_precision_states",
    "recall": "compute_false_neg_sum compute_recall compute_true_pos_sum get_recall_states",
    "recall_session": "ranking_within_session",
    "segmented_ne": (
        "GroupingKeyConfig compute_cross_entropy compute_logloss compute_ne compute_ne_fused "
        "compute_ne_helper get_segemented_ne_states get_segemented_ne_states_fused"
    ),
    "sum_weights": "compute_weighted_sum get_weighted_sum_states",
    "tensor_weighted_avg": "get_mean",
    "unweighted_ne": "compute_cross_entropy compute_ne get_unweighted_ne_states",
    "weighted_avg": "get_mean",
    "weighted_sum_predictions": "compute_weighted_predictions_sum get_weighted_sum_prediction_states",
    "xauc": "compute_error_sum compute_weighted_num_pairs compute_xauc get_xauc_states",
}

# Module, names separated by spaces, and what to use instead of them.
NAMES: tuple[tuple[str, str, str], ...] = (
    (
        "distributed.collective_utils",
        "create_on_rank_and_share_result init_collective_validation validate_collectives_enabled",
        "collective_utils.invoke_on_rank_and_broadcast_result; a rank that differs raises on every rank",
    ),
    (
        "distributed.comm",
        "get_topology_domain_multiple get_topology_group_world_size intra_and_cross_node_pg_2D",
        "comm.intra_and_cross_node_pg; DMPCollection makes the groups of replicas",
    ),
    (
        "distributed.embedding",
        "EmbeddingCollectionContext create_sharding_infos_by_sharding_device_group get_device_from_parameter_sharding "
        "pad_vbe_kjt_lengths",
        ENGINE,
    ),
    (
        "distributed.embedding",
        "get_ec_index_dedup set_ec_index_dedup",
        "EmbeddingCollectionSharder(use_index_dedup=True)",
    ),
    (
        "distributed.embedding_types",
        "BaseEmbeddingLookup BaseEmbeddingUpdate DTensorMetadata EmbeddingAttributes FeatureShardingMixIn "
        "InputDistOutputs ListOfKJTList ModuleShardingMixIn ShardedConfig ShardedMetaConfig "
        "compute_kernel_to_embedding_location",
        ENGINE,
    ),
    ("distributed.embedding_types", "BaseGroupedFeatureProcessor", "modules.feature_processor has it"),
    ("distributed.embedding_types", "BaseQuantEmbeddingSharder", INFERENCE),
    (
        "distributed.embeddingbag",
        "EmbeddingAwaitable EmbeddingBagCollectionContext VariableBatchEmbeddingBagCollectionAwaitable "
        "construct_output_kt create_sharding_infos_by_sharding_device_group get_device_from_parameter_sharding "
        "replace_placement_with_meta_device",
        ENGINE,
    ),
    (
        "distributed.embeddingbag",
        "EmbeddingBagSharder ShardedEmbeddingBag",
        "an EmbeddingBagCollection of one table, which DistributedModelParallel shards",
    ),
    (
        "distributed.fbgemm_qcomm_codec",
        "comm_type_to_sparse_type get_qcomm_codecs",
        "fbgemm_qcomm_codec.get_qcomm_codecs_registry",
    ),
    (
        "distributed.fused_embedding",
        "ShardedFusedEmbeddingCollection",
        "DistributedModelParallel shards a FusedEmbeddingCollection as an EmbeddingCollection",
    ),
    (
        "distributed.fused_embeddingbag",
        "ShardedFusedEmbeddingBagCollection",
        "DistributedModelParallel shards a FusedEmbeddingBagCollection as an EmbeddingBagCollection",
    ),
    ("distributed.model_parallel", "HybridEvalDMP", "DistributedModelParallel in eval mode"),
    ("distributed.planner.constants", "kernel_bw_lookup", "planner.Topology has the bandwidths"),
    ("distributed.planner.enumerators", "get_partition_by_type", ESTIMATE),
    (
        "distributed.planner.partitioners",
        "OrderedDeviceHardware ShardingOptionGroup",
        "derive from planner.types.Partitioner",
    ),
    (
        "distributed.planner.planners",
        "extract_plan validate_compute_kernels validate_modules_inclusion_in_sharding_plan validate_rank_assignment",
        PLAN,
    ),
    (
        "distributed.planner.proposers",
        "EmbeddingOffloadScaleupProposer",
        "EmbeddingShardingPlanner without parts gives device memory that is left to caches",
    ),
    (
        "distributed.planner.shard_estimators",
        "EmbeddingOffloadStats calculate_pipeline_io_cost calculate_shard_storages get_num_poolings",
        ESTIMATE,
    ),
    ("distributed.planner.stats", "round_to_one_sigfig", "derive from planner.types.Stats"),
    (
        "distributed.planner.storage_reservations",
        "StorageReservationType",
        "pass a storage reservation to the planner",
    ),
    (
        "distributed.planner.types",
        "BasicCommsBandwidths GeneralizedCommsBandwidth TopologyConfigBase",
        "planner.Topology takes the bandwidths",
    ),
    (
        "distributed.planner.types",
        "CollectiveType CriticalPathEstimate PlanDebugStats round_to_nearest",
        ESTIMATE,
    ),
    (
        "distributed.planner.types",
        "SharderData",
        "read the sharders' fused_params and codec; an estimator's sharder_data_map is None",
    ),
    (
        "distributed.planner.types",
        "hash_planner_context_inputs hash_planner_context_inputs_str hash_sha256_str hash_sha256_to_int",
        "EmbeddingShardingPlanner.hash_planner_context_inputs",
    ),
    (
        "distributed.planner.utils",
        "build_sharder_data build_sharder_data_map",
        "read the sharders' fused_params and codec; an estimator's sharder_data_map is None",
    ),
    (
        "distributed.planner.utils",
        "BinarySearchPredicate LuusJaakolaSearch extract_comm_data_type_size get_num_poolings is_prefetch_pipelined "
        "placement prod storage_repr_in_gb",
        ESTIMATE,
    ),
    (
        "distributed.sharding_plan",
        "get_sharding_constructor_from_type placement_helper",
        "sharding_plan's table_wise, row_wise, column_wise and so on",
    ),
    ("distributed.train_pipeline", "ArgInfo ArgInfoStepFactory CallArgs Tracer", TRACING),
    (
        "distributed.train_pipeline.pipeline_context",
        "CPUEmbeddingTrainPipelineContext EmbeddingTrainPipelineContext PrefetchTrainPipelineContext",
        TRACING,
    ),
    ("distributed.train_pipeline.train_pipelines", "ModelDetachedException", TRACING),
    (
        "distributed.train_pipeline.utils",
        "FutureDeque get_h2d_func prefetch_embeddings use_context_for_postprocs",
        TRACING,
    ),
    (
        "distributed.types",
        "DMPCollectionConfig DMPCollectionContext",
        "all collections have one group size: give it to DMPCollection",
    ),
    (
        "distributed.types",
        "NoOpQuantizedCommCodec QuantizedCommCodec QuantizedCommCodecs",
        "fbgemm_qcomm_codec.get_qcomm_codecs_registry has the number formats on the wire",
    ),
    ("distributed.types", "ObjectPoolShardingPlan ObjectPoolShardingType", STORE),
    (
        "distributed.types",
        "ComputeDevice GenericMeta ModuleShardingPlan ShardingBucketMetadata compute_storage_usage "
        "get_tensor_size_bytes rank_device scope",
        ENGINE,
    ),
    (
        "distributed.utils",
        "EmbeddingQuantizationUtils ForkedPdb add_params_from_parameter_sharding assert_instance "
        "convert_to_fbgemm_types create_global_tensor_shape_stride_from_metadata emb_opt_type_to_optimizer_class "
        "get_bucket_metadata_from_shard_metadata get_class_name maybe_annotate_embedding_event "
        "modify_input_for_feature_processor weights_bytes_in_emb_kernel",
        ENGINE,
    ),
    (
        "inference.modules",
        "BatchingMetadata PredictFactory PredictModule QualNameMetadata assign_weights_to_tbe "
        "get_table_to_weights_from_tbe quantize_dense quantize_feature set_pruning_data "
        "trim_torch_package_prefix_from_typename",
        "`rayrec export` and `rayrec serve`; quantize_embeddings and quantize_inference_model are here",
    ),
    ("metrics.auc", "AUCMetricComputation compute_auc compute_auc_per_group", ORDER),
    ("metrics.auprc", "AUPRCMetricComputation compute_auprc compute_auprc_per_group", ORDER),
    ("metrics.metrics_config", "RecMetricEnumBase", "RecMetricModule takes a RecMetricList with metrics of your own"),
    ("metrics.metrics_namespace", "task_wildcard_metrics_pattern", "metrics_namespace.compose_metric_key"),
    ("metrics.rauc", "RAUCMetricComputation compute_rauc compute_rauc_per_group conquer_and_count", ORDER),
    ("metrics.rauc", "count_reverse_pairs_divide_and_conquer divide", ORDER),
    ("metrics.tower_qps", "TowerQPSMetricComputation", "throughput.ThroughputMetric"),
    *((f"metrics.{module}", names, SUMS) for module, names in _METRIC_FUNCTIONS.items()),
    ("modules.embedding_configs", "FeatureScoreMapping", VIRTUAL),
    (
        "modules.feature_processor",
        "offsets_to_range_traceble position_weighted_module_update_features",
        "modules.feature_processor.PositionWeightedModule",
    ),
    (
        "modules.feature_processor_",
        "get_stride_per_key_per_rank get_weights_list",
        "feature_processor_.PositionWeightedModuleCollection",
    ),
    (
        "modules.fp_embedding_modules",
        "FeatureProcessorDictWrapper apply_feature_processors_to_kjt",
        "fp_embedding_modules.FeatureProcessedEmbeddingBagCollection",
    ),
    (
        "modules.fused_embedding_modules",
        "EmbeddingFusedOptimizer convert_optimizer_type_and_kwargs",
        "FusedEmbeddingBagCollection.fused_optimizer, and rayrec.optim's classes",
    ),
    (
        "modules.mc_embedding_modules",
        "evict return_custom_metadata return_remapped_lengths_as_mask",
        COLLISIONS,
    ),
    ("modules.regroup", "PermuteMultiEmbedding module_init", "regroup.KTRegroupAsDict"),
    (
        "modules.utils",
        "SequenceVBEContext construct_jagged_tensors_inference deterministic_dedup jagged_index_select_with_empty "
        "make_hash_zch_buckets_non_persistent reset_module_states_post_sharding",
        ENGINE,
    ),
    ("optim.rowwise_adagrad", "adagrad", "rowwise_adagrad.RowWiseAdagrad"),
    (
        "quant.embedding_modules",
        "FeatureProcessedEmbeddingBagCollection QuantManagedCollisionEmbeddingBagCollection "
        "QuantManagedCollisionEmbeddingCollection",
        "inference.modules.quantize_inference_model quantizes the collection inside",
    ),
    (
        "quant.embedding_modules",
        "for_each_module_of_type_do quant_prep_customize_row_alignment quant_prep_enable_cache_features_order "
        "quant_prep_enable_quant_state_dict_split_scale_bias "
        "quant_prep_enable_quant_state_dict_split_scale_bias_for_types quant_prep_enable_register_tbes "
        "quantize_state_dict",
        "from_float; the state is one array of all tables' bytes",
    ),
    ("sparse.jagged_tensor", "JaggedTensorMeta", "torch.fx traces a KeyedJaggedTensor's methods as calls"),
)
