"""vLLM's options that are known not to change KV. All others count, also those that a later version adds.

How fast, when and where something is computed is not part of this, nor what becomes of the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

OPTIONS: Mapping[str, frozenset[str]] = {
    part: frozenset(names.split())
    for part, names in {
        "vllm_config": """
            aux_output_config ec_manager_config ec_transfer_config instance_id kv_events_config kv_transfer_config
            logging_config observability_config offload_config performance_mode profiler_config reasoning_config
            shutdown_timeout structured_outputs_config watchdog_config watermark_config weight_transfer_config
            quant_config
        """,
        # The weights count by what they are. What vLLM derives from them and from other options is left out.
        "model_config": """
            model seed hf_text_config is_submodel_config word_embeddings_untied_by_checkpoint spec_target_max_model_len
            tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init allow_deprecated_quantization
            allowed_local_media_path allowed_media_domains enable_prompt_embeds enforce_eager enable_trace_replay
            generation_config override_generation_config hf_token io_processor_plugin logits_processors logprobs_mode
            max_logprobs pooler_config renderer_num_workers return_sampling_mask served_model_name use_fp64_gumbel
            enable_cumem_allocator enable_nccl_comm_suspend enable_sleep_mode sleep_mode_backend
            sleep_mode_offload_cudagraph sleep_preserve_parameter_names
        """,
        "multimodal_config": """
            limit_per_prompt enable_mm_embeds interleave_mm_strings mm_encoder_fp8_scale_save_margin
            mm_encoder_fp8_scale_save_path mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type
            mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling
        """,
        # Sizes of blocks and the hash algorithm are in the namespace already.
        "cache_config": """
            block_size user_specified_block_size _block_size_resolved effective_attention_block_size hash_block_size
            cache_hit_alignment_tokens prefix_match_unit enable_prefix_caching prefix_cache_retention_interval
            prefix_caching_hash_algo enable_mamba_shared_prefix_checkpoint is_attention_free gpu_memory_utilization
            kv_cache_memory_bytes num_gpu_blocks num_gpu_blocks_override num_cpu_blocks kv_cache_size_tokens
            kv_cache_max_concurrency kv_offloading_size kv_offloading_backend simple_cpu_offload_num_blocks
        """,
        "parallel_config": """
            data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local data_parallel_index
            data_parallel_master_ip data_parallel_master_port data_parallel_rpc_port _data_parallel_master_port_list
            data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb dp_sync_interval
            disable_nccl_for_dp_synchronization _coord_store_port _api_process_count _api_process_rank
            _allow_auto_resolve_cp_interleave_size master_addr master_port node_rank nnodes rank world_size
            assigned_physical_gpu_ids numa_bind numa_bind_nodes numa_bind_cpus placement_group ray_runtime_env
            ray_workers_use_nsight distributed_executor_backend distributed_timeout_seconds
            cpu_distributed_timeout_seconds max_parallel_loading_workers disable_custom_all_reduce
            enable_shm_tensor_arena enable_batch_sharded_sampling enable_ep_weight_filter enable_eplb eplb_config
            expert_placement_strategy enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size
            dbo_decode_token_threshold dbo_prefill_token_threshold enable_fault_tolerance fault_tolerance_config
            is_moe_model
        """,
        "scheduler_config": """
            async_scheduling disable_chunked_mm_input disable_hybrid_kv_cache_manager enable_chunked_prefill
            encoder_cache_size is_multimodal_model long_prefill_token_threshold long_prefill_token_threshold_adaptive
            max_num_active_seqs max_num_batched_tokens max_num_encoder_input_tokens max_num_queued_reqs
            max_num_queued_tokens max_num_scheduled_tokens max_num_seqs policy prefill_schedule_interval runner_type
            scheduler_cls scheduler_reserve_full_isl stream_interval watermark
        """,
        "device_config": "device",
        "load_config": """
            device download_dir pt_load_map_location safetensors_prefetch_block_size safetensors_prefetch_num_threads
            use_tqdm_on_load
        """,
        "lora_config": "max_cpu_loras max_loras max_lora_rank max_lora_cls_labels specialize_active_lora",
        # The draft model counts by its weights.
        "speculative_config": """
            model target_model_config target_parallel_config draft_parallel_config draft_sample_method
            disable_padded_drafter_batch draft_lm_head_quantization enable_adaptive_verification enforce_eager
            fly_entropy_threshold fly_entropy_top_k fly_window_size
            num_speculative_tokens_per_batch_size prompt_lookup_max prompt_lookup_min rejection_sample_method
            suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth
            suffix_decoding_min_token_prob synthetic_acceptance_length synthetic_acceptance_rates
            use_local_argmax_reduction
        """,
        "kernel_config": """
            enable_cutedsl_warmup enable_flashinfer_autotune enable_jit_warmup enable_rocm_segmented_attn_autotune
        """,
        # Sizes follow from the scheduler's limits.
        "compilation_config": """
            cache_dir local_cache_dir debug_dump_path compile_cache_save_format compile_ranges_endpoints compile_sizes
            compilation_time encoder_compilation_time traced_files static_forward_context static_all_moe_layers
            enabled_custom_ops disabled_custom_ops cudagraph_capture_sizes cudagraph_copy_inputs
            cudagraph_decoder_replay cudagraph_mm_encoder cudagraph_mode cudagraph_num_of_warmups
            cudagraph_specialize_lora decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold
            encoder_cudagraph_max_frames_per_batch encoder_cudagraph_max_vision_items_per_batch
            encoder_cudagraph_token_budgets max_cudagraph_capture_size fast_moe_cold_start
        """,
        "pass_config": "fi_allreduce_fusion_max_size_mb rope_kvcache_fusion_max_token_num",
        "engram_config": "cpu_offload dp_shared_memory use_thp",
    }.items()
}
"""The ignored options of each part of the configuration, a field of ``VllmConfig``. A part that is named in another is
left out as a whole."""

VARIABLES = """
    VLLM_*TIMEOUT* VLLM_LOG_* VLLM_LOGGING_* VLLM_CONFIGURE_LOGGING VLLM_*_PORT VLLM_*_HOST VLLM_*_IP VLLM_*_IPS
    VLLM_PORT VLLM_DEBUG* VLLM_BUILD_* VLLM_DP_* VLLM_RAY_* VLLM_USE_RAY_* VLLM_MOONCAKE_* VLLM_P2P_* VLLM_EC_SIDE_*
    VLLM_NIXL_* MOONCAKE_* VLLM_ELASTIC_EP_* S3_* VLLM_MEDIA_CACHE* VLLM_MEDIA_FETCH_* VLLM_USAGE_*
    VLLM_NO_USAGE_STATS VLLM_MAX_AUDIO_* VLLM_XLA_* VLLM_*_FOR_PROFILING VLLM_GPT_OSS_* VLLM_TOOL_*
    VLLM_DISABLE_LOG_* VLLM_*CACHE_DIR VLLM_*_CACHE_PATH LOCAL_RANK CUDA_VISIBLE_DEVICES CUDA_HOME LD_LIBRARY_PATH
    NO_COLOR FORCE_COLOR MAX_JOBS NVCC_THREADS VERBOSE CMAKE_BUILD_TYPE VLLM_TARGET_DEVICE VLLM_MAIN_CUDA_VERSION
    VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_DOCKER_BUILD_CONTEXT
    VLLM_IMAGE_TAG VLLM_SKIP_VERSION_SUFFIX VLLM_CONFIG_ROOT VLLM_CACHE_ROOT VLLM_ASSETS_CACHE
    VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_RPC_BASE_PATH VLLM_NCCL_SO_PATH VLLM_NCCL_INCLUDE_PATH VLLM_CUDART_SO_PATH
    VLLM_CUDA_COMPATIBILITY_PATH VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_DIST_IDENT VLLM_PROCESS_NAME_PREFIX
    VLLM_DO_NOT_TRACK VLLM_API_KEY VLLM_TRACE_FUNCTION VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_GC_DEBUG
    VLLM_GPU_SYNC_CHECK VLLM_PATTERN_MATCH_DEBUG VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_FORCE_AOT_LOAD
    VLLM_USE_AOT_COMPILE VLLM_USE_MEGA_AOT_ARTIFACT VLLM_DISABLE_COMPILE_CACHE VLLM_COMPILE_CACHE_SAVE_FORMAT
    VLLM_ENABLE_STARTUP_PLAN VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_DEEP_GEMM_WARMUP
    VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS VLLM_TUNED_CONFIG_FOLDER VLLM_ENABLE_CUDAGRAPH_GC
    VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
    VLLM_USE_FLASHINFER_SAMPLER VLLM_XPU_USE_SAMPLER_KERNEL VLLM_RAISE_ON_LOGIT_NANS VLLM_COMPUTE_NANS_IN_LOGITS
    VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_CI_ENV
    VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING VLLM_DISABLE_PYNCCL
    VLLM_SKIP_P2P_CHECK VLLM_USE_NCCL_SYMM_MEM VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS
    VLLM_USE_SPINLOOP_EXT VLLM_WSL2_ENABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY
    VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_USE_SIMPLE_KV_OFFLOAD
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_FASTSAFETENSORS_QUEUE_SIZE
    VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_MSGPACK_ZERO_COPY_THRESHOLD
    VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_RANDOMIZE_DP_DUMMY_INPUTS
    VLLM_SERVER_DEV_MODE VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_USE_RUST_FRONTEND
    VLLM_USE_RUST_BENCH VLLM_RUST_FRONTEND_PATH VLLM_USE_FASTOKENS VLLM_SKIP_MODEL_NAME_VALIDATION
    VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_LORA_RESOLVER_HF_REPO_LIST
    VLLM_MAX_N_SEQUENCES VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS
    VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_MEDIA_REQUEST_* VLLM_MAX_EMBED_DECODE_BYTES
    VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_V1_USE_OUTLINES_CACHE VLLM_XGRAMMAR_CACHE_MB
    VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_COHERE_API
    VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_SYSTEM_START_DATE VLLM_DBO_COMM_SMS
    VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT VLLM_CHAT_TEMPLATE_FUEL
    VLLM_HTTP_MAX_REQUEST_BODY_SIZE VLLM_REQUEST_BODY_LOG_LEVEL
"""
"""Patterns of environment variables."""


def variable(name: str) -> bool:
    """Whether an environment variable is known not to change KV."""
    return any(fnmatchcase(name, each) for each in VARIABLES.split())
