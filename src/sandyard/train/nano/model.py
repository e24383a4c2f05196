"""The nano policy's network: a Llama of about a million parameters, for two CPU cores."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

MAX_LENGTH = 2048


def build_model(vocabulary: int, eos_token_id: int, pad_token_id: int, seed: int = 0) -> LlamaForCausalLM:
    """A freshly initialised model in float32; the same weights for the same seed."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
