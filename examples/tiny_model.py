"""A model with random weights, to try an engine without downloading one: `python tiny_model.py DIRECTORY`.

It needs transformers and torch, which an engine's environment has. Its answers are noise. Its KV cache is small (1 KiB
per token), so that a prompt fits into the pool of a user who may lock little memory, and it computes enough per token
that a CPU needs a second or more for a prompt of a few thousand tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 8192
"""Tokens."""
CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


def tokenizer() -> PreTrainedTokenizerFast:
    """Each byte is a token, and there is one more for the end."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_, eos_token="<end>", model_max_length=CONTEXT, chat_template=CHAT
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the model is written")
    directory = parser.parse_args().directory
    text = tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(text),
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=text.eos_token_id,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    text.save_pretrained(directory)
    print(f"{directory}: {sum(each.numel() for each in model.parameters()) / 1e6:.0f} million random weights")


if __name__ == "__main__":
    main()
