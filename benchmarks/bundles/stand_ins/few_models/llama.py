from typing import Any

from sglang.kernels.ops.memory import small_copy
from sglang.srt.layers.dual_gemm import DualGemm
from sglang.srt.models.llama import LlamaForCausalLM

DualGemm._select_mode = lambda *_: None  # its kernel needs CUTLASS's Python package


class _OrTorch:
    """SGLang's copies into the buffers of a CUDA graph: by torch if this Triton cannot compile its kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __call__(self, dsts: Any, srcs: Any) -> bool:
        if self._kernel is None:
            return False
        try:
            return bool(self._kernel(dsts, srcs))
        except Exception as error:  # noqa: BLE001 (whatever the compiler says)
            print(f"small_copy: {type(error).__name__}: {error}", flush=True)
            self._kernel = None
            return False


small_copy.try_small_copy = _OrTorch(small_copy.try_small_copy)

EntryClass = LlamaForCausalLM
