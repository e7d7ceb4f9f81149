from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM

EntryClass = DeepseekV2ForCausalLM
