"""vLLM's plan of the KV cache on H200s, made on any machine: no GPU, no kernels and no weights are needed.

`stand_in` must be called before vLLM is imported. From then on, vLLM takes this machine for one with eight H200s: it
chooses their attention backends, blocks and layouts. Models are built on torch's meta device, with all of their layers,
as the first rank builds them.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

from tests.vllm.planner import Absent, Planner

KERNELS = (
    "vllm._C_stable_libtorch",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
"""Extension modules that only builds for CUDA have. They are imported, and never called."""
MEMORY = 141 << 30
BLOCKS = 20_000
"""Of the KV cache: enough for one prompt of tens of thousands of tokens in every group."""


class _Config:
    """A configuration of a Triton kernel that is never compiled."""

    def __init__(self, values: Any = None, num_warps: int = 4, num_stages: int = 2, **_: Any) -> None:
        self.kwargs, self.num_warps, self.num_stages = values or {}, num_warps, num_stages


def stand_in() -> None:
    """Make vLLM believe that it runs on H200s. Changes vLLM and torch in this process, for good."""
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"  # it misses kernels, as it should
    import torch
    from torch import _ops

    for name in KERNELS:
        sys.modules.setdefault(name, types.ModuleType(name))
    find, imported = _ops._OpNamespace.__getattr__, False

    def find_or_stand_in(namespace: Any, name: str) -> Any:
        try:
            return find(namespace, name)
        except AttributeError:
            # While vLLM's kernels are declared, those that are missing must stay so, except questions for support.
            if imported or "support" in name:
                return mock.MagicMock(name=name)
            raise

    _ops._OpNamespace.__getattr__ = find_or_stand_in
    for name in ("Event", "Stream"):
        setattr(torch.cuda, name, mock.MagicMock)

    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class H200(CudaPlatformBase):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H200"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return MEMORY

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def current_device(cls) -> Any:
            return torch.device("meta")

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def is_integrated_gpu(cls, device_id: int = 0) -> bool:
            return False

    platforms._current_platform = H200()
    from vllm.utils import import_utils

    import_utils.has_deep_gemm = lambda: True
    import vllm._custom_ops  # noqa: F401 - declares kernels
    from vllm.triton_utils import triton

    imported = True
    triton.Config = _Config
    triton.set_allocator = mock.MagicMock()


class H200Planner(Planner):
    """Plans the KV cache of models of any number of ranks. One for a process, after `stand_in`.

    Args:
        directory: for what vLLM writes.
    """

    def __init__(self, directory: str) -> None:
        sys.meta_path.append(Absent())
        self._directory = directory
        super().__init__(directory)

    def _stand_in(self) -> None:
        """`stand_in` has done all."""

    def _build(self, vllm_config: Any) -> None:
        from vllm.platforms import current_platform

        # Buffers on the GPU are as little needed as weights.
        with mock.patch.object(type(current_platform), "device_type", "meta"):
            super()._build(vllm_config)
        current_platform.update_block_size_for_backend(vllm_config)  # as executors do, once the model is there

    def planned(self, config: dict[str, Any], tp: int, tokens: int, transfer: Any) -> tuple[Any, Any]:
        """vLLM's configuration, and that of the first rank's KV cache.

        Args:
            config: of the model, as published.
            tp: tensor-parallel ranks.
            tokens: of the longest request.
            transfer: vLLM's ``KVTransferConfig``.
        """
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.models.registry import ModelRegistry

        (architecture,) = config["architectures"]
        known: Any = ModelRegistry.models[architecture]
        if hasattr(known, "load_model_cls"):  # else a process is started to look at it, which has no stand-ins
            ModelRegistry.register_model(architecture, known.load_model_cls())
        Path(self._directory, "config.json").write_text(json.dumps(config))
        arguments = EngineArgs(
            model=self._directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            max_model_len=tokens,
            enforce_eager=True,
            tensor_parallel_size=tp,
            distributed_executor_backend="mp",
            num_gpu_blocks_override=BLOCKS,
            kv_transfer_config=transfer,
        )
        with mock.patch.object(parallel_state.get_tp_group(), "world_size", tp):
            vllm_config = arguments.create_engine_config()
            with set_current_vllm_config(vllm_config):
                return vllm_config, self._kv_cache_config(vllm_config)
