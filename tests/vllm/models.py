"""Tiny models with random weights. They are large enough that wrong KV changes the next tokens, which a test holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BLOCK = 32
"""Tokens in a block: the CPU's attention is fast for multiples of 32 only."""

VOCABULARY = 1024
WINDOW = 2 * BLOCK
"""Of the sliding layers of `hybrid`."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def save(name: str, directory: Path) -> str:
    """Write the model of this name into the directory, unless it is there, and return its path."""
    path = directory / name
    if not path.exists():
        import torch

        torch.manual_seed(sorted(_MODELS).index(name))
        _MODELS[name]().save_pretrained(path)
    return str(path)


def save_adapter(directory: Path, seed: int, *, alpha: int = 16) -> str:
    """Write an adapter for `full` with random weights, in place of what is there, and return its path."""
    import torch
    from safetensors.torch import save_file

    rank, random = 8, torch.Generator().manual_seed(seed)
    outputs = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
    tensors = {}
    for layer in range(3):
        for name, output in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, 128, generator=random) * 0.1
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(output, rank, generator=random)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(outputs), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


def save_drafted(directory: Path, method: str, *, hybrid: bool) -> tuple[str, dict[str, Any]]:
    """Write a model, and a draft that guesses nearly all it says by KV of its own.

    The model has one layer whose output counts, and the draft is a copy of that layer. What a head is given of the
    target's hidden states is just enough for a few wrong guesses.

    Args:
        method: ``draft_model``, ``eagle`` or ``mtp``.
        hybrid: whether the model has several KV cache groups. The MTP head is in one with a sliding window then, and
            the others are in one without.

    Returns:
        The model's path, and the engine's ``speculative_config``.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    full, sliding = "full_attention", "sliding_attention"
    kinds = [full] * 3
    if hybrid:  # vLLM 0.33 gives a draft model the block table of the first group, whichever its own is
        kinds = [full, sliding, sliding] * 2 if method == "draft_model" else [sliding, sliding, full] * 2
    counts = kinds.index(sliding if hybrid and method == "mtp" else full)
    torch.manual_seed(100 + hybrid)
    sizes = {**_COMMON, "hidden_size": 128, "intermediate_size": 256}
    new, config_of = (Qwen2ForCausalLM, Qwen2Config) if method == "mtp" else (LlamaForCausalLM, LlamaConfig)
    tensors = new(config_of(**sizes, num_hidden_layers=len(kinds))).state_dict()
    embeddings = "model.embed_tokens.weight"  # an EAGLE head does not normalise its input
    tensors[embeddings] = torch.nn.functional.normalize(tensors[embeddings]) * 128**0.5
    of_layer = f"model.layers.{counts}."
    for name, each in tensors.items():
        if not name.startswith(of_layer) and name.endswith(("o_proj.weight", "down_proj.weight")):
            each.zero_()
    layer = {name.removeprefix(of_layer): each for name, each in tensors.items() if name.startswith(of_layer)}
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    target, one_layer = directory / "target", LlamaConfig(**sizes, num_hidden_layers=1, architectures=_LLAMA)
    if method == "mtp":
        head, options = (_mimo_v2_head if hybrid else _mimo_head)(layer)
        if hybrid:
            options["hybrid_layer_pattern"] = [int(each == sliding) for each in kinds]
        options |= {"num_hidden_layers": len(kinds), "num_nextn_predict_layers": 1}
        return _write(target, Qwen2Config(**sizes, **options), tensors | head), drafts
    if method == "eagle":
        drafted = {f"layers.0.{name}": each for name, each in layer.items() if "input_layernorm" not in name}
        drafted["fc.weight"] = torch.cat([torch.eye(128), 0.001 * torch.eye(128)], dim=1)
    else:
        drafted = {f"model.layers.0.{name}": each for name, each in layer.items()}
        drafted |= {name: each for name, each in tensors.items() if "layers" not in name}
    drafts["model"] = _write(directory / "draft", one_layer, drafted)
    windows = {"layer_types": kinds, "sliding_window": _DRAFTED_WINDOW} if hybrid else {}
    config = LlamaConfig(**sizes, **windows, num_hidden_layers=len(kinds), architectures=_LLAMA)
    return _write(target, config, tensors), drafts


_LLAMA = ["LlamaForCausalLM"]
_DRAFTED_WINDOW = 4 * BLOCK
"""Reaches from the end of a prompt beyond what is computed of it after a hit."""


