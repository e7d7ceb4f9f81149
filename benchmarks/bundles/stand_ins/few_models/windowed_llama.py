from typing import Any

from sglang.srt.models.llama import LlamaForCausalLM


class WindowedLlamaForCausalLM(LlamaForCausalLM):
    """Some layers have a sliding window: SGLang keeps their KV in a pool of its own, for as long as it is needed."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        for layer, windowed in zip(self.model.layers, config.hybrid_layer_pattern, strict=True):
            if windowed:
                layer.self_attn.attn.sliding_window_size = self.get_attention_sliding_window_size()

    def get_attention_sliding_window_size(self) -> int:
        return int(self.config.sliding_window) - 1


EntryClass = WindowedLlamaForCausalLM
