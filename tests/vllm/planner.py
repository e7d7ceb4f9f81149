"""What vLLM plans for the KV cache of each architecture of its registry, and what this project offloads of it.

python -m tests.vllm.planner [ARCHITECTURE ...]      # all that have a configuration; in .venv-vllm, or on a GPU

The model is built as vLLM builds it, from the default configuration of transformers, with fewer layers and experts and
without weights; on a CPU, what it has no kernels for is stood in for. Its layers' specs go through vLLM's planner, and
the groups that come out through `kvsidecar.integrations.vllm.groups.groups_of`. Each line is a JSON object:
``architecture``, ``specs`` (of the planned groups), and one of ``offloaded`` (kinds of groups), ``refused`` (why) and
``not_planned`` (why vLLM itself does not get that far on this machine).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import re
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
}

LAYERS = 12
"""Enough for each pattern of layers to repeat."""
EXPERTS = 16
TOKENS = 8192
"""The longest request."""
GIB = 64
"""For the KV cache."""

ABSENT = ("torchvision", "torchaudio", "mistral_common", "timm", "cutlass", "terratorch", "open_clip")
"""What models import for images, sounds and other GPUs, and the planner never calls."""

TYPES = {"Llama4ForCausalLM": "llama4_text"}
"""By architecture: the type of the model, where transformers names another one."""

FIELDS: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 4},
    # The CPU has no kernels for experts of this kind.
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"] * 3},
    "deepseek_v2": {"n_group": 1, "topk_group": 1},
    "nemotron": {"num_key_value_heads": 8},
    "kimi_linear": {"mla_use_nope": True, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    "hy_v3": {"first_k_dense_replace": 1},
    "qwen4_exp": {"output_gate_type": "sigmoid"},
    "mimo_v2_flash": {"hybrid_layer_pattern": [0, 1, 1, 1, 1, 1] * 2},
}
"""By type of model: what its configuration has in place of transformers' defaults."""

MISSING: dict[str, Any] = {
    "block_dim": 2560,
    "conv_dim": 2560,
    "expert_hidden_dim": 1024,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "layernorm_epsilon": 1e-5,
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "n_group": 1,
    "norm_topk_prob": True,
    "moe_intermediate_size": 1024,
    "padded_vocab_size": 32_000,
    "rotary_dim": 64,
    "route_norm": True,
    "score_func": "sigmoid",
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "sliding_window_size": 128,
    "swa_head_dim": 128,
    "swa_num_attention_heads": 32,
    "swa_num_key_value_heads": 8,
    "swa_v_head_dim": 128,
    "use_embed_norm": False,
    "use_qk_norm": True,
    "zero_expert_type": "identity",
}
"""What published configurations have, and the classes of transformers do not: given to those of which vLLM asks it."""


class _Anything(types.ModuleType):
    """A module that has every name."""

    __version__ = "1.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def configurations() -> dict[str, str]:
    """By architecture that vLLM knows and transformers has a configuration for: the type of the model."""
    from transformers.models.auto import modeling_auto
    from vllm.model_executor.models import registry

    types_of: dict[str, str] = {}
    for name in dir(modeling_auto):
        if name.endswith("_MAPPING_NAMES"):
            for model_type, names in getattr(modeling_auto, name).items():
                for each in names if isinstance(names, (tuple, list)) else [names]:
                    types_of.setdefault(each, model_type)
    known = (*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS)
    return {each: TYPES.get(each, types_of[each]) for each in known if each in types_of}


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """With fewer layers and experts, also in the configurations within."""
    config = {name: shrunk(value) if isinstance(value, dict) else value for name, value in config.items()}
    for name in ("dtype", "torch_dtype", "_name_or_path", "output_attentions"):  # not all classes take what they give
        config.pop(name, None)
    if isinstance(by_layer := config.get("per_layer_config"), dict):
        config["per_layer_config"] = {name: value for name, value in by_layer.items() if int(name) < LAYERS}
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > LAYERS:
        for name, value in config.items():
            if isinstance(value, list) and len(value) == layers:
                config[name] = value[:LAYERS]
        config["num_hidden_layers"] = LAYERS
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if isinstance(config.get(name), int):
            config[name] = min(config[name], EXPERTS)
    return config