def _mimo_head(layer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and options of a MiMo: vLLM tells it from a Qwen2 by its architecture, and transformers knows none."""
    import torch

    prefix = "model.mtp_layers.0."
    norms = {f"{each}.weight": torch.ones(128) for each in ("token_layernorm", "hidden_layernorm", "final_layernorm")}
    project = {"input_proj.weight": torch.cat([0.01 * torch.eye(128), torch.eye(128)], dim=1)}
    head = {prefix + name: each for name, each in (layer | norms | project).items()}
    return head, {"architectures": ["MiMoForCausalLM"]}


def _mimo_v2_head(layer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and options of a MiMo-V2 without experts, whose head has a sliding window."""
    import torch

    prefix = "model.mtp.layers.0."
    layer = {name.replace("post_attention_layernorm", "pre_mlp_layernorm"): each for name, each in layer.items()}
    norms = {f"{each}.weight": torch.ones(128) for each in ("enorm", "hnorm", "final_layernorm")}
    project = {"eh_proj.weight": torch.cat([torch.eye(128), 0.01 * torch.eye(128)], dim=1)}
    head = {prefix + name: each for name, each in (layer | norms | project).items()}
    options = {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "layernorm_epsilon": 1e-6,
        "attention_bias": True,
        "n_routed_experts": 0,
        "swa_num_attention_heads": _COMMON["num_attention_heads"],
        "swa_num_key_value_heads": _COMMON["num_key_value_heads"],
        "swa_head_dim": _COMMON["head_dim"],
        "sliding_window_size": _DRAFTED_WINDOW,
    }
    return head, options


def _write(path: Path, config: Any, tensors: dict[str, Any]) -> str:
    from safetensors.torch import save_file

    config.save_pretrained(path)
    save_file({name: each.clone() for name, each in tensors.items()}, path / _WEIGHTS, {"format": "pt"})
    return str(path)


def save_experts(directory: Path) -> str:
    """Write a model with a choice of experts in each layer."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    path = directory / "experts"
    torch.manual_seed(len(_MODELS) + 1)
    experts = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**_COMMON, **experts, hidden_size=128, intermediate_size=256, num_hidden_layers=3)
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return str(path)


def save_one_head(directory: Path) -> str:
    """Write a model like `full` with a single KV head, which all tensor-parallel ranks have."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = directory / "one_head"
    if not path.exists():
        torch.manual_seed(len(_MODELS) + 3)
        sizes = {**_COMMON, "num_key_value_heads": 1}
        config = LlamaConfig(**sizes, hidden_size=128, intermediate_size=256, num_hidden_layers=3)
        LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def save_states(directory: Path) -> str:
    """Write a model in which every other layer has a state (a short convolution) and the others full attention."""
    import torch
    from transformers import Lfm2Config, Lfm2ForCausalLM

    path = directory / "states"
    if path.exists():
        return str(path)
    torch.manual_seed(len(_MODELS) + 2)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "block_ff_dim": 256, "block_auto_adjust_ff_dim": False}
    layers = ["conv", "full_attention"] * 2
    config = Lfm2Config(**_COMMON, **sizes, num_hidden_layers=len(layers), layer_types=layers, conv_L_cache=3)
    model = Lfm2ForCausalLM(config)
    for name, weight in model.named_parameters():
        if "q_layernorm" in name:  # attention to few tokens, else the mean of many says nothing about any of them
            weight.data *= 8
    model.save_pretrained(path)
    # What vLLM asks of it, and transformers does not keep.
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**written, "conv_dim": 128, "block_dim": 128}))
    return str(path)


HEARS = "<|audio_bos|> <|AUDIO|> <|audio_eos|>"
"""In the prompts of `save_listening`, whose other words are ``w5`` to ``w999``."""


def save_listening(directory: Path) -> str:
    """Write a model that takes sounds, with its processor and tokenizer, and return its path."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioEncoderConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        Qwen2Config,
        WhisperFeatureExtractor,
    )

    path = directory / "listening"
    torch.manual_seed(len(_MODELS) + 2)
    values = {name: value for name, value in _COMMON.items() if name != "head_dim"}
    text = Qwen2Config(**values, hidden_size=128, intermediate_size=256, num_hidden_layers=3)
    sizes = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "d_model": 64}
    sound = Qwen2AudioEncoderConfig(**sizes, num_mel_bins=16, max_source_positions=1500, initializer_range=0.3)
    special = HEARS.split()
    config = Qwen2AudioConfig(audio_config=sound, text_config=text, audio_token_index=VOCABULARY - 2)
    Qwen2AudioForConditionalGeneration(config).save_pretrained(path)
    # transformers writes names that vLLM does not read. What is heard is loud: it changes all that follows.
    tensors = {
        name.replace("model.model.", "model."): each * 10 if "projector" in name else each.clone()
        for name, each in load_file(path / _WEIGHTS).items()
    }
    save_file(tensors, path / _WEIGHTS, {"format": "pt"})
    tokenizer = _words(special)
    assert tokenizer.convert_tokens_to_ids("<|AUDIO|>") == config.audio_token_index
    hears = WhisperFeatureExtractor(feature_size=16, chunk_length=30)
    Qwen2AudioProcessor(feature_extractor=hears, tokenizer=tokenizer, chat_template="none").save_pretrained(path)
    return str(path)


SEES = "<image>"
"""Stands for an image in the model of `save_seeing`; vLLM puts it before the words."""
IMAGE = 56
"""Pixels of an image's side, of which each block of 14 x 14 is a token."""


