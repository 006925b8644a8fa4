"""A model hub on disk, for tests without a network: tiny stand-ins under the names of real models and data sets.

The models are a few thousand random weights, the tokenizer reads bytes, and both lie in a folder of the layout of the
hub's own cache, so that ``from_pretrained`` finds them without being patched.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
from datasets import Dataset, DatasetDict, Features, Image, List, Value
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn

BYTES = 256

WORDS = {
    293: " b", 314: " {", 330: ' "', 397: ">\n", 411: "out", 450: "de", 497: '",', 522: "</", 606: "name",
    788: '":', 894: " any", 927: "sh", 944: "'t", 1318: "text", 1414: " know", 1513: " don", 2765: " won",
    4913: '{"', 5212: ' {"', 5392: " tool", 6023: "hi", 6659: "call", 7692: "async", 9520: "step",
    11248: "}}\n", 13477: "crement", 14172: "tool", 16252: " increment", 16370: "arguments", 17453: "Done",
    22785: "_tool", 35744: "increment", 64648: "multiply", 93054: "_multiply", 95642: '"}}\n',
}  # fmt: skip
"""Tokens of Qwen's vocabulary whose ids are written out in TRL's tests."""

LONG = (" got an unexpected keyword argument", " is not ", "tool_response", "multiply_tool()", "error", "valid")
"""More tokens, so that a tool's answer has about as many as in a larger vocabulary."""

SPECIAL = {
    name: BYTES + len(WORDS) + len(LONG) + i
    for i, name in enumerate(
        "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
        "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> "
        "<tool_call> </tool_call> <image>".split()
    )
}
"""Special tokens in the order that they have in Qwen's vocabulary, where they begin at ``QWEN_SPECIAL``."""

QWEN_SPECIAL = 151643

VOCABULARY = 2048
"""Far more than there are tokens: like a real model, an untrained one then seldom ends a completion."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

QWEN3 = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
"""A template that TRL recognises, so that it can parse tool calls."""

CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2", {}),
    "tiny-Qwen3ForCausalLM": ("Qwen3", {"head_dim": 4}),
    "tiny-Qwen3MoeForCausalLM": (
        "Qwen3Moe",
        {"head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "tiny-LlamaForCausalLM-3.2": ("Llama", {}),
    "tiny-MistralForCausalLM-0.2": ("Mistral", {}),
    "tiny-Gemma2ForCausalLM": ("Gemma2", {"head_dim": 4}),
    "tiny-Cohere2ForCausalLM": ("Cohere2", {"logit_scale": 1.0}),
    "tiny-GptOssForCausalLM": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "tiny-Glm4MoeForCausalLM": (
        "Glm4Moe",
        {"head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}
"""Name to (architecture, settings beside ``WIDTHS``)."""

CLASSIFIERS = {
    "tiny-Qwen2ForSequenceClassification-2.5": "Qwen2",
    "tiny-Qwen3ForSequenceClassification": "Qwen3",
    "tiny-LlamaForSequenceClassification-3.2": "Llama",
}

WIDTHS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": SPECIAL["<|endoftext|>"],
    "bos_token_id": SPECIAL["<|endoftext|>"],
    "eos_token_id": SPECIAL["<|im_end|>"],
    "tie_word_embeddings": False,
}


def tokenizer(chat_template: str = CHATML) -> transformers.PreTrainedTokenizerFast:
    """Returns a tokenizer of single bytes, with Qwen's special tokens and a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+|\w+|[^\w\s]+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([*WORDS.values(), *LONG])
    inner.add_special_tokens([*SPECIAL])
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<|endoftext|>", eos_token="<|im_end|>", extra_special_tokens={}
    )
    made.chat_template = chat_template
    return made


def causal(architecture: str, **settings: Any) -> nn.Module:
    """Returns a language model of two layers of width 8, unless the settings say otherwise."""
    return _model(f"{architecture}ForCausalLM", architecture, {**WIDTHS, **settings})


def _model(name: str, architecture: str, settings: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**settings)
    model = getattr(transformers, name)(config)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    return model


def llava() -> tuple[nn.Module, Any]:
    """Returns a LLaVA model that sees images of 28 x 28 pixels in patches of 14, and its processor."""
    torch.manual_seed(0)
    text = transformers.Qwen2Config(**WIDTHS)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=28,
        patch_size=14,
        projection_dim=16,
    )
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_id=SPECIAL["<image>"], image_seq_length=4
    )
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, WIDTHS[name])
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    size = {"height": 28, "width": 28}
    processor = transformers.LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size),
        tokenizer=tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=CHATML,
    )
    return transformers.LlavaForConditionalGeneration(config), processor