class Planner:
    """vLLM's planner, in an engine of one rank.

    Args:
        directory: for what vLLM's process group writes.
    """

    def __init__(self, directory: str) -> None:
        import torch
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.v1.worker import workspace

        self._torch = torch
        with set_current_vllm_config(VllmConfig()):
            address = f"file://{directory}/store"
            parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
        # Of experts, which vLLM makes only if the first model has some.
        parallel_state._EP = parallel_state._EP or parallel_state._TP
        workspace.init_workspace_manager(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        if not torch.cuda.is_available():
            self._stand_in()

    def _stand_in(self) -> None:
        """Let a CPU plan what only a GPU can compute: sparse attention, and layers with streams of their own."""
        from vllm.platforms.cpu import CpuPlatform
        from vllm.triton_utils import triton

        chosen = CpuPlatform.get_attn_backend_cls.__func__  # type: ignore[attr-defined]

        def choose(cls: Any, *args: Any, **named: Any) -> str:
            try:
                return str(chosen(cls, *args, **named))
            except NotImplementedError:
                return "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"

        CpuPlatform.get_attn_backend_cls = classmethod(choose)
        triton.set_allocator = mock.MagicMock()
        for name in ("Event", "Stream"):
            setattr(self._torch.cuda, name, mock.MagicMock)

    def plan(self, architecture: str, model_type: str) -> dict[str, Any]:
        """What the module's docstring says of a line."""
        try:
            vllm_config, kv_cache_config = self._planned(architecture, model_type)
        except Exception as error:  # noqa: BLE001 - whatever vLLM says of this machine
            return {"not_planned": f"{type(error).__name__}: {str(error)[:200]}"}
        specs = [type(each.kv_cache_spec).__name__ for each in kv_cache_config.kv_cache_groups]
        if not specs:
            return {"not_planned": "it has no KV cache"}
        from kvsidecar.integrations.vllm.groups import groups_of

        try:
            groups = groups_of(kv_cache_config, vllm_config)
        except ValueError as error:
            return {"specs": specs, "refused": str(error)}
        return {"specs": specs, "offloaded": [each.kind.name for each in groups]}

    def _planned(self, architecture: str, model_type: str) -> tuple[Any, Any]:
        from transformers import AutoConfig
        from vllm.model_executor.models.registry import ModelRegistry

        known: Any = ModelRegistry.models[architecture]
        if hasattr(known, "load_model_cls"):  # else a process is started for each, to look at it
            ModelRegistry.register_model(architecture, known.load_model_cls())
        config = shrunk(AutoConfig.for_model(model_type).to_dict())
        config |= {"architectures": [architecture], **FIELDS.get(model_type, {})}
        missing: dict[str, set[str]] = {}
        while True:
            try:
                return self._with(config, missing)
            except AttributeError as error:
                asked = re.search(r"'(\w+)' object has no attribute '(\w+)'", str(error))
                if asked is None or asked[2] not in MISSING or asked[2] in missing.setdefault(asked[1], set()):
                    raise
                missing[asked[1]].add(asked[2])

    def _with(self, config: dict[str, Any], missing: dict[str, set[str]]) -> tuple[Any, Any]:
        """What vLLM makes of a configuration, whose parts get what is ``missing``: by class, names of `MISSING`."""
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs

        def complete(made: Any) -> Any:
            for name in missing.get(type(made).__name__, ()):
                setattr(made, name, MISSING[name])
            for each in vars(made).values():
                if hasattr(each, "to_dict"):
                    complete(each)
            return made

        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "config.json").write_text(json.dumps(config))
            arguments = EngineArgs(
                model=directory,
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype="bfloat16",
                enable_prefix_caching=True,
                max_model_len=TOKENS,
                enforce_eager=True,
                hf_overrides=complete,
            )
            vllm_config = arguments.create_engine_config()
            with set_current_vllm_config(vllm_config):
                return vllm_config, self._kv_cache_config(vllm_config)

    def _kv_cache_config(self, vllm_config: Any) -> Any:
        """As ``EngineCore._initialize_kv_caches`` makes it."""
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
        from vllm.v1.attention.backends import utils
        from vllm.v1.core import kv_cache_planning
        from vllm.v1.engine.core import register_all_kvcache_specs
        from vllm.v1.worker.worker_base import get_current_attn_backends

        self._build(vllm_config)
        register_all_kvcache_specs(vllm_config)
        layers = vllm_config.compilation_config.static_forward_context
        attention = {name: each for name, each in layers.items() if isinstance(each, AttentionLayerBase)}
        found = {name: each.get_kv_cache_spec(vllm_config) for name, each in attention.items()}
        specs = {name: spec for name, spec in found.items() if spec is not None}
        supported = utils.get_supported_kv_cache_layouts(get_current_attn_backends(vllm_config))
        layout = utils.resolve_kv_cache_layout(vllm_config, [[each.name for each in supported]], specs.values())
        utils.record_kv_cache_layout(vllm_config.cache_config, layout.name)
        groups = kv_cache_planning.get_global_kv_cache_groups(vllm_config, [specs])
        (planned,) = kv_cache_planning.get_kv_cache_configs(vllm_config, [specs], [GIB << 30], groups)
        sizes = [each.kv_cache_spec.block_size for each in planned.kv_cache_groups]
        cached = [
            each.kv_cache_spec.block_size for each in planned.kv_cache_groups if each.kv_cache_spec.prefix_cacheable
        ]
        if sizes:
            vllm_config.cache_config.block_size = min(cached or sizes)
        return planned

    def _build(self, vllm_config: Any) -> None:
        """Build the model, whose layers vLLM then finds by itself."""
        from vllm.model_executor.model_loader.utils import initialize_model

        torch = self._torch
        torch.set_default_dtype(torch.bfloat16)
        try:
            try:
                with torch.device("meta"):
                    initialize_model(vllm_config)
            except (NotImplementedError, RuntimeError):  # it computes with some of its weights
                vllm_config.compilation_config.static_forward_context.clear()
                initialize_model(vllm_config)  # memory that nobody writes to costs nothing
        finally:
            torch.set_default_dtype(torch.float32)


def plans(wanted: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    types_of = configurations()
    with tempfile.TemporaryDirectory() as directory:
        planner = Planner(directory)
        for each in wanted or types_of:
            yield {"architecture": each, **planner.plan(each, types_of[each])}


def main() -> None:
    sys.meta_path.append(Absent())
    for each in plans(sys.argv[1:]):
        print(json.dumps(each), flush=True)


if __name__ == "__main__":
    main()
