"""SGLang's arguments that are known not to change KV. All others count, also those that a later version adds.

How fast, when and where something is computed is not part of this, nor what becomes of the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

ARGUMENTS = frozenset(
    name
    for names in (
        # The weights count by what they are; the size of a page is in the namespace.
        """
        model_path speculative_draft_model_path random_seed page_size download_dir model_checksum
        delete_ckpt_after_loading modelopt_checkpoint_save_path modelopt_export_path weight_loader_disable_mmap
        weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
        remote_instance_weight_loader_backend remote_instance_weight_loader_send_weights_group_ports
        remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
        checkpoint_engine_wait_weights_before_ready weight_cache_mode weight_cache_socket weight_cache_timeout
        """,
        # The device: that of a GPU is in the namespace.
        """
        base_gpu_id gpu_id_step mlx_enable_sampling watchdog_timeout soft_watchdog_timeout sleep_on_idle use_ray
        custom_sigquit_handler numa_node gc_threshold
        """,
        # Disaggregation.
        """
        decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role
        disaggregation_mode disaggregation_decode_allocation_policy disaggregation_transfer_backend
        disaggregation_enable_kv_checksum disaggregation_bootstrap_port disaggregation_ib_device
        disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
        disaggregation_decode_retraction_backup num_reserved_decode_tokens disaggregation_decode_extra_slots
        disaggregation_decode_polling_interval disaggregation_decode_host_receive_threshold enable_pd_role_switch
        optimistic_prefill_attempts encoder_transfer_backend encoder_urls encoder_bootstrap_port
        encoder_register_urls enable_adaptive_dispatch_to_encoder enable_pdmux pdmux_config_path sm_group_num
        """,
        # Logits, and what is reported about a request.
        """
        enable_fp32_lm_head enable_custom_logit_processor enable_watermark watermark_config watermark_key
        watermark_key_b watermark_context_window watermark_mixing_probability watermark_max_probability
        watermark_default_enabled watermark_enforce_all enable_return_hidden_states return_hidden_states_mode
        enable_return_aux_hidden_states aux_hidden_state_capture return_aux_hidden_state_layer_ids
        enable_return_routed_experts enable_return_indexer_topk sampling_mask_max_tokens disable_outlines_disk_cache
        sampling_backend grammar_backend
        """,
        # Graphs, communication, and the places of experts and weights.
        """
        cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode
        cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill
        cuda_graph_prefill_max_context disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph
        disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph
        enable_torch_compile_debug_mode torch_compile_max_bs enable_layerwise_nvtx_marker disable_flashinfer_autotune
        flashinfer_autotune_skip_ops enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup
        enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem pre_warm_nccl
        init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations
        eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold
        expert_distribution_recorder_mode expert_distribution_recorder_buffer_size expert_balancedness_report_mode
        elastic_ep_backend enable_elastic_expert_backup mooncake_ib_device ep_join_mode elastic_ep_scale_timeout
        kt_cpuinfer kt_threadpool_count enable_two_batch_overlap enable_single_batch_overlap
        tbo_token_distribution_threshold cpu_offload_gb offload_group_size offload_num_in_group
        offload_prefetch_step offload_mode ple_offload_embedding ple_offload_backend ple_offload_dir
        """,
        # Adapters count by what they are.
        """
        enable_lora enable_lora_overlap_loading max_lora_rank lora_paths lora_target_modules max_loaded_loras
        max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size lora_strict_loading
        lora_drain_wait_threshold
        """,
        # Where KV is kept.
        """
        radix_eviction_policy _radix_eviction_policy_explicitly_set radix_eviction_policy_config disable_radix_cache
        enable_session_radix_cache radix_cache_backend enable_hierarchical_cache hicache_host_memory_mode
        hicache_ratio hicache_size hicache_host_memory_fraction hicache_write_policy hicache_io_backend
        hicache_mem_layout hicache_storage_backend hicache_storage_prefetch_policy
        hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval
        hicache_storage_prefetch_retry_max_attempts enable_unified_cache_external_linker
        unified_cache_external_linker_backend unified_cache_external_linker_config enable_linker_mla_dedup
        enable_lmcache lmcache_config_file enable_flexkv flexkv_config_file
        """,
        # Images: how they come, not what is made of them.
        """
        enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_processor_worker_num mm_io_worker_num
        allowed_media_domains media_url_max_file_size_mb mm_preprocess_cache_size_mb limit_mm_data_per_request
        enable_mm_global_cache mm_global_cache_backend mm_feature_transport
        """,
        # Logs, metrics and traces.
        """
        log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
        uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics smg_http_sidecar_port
        enable_mfu_metrics enable_metrics_for_all_schedulers load_snapshot_publish_interval
        tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels
        bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
        generation_tokens_buckets gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging
        kv_events_config load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id
        forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint otlp_service_name
        export_metrics_to_file export_metrics_to_file_dir stat_loggers debug_tensor_dump_output_folder
        debug_tensor_dump_layers msprobe_dump_config kv_canary_sweep_interval
        """,
        # Ranks: how many split a page is in the namespace.
        """
        nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank pp_max_micro_batch_size
        pp_async_batch_depth dp_size load_balance_method enable_dp_attention_local_control_broadcast enable_dp_lm_head
        enable_tp_lm_head_all_to_all enable_p2p_check ep_join_rank_offset elastic_ep_initial_size max_ep_size
        """,
        # The scheduler.
        """
        mem_fraction_static max_running_requests max_queued_requests max_total_tokens chunked_prefill_size
        prefill_decode_interval prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens
        prefill_max_requests schedule_policy enable_priority_scheduling disable_priority_preemption
        default_priority_value abort_on_priority_when_disabled schedule_low_priority_values_first
        priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness swa_full_tokens_ratio
        _swa_full_tokens_ratio_explicitly_set disable_overlap_schedule num_continuous_decode_steps
        scheduler_recv_interval enable_mixed_chunk max_mamba_cache_size mamba_full_memory_ratio
        mamba_max_states_per_path enable_prefill_delayer prefill_delayer_max_delay_passes
        prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms
        min_free_slots_delay
        """,
        # The server, and what turns text into tokens and back.
        """
        enable_response_store tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num
        detokenizer_worker_num skip_tokenizer_init host port fastapi_root_path enable_http_worker_reuseport
        smg_grpc_mode grpc_mode grpc_port grpc_response_timeout_secs grpc_worker_threads sidecar sidecar_args
        skip_server_warmup warmups enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size
        ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key
        served_model_name weight_version chat_template trust_request_chat_template hf_chat_template_name
        completion_template file_storage_path enable_cache_report return_input_ids return_output_ids reasoning_parser
        default_chat_template_kwargs strip_thinking_cache enable_strict_thinking tool_call_parser tool_server
        sampling_defaults asr_max_buffer_seconds asr_max_concurrent_sessions preferred_sampling_params
        allow_auto_truncate stream_interval batch_notify_size stream_response_default_include_usage
        incremental_streaming_output enable_streaming_session constrained_json_whitespace_pattern
        constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt enable_dynamic_batch_tokenizer
        dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode
        disable_tokenizer_batch_decode
        """,
        # Drafts: which of their tokens are taken, and those that are found without a model.
        """
        speculative_accept_threshold_single speculative_accept_threshold_acc speculative_use_rejection_sampling
        speculative_use_block_verification _speculative_draft_quantization_explicitly_set spec_trace_dir
        speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
        speculative_dspark_align_verify_tokens_to_graph_tier speculative_ngram_min_bfs_breadth
        speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_max_trie_depth
        speculative_ngram_capacity speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
        speculative_ngram_external_corpus_max_tokens
        """,
    )
    for name in names.split()
)

KEPT_BESIDE_KV: Mapping[str, object] = {
    "enable_return_routed_experts": False,
    "enable_return_indexer_topk": False,
    "kv_canary": "none",
}
"""Arguments with which SGLang keeps data of each token besides its KV, by slot, and the value that turns each off. They
do not change KV, but the daemon does not have that data."""

VARIABLES = """
    SGLANG_*TIMEOUT* SGLANG_LOG_* SGLANG_*_PORT SGLANG_PORT SGLANG_*_PORT_BASE SGLANG_*_DIR SGLANG_*_IP SGLANG_*_IPC
    SGLANG_*_SOCKET* SGLANG_TRACE_* SGLANG_OTLP_* SGLANG_PROFILE_* SGLANG_TORCH_PROFILER_* SGLANG_*_METRICS
    SGLANG_METRICS_* SGLANG_GRAMMAR_* SGLANG_HEALTH_* SGLANG_ENABLE_HEALTH_* SGLANG_DISAGGREGATION_*
    SGLANG_MOONCAKE_* SGLANG_GRPC_* SGLANG_RUN_ID SGLANG_DP_RANK SGLANG_IS_IN_CI* SGLANG_CRASH_* SGLANG_CUDA_COREDUMP*
    SGLANG_PYSPY_* SGLANG_JIT_* SGLANG_ZMQ_* SGLANG_WEIGHT_CACHE_* SGLANG_SET_CPU_AFFINITY SGLANG_*NUMA*
    SGLANG_KILLPG_* SGLANG_FORCE_SHUTDOWN SGLANG_FORCE_STREAM_INTERVAL SGLANG_SCHEDULER_* SGLANG_PREFILL_DELAYER_*
    SGLANG_INIT_NEW_TOKEN_RATIO SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS
    SGLANG_RETRACT_DECODE_STEPS SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION SGLANG_MAX_NEW_TOKENS_LIMIT
    SGLANG_EMPTY_CACHE_INTERVAL SGLANG_HUGEPAGE_SIZE SGLANG_VLM_CACHE_SIZE_MB SGLANG_MM_FEATURE_CACHE_MB
    SGLANG_MM_BUFFER_SIZE_MB SGLANG_FLASHINFER_WORKSPACE_SIZE SGLANG_SYMM_MEM_PREALLOC_GB_SIZE
    SGLANG_DISABLE_OUTLINES_DISK_CACHE SGLANG_USE_CUDA_IPC_TRANSPORT
    SGLANG_RADIX_FORCE_MISS SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND SGLANG_ENABLE_GRAPH_POOL_*
"""
"""Patterns of environment variables."""


def variable(name: str) -> bool:
    """Whether an environment variable is known not to change KV."""
    return any(fnmatchcase(name, each) for each in VARIABLES.split())