class Hub:
    """A folder of the layout of the hub's cache; ``HF_HUB_CACHE`` has to name it, and ``HF_HUB_OFFLINE`` be 1."""

    REVISION = "0" * 40

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, *parts: Any) -> None:
        """Put a model, a tokenizer or a processor there, under the name of a repository ("organisation/name")."""
        place = self.folder / f"models--{name.replace('/', '--')}"
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / "main").write_text(self.REVISION)
        for part in parts:
            part.save_pretrained(place / "snapshots" / self.REVISION)


def trl_hub(folder: Path) -> None:
    """Fill a folder with stand-ins for the models that TRL's GRPO tests load."""
    hub = Hub(folder)
    for name, (architecture, settings) in CAUSAL.items():
        template = QWEN3.read_text() if architecture.startswith("Qwen3") else CHATML
        hub.add(f"trl-internal-testing/{name}", causal(architecture, **settings), tokenizer(template))
    for name, architecture in CLASSIFIERS.items():
        classifier = _model(f"{architecture}ForSequenceClassification", architecture, {**WIDTHS, "num_labels": 1})
        hub.add(f"trl-internal-testing/{name}", classifier, tokenizer())
    hub.add("trl-internal-testing/tiny-LlavaForConditionalGeneration", *llava())


def with_own_tokens(source: str) -> str:
    """Returns a test's source with ids of ``tokenizer()`` in place of the ids of Qwen's vocabulary written out there.

    >>> done = next(place for place, word in enumerate(WORDS.values()) if word == "Done")
    >>> with_own_tokens("[17453, 0, 151645]") == f"[{BYTES + done}, 0, {SPECIAL['<|im_end|>']}]"
    True
    """
    first_special = SPECIAL["<|endoftext|>"]
    places = {number: BYTES + place for place, number in enumerate(WORDS)}
    special = {QWEN_SPECIAL + i: first_special + i for i in range(len(SPECIAL) - 1)}

    def renumbered(found: re.Match[str]) -> str:
        return re.sub(r"\d+", lambda n: str({**places, **special}.get(int(n[0]), n[0])), found[0])

    completions = re.sub(rf"\[[\d, ]*\b{QWEN_SPECIAL // 100}\d\d\b[\d, ]*\]", renumbered, source)
    return re.sub(rf"\b{QWEN_SPECIAL // 100}\d\d\b", lambda n: str(special.get(int(n[0]), n[0])), completions)


# ------------------------------------------------------------------------------------------------------ data sets

SUBJECTS = ("rain", "a river", "the sea", "iron", "glass", "bread", "chalk")
"""One row each: the first 5 for training, fewer than TRL's 17, to save time."""


def load_dataset(path: str, name: str, split: str | None = None, streaming: bool = False) -> Any:
    """Returns the columns that TRL's ``zen`` data sets have, with other text; for a path that is not one of them,
    ``LookupError``.
    """
    if path not in (
        "trl-internal-testing/zen",
        "trl-internal-testing/zen-image",
        "trl-internal-testing/zen-multi-image",
    ):
        raise LookupError(f"there is no stand-in for the data set {path!r}")
    asked = [f"What is {subject}?" for subject in SUBJECTS]
    columns: dict[str, list[Any]] = {"prompt": asked}
    if name.startswith("conversational"):
        columns["prompt"] = [[{"role": "user", "content": text}] for text in asked]
    if name.endswith("completion"):
        columns["completion"] = [[{"role": "assistant", "content": f"{subject}."}] for subject in SUBJECTS]
    made = Dataset.from_dict(columns)
    if path != "trl-internal-testing/zen":
        chance = np.random.default_rng(0)
        pixels = [chance.integers(0, 255, (40, 40, 3), dtype=np.uint8) for _ in SUBJECTS]
        several = path.endswith("multi-image")
        made = Dataset.from_dict(
            {"prompt": columns["prompt"], **({"images": [[p, p] for p in pixels]} if several else {"image": pixels})},
            features=Features(
                {
                    "prompt": [{"role": Value("string"), "content": Value("string")}],
                    **({"images": List(Image())} if several else {"image": Image()}),
                }
            ),
        )
    splits = {"train": made.select(range(5)), "test": made.select(range(5, len(made)))}
    if streaming:
        splits = {name: part.to_iterable_dataset() for name, part in splits.items()}
    return DatasetDict(splits) if split is None else splits[split]
