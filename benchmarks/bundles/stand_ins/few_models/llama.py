from sglang.srt.layers.dual_gemm import DualGemm
from sglang.srt.models.llama import LlamaForCausalLM

DualGemm._select_mode = lambda *_: None  # its kernel needs CUTLASS's Python package

EntryClass = LlamaForCausalLM
