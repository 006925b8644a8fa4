"""A tiny Qwen3 model and its character tokenizer for the rollout tests, without downloads."""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ALPHABET = "0123456789=abc."
PAD, EOS = 0, 1


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per character, a pad and an end token, and a chat template."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS, **{c: i + 2 for i, c in enumerate(ALPHABET)}}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<eos>",
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}",
    )


def fresh_model(seed: int = 0, **changes) -> Qwen3ForCausalLM:
    """Returns a 2-layer model with logits of standard deviation about 1, so that samplers differ."""
    settings = {
        "vocab_size": len(ALPHABET) + 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
    }
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**{**settings, **changes}))
