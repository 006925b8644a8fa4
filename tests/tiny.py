"""A Qwen3 model so small that every test can build its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


def qwen3(vocab_size: int, **changes) -> Qwen3ForCausalLM:
    """Returns a model of two layers of width 16 with fixed weights, large enough that the logits are not constant."""
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
    }
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**settings, **changes}))