def save_seeing(directory: Path) -> str:
    """Write a model that takes images, with its processor and tokenizer, and return its path."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import (
        GemmaConfig,
        PaliGemmaConfig,
        PaliGemmaForConditionalGeneration,
        PaliGemmaProcessor,
        SiglipImageProcessorPil,
        SiglipVisionConfig,
    )

    path = directory / "seeing"
    torch.manual_seed(len(_MODELS) + 3)
    values = {name: value for name, value in _COMMON.items() if name != "tie_word_embeddings"}
    text = GemmaConfig(**values, hidden_size=128, intermediate_size=256, num_hidden_layers=3)
    sight = SiglipVisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=IMAGE,
        patch_size=14, projection_dim=128,
    )  # fmt: skip
    special = [SEES, "<s>", "\n"]
    config = PaliGemmaConfig(
        vision_config=sight, text_config=text, image_token_index=VOCABULARY - len(special), projection_dim=128
    )
    PaliGemmaForConditionalGeneration(config).save_pretrained(path)
    # transformers writes names that vLLM does not read. What is seen is glaring: it changes all that follows.
    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model."): each * 10 if "projector" in name else each.clone()
        for name, each in load_file(path / _WEIGHTS).items()
        if "vision_tower.head" not in name
    }
    save_file(tensors, path / _WEIGHTS, {"format": "pt"})
    tokenizer = _words(special, bos_token="<s>")
    tokenizer.add_bos_token = False
    sees = SiglipImageProcessorPil(size={"height": IMAGE, "width": IMAGE})
    sees.image_seq_length = (IMAGE // 14) ** 2
    PaliGemmaProcessor(image_processor=sees, tokenizer=tokenizer).save_pretrained(path)
    return str(path)


def _words(special: list[str], **options: Any) -> Any:
    """A tokenizer of the words ``w5`` to ``w999``, and of special ones at the end of the vocabulary."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "</s>": 1, **{f"w{i}": i for i in range(5, 1000)}}
    words |= {word: VOCABULARY - len(special) + i for i, word in enumerate(special)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>",
        additional_special_tokens=special, **options,
    )  # fmt: skip


_WEIGHTS = "model.safetensors"


def _full() -> Any:
    """Three layers of full attention: one KV cache group."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_COMMON, hidden_size=128, intermediate_size=256, num_hidden_layers=3))


def _hybrid() -> Any:
    """Four layers with a sliding window and two without: several KV cache groups, which overlay the same bytes."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_COMMON,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=len(layers),
            layer_types=layers,
            sliding_window=WINDOW,
            query_pre_attn_scalar=32,
        )
    )


def _mla() -> Any:
    """Two layers of multi-head latent attention, without experts; as small as vLLM has kernels for."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    latent = {"kv_lora_rank": 512, "q_lora_rank": None}
    heads = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    experts = {"first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    sizes = {**_COMMON, "num_attention_heads": 16, "num_key_value_heads": 16}
    del sizes["head_dim"]
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **sizes,
            **latent,
            **heads,
            **experts,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            n_group=1,
            topk_group=1,
        )
    )


def _wide() -> Any:
    """One group, and so much to compute that a GPU is behind its engine for tens of milliseconds at a prompt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**_COMMON, "num_attention_heads": 8, "head_dim": 128, "initializer_range": 0.05}
    return LlamaForCausalLM(LlamaConfig(**sizes, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8))


def _longrope() -> Any:
    """One group, and rotary factors that vLLM chooses by the longest request that the engine may get."""
    from transformers import Phi3Config, Phi3ForCausalLM

    sizes = {each: number for each, number in _COMMON.items() if each != "head_dim"}
    half = 16  # of a head's dimensions
    rope = {
        "type": "longrope",
        "short_factor": [1.0] * half,
        "long_factor": [1.0 + each for each in range(half)],
    }
    return Phi3ForCausalLM(
        Phi3Config(
            **sizes,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            pad_token_id=2,
            original_max_position_embeddings=512,
            rope_scaling=rope,
        )
    )


_MODELS = {"full": _full, "hybrid": _hybrid, "mla": _mla, "other": _full, "wide": _wide, "with_longrope": _longrope}
"""``other`` has the shape of ``full`` and other weights."""
