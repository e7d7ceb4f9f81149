"""The options of the tested vLLM that count: somebody has looked at each, and found that it may change KV or could not
say that it never does. Those that never do are in `kvsidecar.integrations.vllm.ignored`.
"""

from __future__ import annotations

OPTIONS = {
    part: set(names.split())
    for part, names in {
        "vllm_config": """
            model_config cache_config parallel_config scheduler_config device_config load_config attention_config
            engram_config mamba_config kernel_config lora_config speculative_config diffusion_config
            compilation_config additional_config optimization_level
        """,
        "model_config": """
            model_weights runner convert trust_remote_code dtype hf_config hf_config_path revision code_revision
            max_model_len quantization quantization_config disable_sliding_window disable_cascade_attn config_format
            hf_overrides model_class_overrides model_impl multimodal_config
        """,
        "quantization_config": "linear moe ignore targets",
        "linear": "weight activation",
        "moe": "weight activation",
        "multimodal_config": """
            language_model_only media_io_kwargs mm_processor_kwargs mm_device_do_normalize mm_hasher_algorithm
            mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
            video_pruning_rate video_pruning_method allow_missing_mm_embeddings
        """,
        "cache_config": """
            kv_cache_layout cache_dtype sliding_window kv_cache_dtype_skip_layers mamba_page_size_padded
            skip_page_size_padded mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode
            replayssm_buffer_len use_replayssm use_kda_recoverssm kv_sharing_fast_prefill swa_bounded_replay
        """,
        "parallel_config": """
            pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size enable_hc_sp
            enable_expert_parallel all2all_backend worker_cls worker_extension_cls decode_context_parallel_size
            dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate cp_kv_cache_interleave_size
        """,
        "scheduler_config": "",
        "device_config": "device_type",
        "load_config": "load_format safetensors_load_strategy model_loader_extra_config ignore_patterns",
        "attention_config": """
            backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version
            flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph
            use_trtllm_attention disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization
            indexer_kv_dtype indexer_sparse_logits hisparse_config use_non_causal sparse_mla_force_mqa
            sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size
            flex_attn_kv_block_size indexer_tp_shard_min_rows minimax_m3_indexer_cp trtllm_ragged_backend
        """,
        "hisparse_config": "device_buffer_size eager_host_mirror",
        "engram_config": "embedding_across_dp",
        "mamba_config": "backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm",
        "kernel_config": """
            ir_op_priority moe_backend sparse_indexer_topk_backend linear_backend linear_backend_per_quant
            monokernel
        """,
        "ir_op_priority": "rms_norm fused_add_rms_norm gelu_and_mul_sparse",
        "lora_config": """
            fully_sharded_loras lora_dtype target_modules default_mm_loras enable_tower_connector_lora
            enable_mixed_moe_lora_format enable_moe_shared_loras
        """,
        "speculative_config": """
            num_speculative_tokens method draft_tensor_parallel_size tensor_parallel_size quantization moe_backend
            attention_backend kv_cache_dtype max_model_len revision code_revision index_share_for_mtp_iteration
            disable_eagle_block_drop use_heterogeneous_vocab parallel_drafting draft_model_config draft_load_config
            dspark_draft_topk xpress_topc disable_lookahead_block_hashes
        """,
        "diffusion_config": "canvas_length max_denoising_steps",
        "compilation_config": """
            mode backend custom_ops ir_enable_torch_wrap splitting_ops compile_mm_encoder inductor_compile_config
            inductor_passes use_inductor_graph_partition pass_config dynamic_shapes_config
        """,
        "pass_config": """
            fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops fuse_allreduce_rms
            enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla fuse_act_padding fuse_mla_dual_rms_norm
            fuse_rope_kvcache fuse_qk_norm_rope_kvcache
        """,
        "dynamic_shapes_config": "type evaluate_guards assume_32_bit_indexing",
    }.items()
}
"""By part of the configuration, as in `kvsidecar.integrations.vllm.ignored`."""

_VARIABLES = """
    VLLM_FLOAT32_MATMUL_PRECISION VLLM_BATCH_INVARIANT VLLM_REPLICATE_EMBED VLLM_TRITON_USE_TD VLLM_USE_MODELSCOPE
    VLLM_USE_STANDALONE_COMPILE VLLM_ENABLE_PREGRAD_PASSES VLLM_USE_BYTECODE_HOOK VLLM_PP_LAYER_PARTITION
    VLLM_CPU_ATTN_SPLIT_KV VLLM_ZENTORCH_WEIGHT_PREPACK VLLM_CPU_INT4_W4A8 VLLM_XPU_PP_MICROBATCH
    VLLM_MAX_IMAGE_PIXELS VLLM_VIDEO_LOADER_BACKEND VLLM_MEDIA_CONNECTOR VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
    VLLM_TEST_FORCE_LOAD_FORMAT VLLM_PLUGINS VLLM_USE_TRITON_AWQ VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_DISABLED_KERNELS
    VLLM_USE_HW_AGNOSTIC VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_GDN_DECODE_KERNEL VLLM_USE_OINK_OPS
    VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_ROCM_USE_AITER
    VLLM_ROCM_USE_AITER_CUSTOM_AR VLLM_ROCM_USE_AITER_LINEAR VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MOE
    VLLM_ROCM_USE_AITER_MOE_SITUV2 VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_AITER_MOE_DISPATCH_POLICY
    VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_MLA VLLM_ROCM_AITER_MLA_ASM_PADDING
    VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA
    VLLM_ROCM_USE_AITER_TRITON_ROPE VLLM_ROCM_USE_AITER_FP8BMM VLLM_ROCM_USE_AITER_FP4BMM
    VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS
    VLLM_ROCM_USE_AITER_TRITON_GEMM
    VLLM_ROCM_USE_SKINNY_GEMM VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT
    VLLM_ROCM_QUICK_REDUCE_QUANTIZATION VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16
    VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB
    VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB VLLM_USE_LAYERNAME VLLM_MLA_DISABLE VLLM_MODEL_REDIRECT_PATH
    VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MARLIN_INPUT_DTYPE VLLM_HUMMING_ONLINE_QUANT_CONFIG
    VLLM_HUMMING_INPUT_QUANT_CONFIG VLLM_HUMMING_USE_F16_ACCUM VLLM_HUMMING_MOE_GEMM_TYPE VLLM_DEEPEPLL_NVFP4_DISPATCH
    VLLM_TPU_USING_PATHWAYS VLLM_USE_DEEP_GEMM VLLM_MOE_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0
    VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_DCP_Q_REPLICATE VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_MOE_SKIP_PADDING
    VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT VLLM_KIMI_K3_AUX_ATTN_RES_STREAM VLLM_KIMI_K3_GEMM_AR VLLM_ENABLE_GEMM_RS
    VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_USE_FLASHINFER_MOE_INT4
    VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE
    VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_KV_CACHE_LAYOUT VLLM_SSM_CONV_STATE_LAYOUT VLLM_HAS_FLASHINFER_CUBIN
    VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE VLLM_ROCM_FP8_MFMA_PAGE_ATTN VLLM_ALLREDUCE_USE_SYMM_MEM
    VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC VLLM_DEEPEP_BUFFER_SIZE_MB
    VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE
    VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE
    VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_DISABLE_SHARED_EXPERTS_STREAM
    VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
    VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_USE_V2_MODEL_RUNNER VLLM_LORA_DISABLE_PDL
    VLLM_XPU_FORCE_N_CONTIG_WEIGHT VLLM_XPU_INC_WNA16_BACKEND VLLM_USE_DIRECT_DCP_A2A VLLM_USE_DIRECT_DCP_Q_GATHER
    VLLM_USE_DIRECT_DCP_KV_GATHER VLLM_LORA_ENABLE_DUAL_STREAM VLLM_ENABLE_HPC_OPS
    VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD VLLM_ROCM_MUSE_MOE_ONLINE_QUANT VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE
    VLLM_STEP5_SHARD_SP_SHARED_EXPERT
"""
VARIABLES = set(_VARIABLES.split())
